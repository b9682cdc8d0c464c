"""Counts the kernels that a function launches on a GPU."""

import ctypes
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import torch

EMULATED = os.environ.get("RLFT_EMULATED_KERNELS")


def count_launches(function: Callable[[], object], kernels: Iterable[str]) -> Counter[str]:
    """Calls the function twice and counts the second time how often each kernel is launched; a host sync raises.

    The emulated GPU reports every kernel of the project. On a real GPU PyTorch's profiler reports, and only ``kernels``
    are looked for.
    """
    function()
    if EMULATED:
        return Counter(_emulated_launches(function))
    names = _profiled_launches(function)
    return Counter(kernel for name in names for kernel in kernels if re.search(rf"::{kernel}[<(]", name))


def _without_sync(function: Callable[[], object]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _profiled_launches(function: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _without_sync(function)
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


# ---- the emulated GPU -----------------------------------------------------------------------------------------------


def _emulated_launches(function: Callable[[], object]) -> list[str]:
    _take_launches()
    _without_sync(function)
    kernels = [_symbols()[place] for place in _take_launches()]
    return [re.sub(r"[<(].*", "", kernel.split("::(anonymous namespace)::", 1)[1]) for kernel in kernels]


def _take_launches() -> list[int]:
    places: list[int] = []
    take = ctypes.CFUNCTYPE(None, ctypes.c_int64)(places.append)
    ctypes.CDLL(EMULATED).rlft_emulator_launches(take)
    return places


@cache
def _symbols() -> dict[int, str]:
    """Names of functions by their distance from `rlft_emulator_launches`."""
    lines = subprocess.run(["nm", "-C", EMULATED], capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split(maxsplit=2) for line in lines if line[0] != " "]
    (origin,) = (int(address, 16) for address, _, name in symbols if name == "rlft_emulator_launches")
    return {int(address, 16) - origin: name for address, _, name in symbols}
