"""Errors that are no bug of this program, and the escaping of text for a terminal.

The command line prints only the message of these errors, without a traceback.
"""

import ast
import inspect
import signal as signals
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from rlft_fast.garbage import uncollected

T = TypeVar("T")

# What the extra `train` of pyproject.toml brings, by the names that are imported.
TRAIN_MODULES = ("numpy", "pydantic", "rich", "safetensors", "transformers", "yaml")


class RunError(RuntimeError):
    """Something that a run depends on has failed. The message is for users."""


class StepError(Exception):
    """A part of a step failed. Models are as the last complete step left them.

    Attributes:
        part: what failed, for users.
        is_divergence: the models themselves are the cause, so that their state is not worth saving.
    """

    part = "step"
    is_divergence = False


class Interrupted(KeyboardInterrupt):
    """A signal stopped a run. The run has saved its last complete step.

    Args:
        signal: number of the signal.
    """

    def __init__(self, signal: int = signals.SIGINT) -> None:
        super().__init__(signals.Signals(signal).name)
        self.signal = signal


class Checks:
    """Runs checks that need not each other, and raises together what they find."""

    def __init__(self) -> None:
        self.found: list[Exception] = []

    def run(self, check: Callable[[], T]) -> T | None:
        """What the check returns; None where it raises a ValueError, OSError, ImportError or RunError."""
        try:
            return check()
        except _MistakesError as error:
            self.found += error.found
        except (ValueError, OSError, ImportError, RunError) as error:
            self.found.append(error)
        return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Whether the check raises none of them."""
        before = len(self.found)
        self.run(check)
        return len(self.found) == before

    def raise_found(self) -> None:
        """Raises the error that was found, or a ValueError with the messages of all."""
        found = {text_of(error): error for error in self.found}
        if len(found) == 1:
            raise next(iter(found.values()))
        if found:
            raise _MistakesError([*found.values()])


class _MistakesError(ValueError):
    """Several errors at once."""

    def __init__(self, found: list[Exception]) -> None:
        lines = "".join(f"\n{i}. {text_of(error)}" for i, error in enumerate(found, start=1))
        super().__init__(f"{len(found)} mistakes:{lines}")
        self.found = found


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
            error.msg = (
                f"{package} is not installed, and only the ops work without it: in the source folder, run "
                "pip install --no-build-isolation '.[train]'"
            )
        raise


def names_on_first_use(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports its names on first use. It needs the extra `train`.

    The package's source says where the names are, by its imports under ``if TYPE_CHECKING``. Type checkers read the
    same imports.

    Args:
        package: its name.

    Raises:
        ModuleNotFoundError: see `needing_train`; at once, not at the first use.
    """
    with needing_train():
        places = _imports_for_types(package)

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needing_train(), uncollected():
            return getattr(import_module(places[name]), name)

    return find


def _imports_for_types(package: str) -> dict[str, str]:
    """The module of every name that the package imports under ``if TYPE_CHECKING``."""
    source = inspect.getsource(import_module(package))
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    checked = (node for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for node in block.body)
    imports = (node for node in checked if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def printable(text: object) -> str:
    """Text of models, data, files or exceptions, safe for a terminal: invisible characters but line breaks are escaped.

    Control characters could move the cursor or recolor the screen. Marks of direction could reorder the text.
    """
    return "".join(x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode() for x in str(text))


def brief(value: object, most: int = 500) -> str:
    """The text of an exception or another value for a message, on one line. A long text loses its middle.

    Args:
        value: exceptions of templates and libraries may have megabytes, and exceptions of users' functions may raise
            where their text is made. An exception that says nothing has the name of its class.
        most: most characters.
    """
    return " ".join(text_of(value, most).split()) or type(value).__name__


def text_of(value: object, most: int = 10_000, convert: Callable[[object], str] = str) -> str:
    """As `brief`, but with the line breaks, and empty where the text is.

    Args:
        value: see `brief`.
        most: most characters.
        convert: `str` or `repr`.
    """
    try:
        text = convert(value)
    except BaseException as error:  # also of an integer with more digits than Python converts
        return f"({type(value).__name__} cannot be shown: {convert.__name__}() raises {type(error).__name__})"
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


@contextmanager
def without_panics() -> Iterator[None]:
    """Raises a panic of a library in Rust as a ValueError: its own class is no Exception, and has no public name.

    Raises:
        ValueError: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library panicked: {error}") from error
