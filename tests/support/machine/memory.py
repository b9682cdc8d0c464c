"""Peak memory of a function, and the tensors that autograd saves."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

requires_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def peak_mib(step: Callable[[], object]) -> float:
    """Memory that ``step`` takes at most, beyond what it holds before: the least of three runs after a first.

    Meanwhile malloc returns freed memory to the system. Memory that malloc kept would hide an allocation, or would look
    like one. Pages that the system has taken from an idle process come back during a step, and only add to a run.
    """
    malloc = ctypes.CDLL(None)
    keep_no_freed_memory()
    try:
        step()
        return min(_added_kib(step, malloc) for _ in range(3)) / 1024
    finally:
        malloc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the highest value that malloc itself would choose


def keep_no_freed_memory() -> None:
    """From now on malloc returns freed memory of 64 KiB or more to the system.

    Holes of the heap that were freed before are used again all the same, and then stay resident: in a process that
    loaded a model before, they added 4 to 20 MiB to an export, by their sizes.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def _added_kib(step: Callable[[], object], malloc: ctypes.CDLL) -> int:
    gc.collect()
    malloc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = _peak_kib()
    step()
    return _peak_kib() - before


def _peak_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def peak_allocated_bytes(step: Callable[[], object]) -> int:
    """Peak bytes that ``step`` holds from torch's CPU allocator, touched or not, beyond the bytes held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@contextlib.contextmanager
def saved_sizes() -> Iterator[list[int]]:
    """Collects the number of elements of each tensor that is saved for backward inside the block."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        yield sizes
