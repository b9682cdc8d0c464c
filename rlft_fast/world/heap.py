"""Memory that the C library keeps for the next tensors instead of giving it back to the system."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_NEVER = -1
_LARGEST_PIECE = 1 << 30  # larger ones are given back
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Has glibc keep what the tensors of this process free, from now on.

    Each pass of a model would take its memory from the system again, page by page. The resident set then stays as large
    as it was at its peak. With another C library, or where the environment sets malloc's thresholds, nothing changes.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _SET_BY_USER):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_PIECE)
        mallopt(_TRIM_THRESHOLD, _NEVER)
