"""Runs that draw no curve: to draw takes longer than a step of a toy."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_matplotlib() -> Iterator[None]:
    """As where it is not installed."""
    loaded = {name: sys.modules[name] for name in ("matplotlib",) if name in sys.modules}
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]
        sys.modules.update(loaded)
