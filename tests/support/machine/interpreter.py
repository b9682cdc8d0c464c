"""Triton's interpreter in a tenth of its time."""

from functools import cache
from types import FunctionType

from triton.runtime import interpreter


def patch_language_once() -> None:
    """Has a kernel patch Triton's language once.

    The interpreter patches hundreds of names at each call of a function in a kernel, `tl.sum` included, although the
    kernel's own patch is in force: that is most of its time.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # of another version
        return
    patch, scopes = interpreter._patch_lang, {}  # of the kernel that runs, by the modules that are patched

    class Kernel:
        def restore(self) -> None:
            while scopes:
                scopes.popitem()[1].restore()

    @cache
    def patched_by(function: FunctionType) -> frozenset[str]:
        tl = interpreter.tl
        return frozenset(x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)

    def patch_once(function: FunctionType) -> Kernel:
        if (names := patched_by(function)) not in scopes:
            scopes[names] = patch(function)
        return Kernel()

    interpreter._patch_lang = patch_once
