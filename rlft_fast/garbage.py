"""Python's garbage collector, kept out of work that makes many objects and no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector does not run inside.

    It would look through all objects again and again. Of reading rows this is a quarter of the time, of importing torch
    and transformers, too.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
