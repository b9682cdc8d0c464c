"""What a function launches on a GPU."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch


def count_launches(function: Callable[[], object], kernels: Iterable[str]) -> Counter[str]:
    """Calls the function twice and counts the second time how often each kernel is launched; a host sync raises."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return Counter(kernel for event in profile.events() for kernel in kernels if f"::{kernel}<" in event.name)
