"""Errors that are nobody's mistake in this program, and how text of theirs and of others is shown.

The command line prints the message of such an error alone.
"""

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


def printable(text: object) -> str:
    """Text of models, data, files and exceptions for a terminal: lines stay, all else that is invisible is escaped.

    Control characters could move the cursor or recolor the screen, and marks of direction reorder what is read.
    """
    return "".join(x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode() for x in str(text))
