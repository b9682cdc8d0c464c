"""Errors that are nobody's mistake in this program; the command line prints their message alone."""

import signal as signals


class RunError(RuntimeError):
    """What a run depends on has failed; the message is for users."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped a run, which has saved what it had learned.

    Args:
        signal: number of the signal.
    """

    def __init__(self, signal: int = signals.SIGINT) -> None:
        super().__init__(signals.Signals(signal).name)
        self.signal = signal
