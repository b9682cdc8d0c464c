"""Errors that are nobody's mistake in this program; the command line prints their message alone."""


class RunError(RuntimeError):
    """What a run depends on has failed; the message is for users."""
