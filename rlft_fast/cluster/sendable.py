"""What a driver sends to workers has to be pickled. An object that cannot be pickled is named by where it stands."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any

from rlft_fast.errors import RunError, brief, text_of
from rlft_fast.plugins import PLUGIN_PREFIX

_LONGEST_ERROR = 10_000  # characters


@contextmanager
def raising_little() -> Iterator[None]:
    """Has a worker raise no exception of megabytes, nor an exception whose text cannot be made, to its driver.

    Raises:
        RunError: in the place of such an exception, with its beginning and its end.
    """
    try:
        yield
    except Exception as error:
        if _is_short(error):
            raise
        raise RunError(f"{type(error).__name__}: {text_of(error, _LONGEST_ERROR)}") from None


def _is_short(error: Exception) -> bool:
    try:
        return len(str(error)) <= _LONGEST_ERROR
    except Exception:
        return False


def require_ray() -> None:
    """Raises ModuleNotFoundError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ModuleNotFoundError("Ray is not installed: pip install ray", name="ray")


def send_user_files() -> None:
    """Sends functions of a user's file by value: workers have not loaded the file."""
    from ray import cloudpickle

    for name, module in [*sys.modules.items()]:
        if name.startswith(PLUGIN_PREFIX):
            cloudpickle.register_pickle_by_value(module)


def require_sendable(what: str, thing: object) -> None:
    """Refuses an object that Ray could not send to workers.

    Args:
        what: the object, in the message.
        thing: the object.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: the object, or an object that it needs, cannot be pickled. The message names the latter.
    """
    require_ray()
    send_user_files()
    if (reason := _reason(thing)) is None:
        return
    path, culprit, seen = [], thing, {id(thing)}
    while part := next(((n, x) for n, x in _parts(culprit) if id(x) not in seen and _reason(x) is not None), None):
        path, culprit = [*path, part[0]], part[1]
        seen.add(id(culprit))
    where, kind = " -> ".join(path) or "it", type(culprit).__name__
    raise ValueError(
        f"{what} cannot be sent to the workers on Ray: {where} is of type {kind}, which cannot be pickled "
        f"({_reason(culprit) or reason}). Make it inside of the function that uses it"
    )


def _reason(thing: object) -> str | None:
    """Why the object cannot be pickled; None if it can."""
    from ray import cloudpickle

    try:
        cloudpickle.dumps(thing)
    except Exception as error:  # of the user's own methods, too
        return brief(error, 200)
    return None


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object needs, by the names in the code: globals, variables of a closure, attributes and elements."""
    if isinstance(thing, MethodType):
        yield from (("__self__", thing.__self__), (thing.__name__, thing.__func__))
    elif inspect.isfunction(thing):
        found = inspect.getclosurevars(thing)
        yield from {**found.globals, **found.nonlocals, **(thing.__kwdefaults__ or {})}.items()
        yield from ((f"default {i}", x) for i, x in enumerate(thing.__defaults__ or ()))
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", x) for key, x in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{i}]", x) for i, x in enumerate(thing))
    yield from getattr(thing, "__dict__", {}).items()
    slots = (getattr(kind, "__slots__", ()) for kind in type(thing).__mro__)
    yield from (
        (n, getattr(thing, n))
        for names in slots
        for n in ([names] if isinstance(names, str) else names)
        if not n.startswith("__") and hasattr(thing, n)
    )
