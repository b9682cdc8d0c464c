"""Time and peak memory of named variants, interleaved in one process (Linux).

Every round runs every variant once, so that a slow phase of the machine hits all of them alike; results are medians
over the rounds. A run's memory is the peak of the resident set during the run (VmHWM, reset through
/proc/self/clear_refs) less the resident set before it and less what the run returned: exactly the scratch memory a
training step must have free. Freed heap is given back to the system before each run, outside the timer, or a run could
hide its scratch in what an earlier one left behind. Buffers that the BLAS keeps for the life of the process are no
one's scratch: the report runs bare GEMMs first, so that they are there before anything is compared.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

NUM_THREADS = 2
_LIBC = ctypes.CDLL("libc.so.6")
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Variant:
    """One way to do one task.

    Attributes:
        task: what is computed; variants of one task compute the same.
        way: who computes it.
        run: computes it once and returns every output, so that outputs do not count as scratch memory.
        peer: somebody else's code: it runs in fewer rounds, and its failure is reported instead of raised.
        compiled: compiles itself at the first run, which is therefore not measured.
    """

    task: str
    way: str
    run: Callable[[], object]
    peer: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.task} | {self.way}"


@dataclass
class Measurement:
    """Samples of one variant, one per round."""

    seconds: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def iqr_s(self) -> float:
        """Interquartile range; of fewer than four samples, the full range."""
        if len(self.seconds) < 4:
            return max(self.seconds) - min(self.seconds)
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return third - first

    @property
    def extra_mib(self) -> float:
        return statistics.median(self.extra_bytes) / 2**20


@dataclass
class Results:
    """Measurements by variant name, and the reason for every variant that has none."""

    measured: dict[str, Measurement] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Measurement:
        return self.measured[name]

    def ways(self, task: str) -> dict[str, Measurement]:
        """Measurements of one task by way, fastest first."""
        rows = {n.split(" | ")[1]: m for n, m in self.measured.items() if n.split(" | ")[0] == task}
        return dict(sorted(rows.items(), key=lambda row: row[1].median_s))


def measure(variants: Sequence[Variant], rounds: int = 5, peer_rounds: int | None = None) -> Results:
    """Runs the variants interleaved.

    Args:
        variants: what to run, with unique names.
        rounds: samples per variant.
        peer_rounds: samples per peer, spread evenly over the rounds; None for as many as everyone.

    Returns:
        Results: times and scratch memory, and the peers that failed.
    """
    results = Results()
    for variant in variants:
        if variant.compiled:
            _sample(variant, Results(unavailable=results.unavailable))
    for number in range(rounds):
        for variant in variants:
            count = peer_rounds if variant.peer and peer_rounds else rounds
            if number * count % rounds < count and variant.name not in results.unavailable:
                _sample(variant, results)
    return results


def _sample(variant: Variant, results: Results) -> None:
    try:
        seconds, extra_bytes = measure_once(variant.run)
    except Exception as error:
        if not variant.peer:
            raise
        results.unavailable[variant.name] = reason(error)
        return
    sample = results.measured.setdefault(variant.name, Measurement())
    sample.seconds.append(seconds)
    sample.extra_bytes.append(extra_bytes)


def reason(error: Exception) -> str:
    """One line on why a peer cannot run."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def measure_once(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds and peak bytes beyond inputs and outputs of one run."""
    gc.collect()
    _LIBC.malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM
    start = time.perf_counter()
    outputs = run()
    seconds = time.perf_counter() - start
    return seconds, _status_bytes("VmHWM") - before - output_bytes(outputs)


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def output_bytes(outputs: object) -> int:
    """Bytes of all tensors in nested tuples."""
    if isinstance(outputs, Tensor):
        return outputs.nbytes
    return sum(map(output_bytes, outputs)) if isinstance(outputs, Iterable) else 0


def environment() -> dict[str, str]:
    """What a reader needs to know to compare the numbers with others."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git.stdout.strip() or "not committed",
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": f"{len(os.sched_getaffinity(0))}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
