"""Runs that draw no curve: to draw takes longer than a step of a toy."""

import contextlib
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec


@contextlib.contextmanager
def without_matplotlib() -> Iterator[None]:
    """A run does not find it. Packages that import it, such as reasoning-gym, still do."""
    find_spec = importlib.util.find_spec

    def finding(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "matplotlib" else find_spec(name, package)

    importlib.util.find_spec = finding
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
