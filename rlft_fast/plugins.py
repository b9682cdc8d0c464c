"""Functions by name: built-in functions, or a user's as ``module:function`` or ``path/to/file.py:function``.

A user's file is a module below this one, whose name holds the path of the file: two files of one name are two modules,
and a process of a pool, which unpickles a function by the name of its module, can import the file itself.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlft_fast.errors import brief
from rlft_fast.files import require_no_utf16

PLUGIN_PREFIX = f"{__name__}.file_"
"""Names of modules that were loaded from a user's file begin with it."""

__path__: list[str] = []  # Python then looks for modules below this one, and asks `_UserFiles`


class MissingFunctionError(ValueError):
    """A name or a spec names no function."""


def find_function(what: str, known: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """A known function by its name, or a user's function loaded by `load_function`.

    Args:
        what: the kind of function, for messages.
        known: built-in functions by name.
        name: a name in `known`, or a spec as in `load_function`.

    Raises:
        MissingFunctionError: there is no such function. The message lists the known names.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise MissingFunctionError(
            f"{what} is {name!r}, expected one of {', '.join(known)}, or module:function for your own"
        )
    return load_function(what, name)


def load_function(what: str, spec: str) -> Callable[..., Any]:
    """Loads a function from a module or a file.

    Args:
        what: the kind of function, for messages.
        spec: "module:function" for a module that can be imported, also from the working directory
            (`rlft_fast.rewards:last_number`), or "path/to/file.py:function" for a file, relative to the working
            directory. The file can import the modules beside it. It runs once per process, and again after it was
            edited.

    Returns:
        The function. Exceptions of the module's code are passed on, but for `SystemExit` and a file that is no Python.

    Raises:
        MissingFunctionError: the spec has no function name, the module, file or function does not exist, or it is not
            callable. The message suggests close names.
        ValueError: the file is no Python or would import another module than the one
            beside it, or the module calls sys.exit.
    """
    module_name, _, function_name = spec.rpartition(":")
    is_file = module_name.endswith(".py")
    if not function_name or not (is_file or all(part.isidentifier() for part in module_name.split("."))):
        raise MissingFunctionError(f"{what} is {spec!r}, expected 'module:function' or 'path/to/file.py:function'")
    try:
        module = _load_file(Path(module_name)) if is_file else _import_module(module_name)
    except BaseException as error:
        if isinstance(error, (Exception, KeyboardInterrupt)):
            raise
        raise ValueError(  # sys.exit would end the run without a word
            f"{what} {spec} cannot be loaded: its code raises {type(error).__name__}: {brief(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name, value in vars(module).items() if callable(value)]
        raise MissingFunctionError(f"{module_name} has no function {function_name!r}{suggestion(function_name, names)}")
    if not callable(function):
        raise MissingFunctionError(f"{spec} is of type {type(function).__name__}, expected a function")
    return function


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters in order, without ``*args`` and ``**rest``."""
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind not in collecting)


def required_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters that have no default, without ``*args`` and ``**rest``."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in parameter_names(function) if parameters[name].default is inspect.Parameter.empty)


def function_name(function: Callable[..., Any]) -> str:
    """Name of a function in messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Ending of a message about an unknown name: " (did you mean …?)", or "" if no candidate is close."""
    close = difflib.get_close_matches(name, list(candidates))
    return f" (did you mean {', '.join(close)}?)" if close else ""


class _UserFiles(MetaPathFinder):
    """Finds the file of a module whose name `_module_name` has made."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PLUGIN_PREFIX):
            return None
        file = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 16)), fullname.removeprefix(PLUGIN_PREFIX)))
        _search(file.parent)
        _versions[fullname] = _version(file)
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_UserFiles())
_ESCAPED = re.compile("_([0-9a-f]+)_")
_searched: list[Path] = []
_versions: dict[str, tuple[int, int]] = {}  # of the files that have run, by the names of their modules


def _module_name(file: Path) -> str:
    return PLUGIN_PREFIX + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in str(file))


def _search(folder: Path) -> None:
    """Has Python look for modules in a folder, after all other places: no file there hides an installed module."""
    if folder not in _searched:
        _searched.append(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_module(name: str) -> ModuleType:
    _search(Path.cwd())  # as `python -m` does; the command `rlft-fast` does not
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is an error of the module, not of the spec.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        parent, _, last = error.name.rpartition(".")
        paths = getattr(importlib.import_module(parent), "__path__", []) if parent else None
        names = [module.name for module in pkgutil.iter_modules(paths)]
        raise MissingFunctionError(
            f"there is no module {error.name!r}{suggestion(last, names)}; to load a file, give its path: "
            "path/to/file.py:function"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        names = [sibling.name for sibling in path.parent.glob("*.py")]
        raise MissingFunctionError(f"there is no file {str(path)!r}{suggestion(path.name, names)}")
    path = path.resolve()
    name = _module_name(path)
    if _versions.get(name) != _version(path):
        _require_own_siblings(path)
        sys.modules.pop(name, None)
    return importlib.import_module(name)


def _version(file: Path) -> tuple[int, int]:
    """Another one after the file was edited."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size


def _require_own_siblings(path: Path) -> None:
    """Raises ValueError if an import of the file would find the module of another user's folder in place of its own."""
    try:
        source = path.read_bytes()
        require_no_utf16(source)
        compile(source, path, "exec", dont_inherit=True)
        nodes = [*ast.walk(ast.parse(source))]
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno} is no Python: {error.msg}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no Python: {error}") from error
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    users = {*_searched, Path.cwd()}
    places = [place for entry in sys.path if (place := Path(entry).resolve()) in users]
    for name in dict.fromkeys(name.partition(".")[0] for name in imported):
        first = next((place for place in [*places, path.parent] if _holds(place, name)), path.parent)
        if first != path.parent and _holds(path.parent, name):
            raise ValueError(
                f"{path} imports {name!r}, which is in its own folder and in {first}, where Python finds it first: "
                "rename one of the two"
            )


def _holds(folder: Path, name: str) -> bool:
    return any(os.path.isfile(folder / file) for file in (f"{name}.py", f"{name}/__init__.py"))
