"""The peak of the memory that something takes."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

requires_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")


def peak_mib(step: Callable[[], object]) -> float:
    """Memory that ``step`` takes at most, beyond what the process holds before it, in its second run."""
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = _peak_kib()
    step()
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])
