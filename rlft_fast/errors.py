"""Errors that are no bug of this program, and the escaping of text for a terminal.

The command line prints only the message of these errors, without a traceback.
"""

import signal as signals
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

# What the extra `train` of pyproject.toml brings, by the names that are imported.
TRAIN_MODULES = ("numpy", "pydantic", "rich", "safetensors", "transformers", "yaml")


class RunError(RuntimeError):
    """Something that a run depends on has failed. The message is for users."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped a run. The run has saved its last complete step.

    Args:
        signal: number of the signal.
    """

    def __init__(self, signal: int = signals.SIGINT) -> None:
        super().__init__(signals.Signals(signal).name)
        self.signal = signal


@contextmanager
def needing_train() -> Iterator[None]:
    """Imports inside need the extra `train`; an install without it is told so.

    Raises:
        ModuleNotFoundError: the error of the import. If the extra brings the module, the message names the extra.
    """
    try:
        import_module("numpy")  # first, because torch warns where NumPy is missing
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) in TRAIN_MODULES:
            error.msg = f"{package} is not installed, and only the ops work without it: pip install 'rlft_fast[train]'"
        raise


def printable(text: object) -> str:
    """Text of models, data, files or exceptions, safe for a terminal: invisible characters but line breaks are escaped.

    Control characters could move the cursor or recolor the screen. Marks of direction could reorder the text.
    """
    return "".join(x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode() for x in str(text))
