"""Functions by name: built-in functions, or a user's as ``module:function`` or ``path/to/file.py:function``."""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PLUGIN_PREFIX = "rlft_fast_plugin_"
"""Names of modules that were loaded from a user's file begin with it."""


def find_function(what: str, known: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """A known function by its name, or a user's function loaded by `load_function`.

    Args:
        what: the kind of function, for messages.
        known: built-in functions by name.
        name: a name in `known`, or a spec as in `load_function`.

    Raises:
        ValueError: there is no such function. The message lists the known names.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ValueError(f"{what} is {name!r}, expected one of {', '.join(known)}, or module:function for your own")
    return load_function(what, name)


def load_function(what: str, spec: str) -> Callable[..., Any]:
    """Loads a function from a module or a file.

    Args:
        what: the kind of function, for messages.
        spec: "module:function" for an importable module (`rlft_fast.rewards:last_number`), or
            "path/to/file.py:function" for a file, relative to the working directory.

    Returns:
        The function. Errors that the code of the module raises while it loads are passed on unchanged, but for a file
        that is no Python.

    Raises:
        ValueError: the spec has no function name, the file is no Python, the module, file or function does not exist,
            or it is not callable. The message suggests close names.
    """
    module_name, _, function_name = spec.rpartition(":")
    is_file = module_name.endswith(".py")
    if not function_name or not (is_file or all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(f"{what} is {spec!r}, expected 'module:function' or 'path/to/file.py:function'")
    module = _load_file(Path(module_name)) if is_file else _import_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ValueError(f"{module_name} has no function {function_name!r}{suggestion(function_name, names)}")
    if not callable(function):
        raise ValueError(f"{spec} is of type {type(function).__name__}, expected a function")
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


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is an error of the module, not of the spec.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        parent, _, last = error.name.rpartition(".")
        paths = getattr(importlib.import_module(parent), "__path__", []) if parent else None
        names = [module.name for module in pkgutil.iter_modules(paths)]
        raise ValueError(
            f"there is no module {error.name!r}{suggestion(last, names)}; to load a file, give its path: "
            "path/to/file.py:function"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        names = [sibling.name for sibling in path.parent.glob("*.py")]
        raise ValueError(f"there is no file {str(path)!r}{suggestion(path.name, names)}")
    name = f"{PLUGIN_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename is None or Path(error.filename).resolve() != path.resolve():
            raise  # of a module that the file imports
        raise ValueError(f"{path}, line {error.lineno} is no Python: {error.msg}") from error
    return module
