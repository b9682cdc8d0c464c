"""Time and peak memory of named variants, interleaved in one process (Linux), on a GPU where there is one.

Memory comes first, before anything is timed. Each variant runs twice in fresh memory, and the second run is weighed:
the peak of the resident set during the run (VmHWM, reset through /proc/self/clear_refs), less the resident set before
the run, less the outputs. This is the scratch memory that a training step must have free. Freed heap goes back to the
system before each run; otherwise a run could hide its scratch in memory that an earlier run had freed. Buffers that a
library keeps for the life of the process exist after the first run, and so do not count.

Times come second. Every round runs every variant once, so that a slow phase of the machine hits all variants alike, and
a result is the median over the rounds. Times are taken in recycled memory: malloc hands out memory that was freed
before. Fresh pages would measure the system: on a virtual machine, the same 300 MB take 13 ms or 400 ms.

Every run begins with cold caches, as it does in a training step: a write larger than the caches comes before the run.
With warm caches, variants that share code or data with their neighbour in the round would look faster than they are.

On a GPU, torch's allocator recycles memory and knows its peak. Times are taken by events on the device, while the host
is ahead, as it is in a training step. The host's launches count only where the device has to wait for them.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

NUM_THREADS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOAD_AT_START = os.getloadavg()[0]  # later it is the benchmark's own
_CACHE_BYTES = 256 << 20  # more than any device's
_HEAD_START_CYCLES = 40_000_000  # about 20 ms
_LIBC = ctypes.CDLL("libc.so.6")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # glibc's malloc.h
Number = TypeVar("Number", int, float)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Variant:
    """One way to do one task.

    Attributes:
        task: what is computed; variants of one task compute the same.
        way: which implementation computes it.
        run: computes it once and returns every output, so that outputs do not count as scratch memory.
        peer: another project's code. A peer runs in fewer rounds, and its failure is reported instead of raised.
    """

    task: str
    way: str
    run: Callable[[], object]
    peer: bool = False

    @property
    def name(self) -> str:
        return f"{self.task} | {self.way}"


@dataclass
class Measurement:
    """The times of one variant, one per round, and its peak memory beyond inputs and outputs."""

    extra_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

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
        return self.extra_bytes / 2**20


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


def weigh(variants: Sequence[Variant], results: Results) -> Results:
    """Adds the scratch memory of each variant, and the peers that failed, to the results.

    On a CPU, call it before anything is timed.

    Args:
        variants: what to run, with unique names.
        results: results of other variants, or empty.
    """
    with _cheap_collection():
        for variant in variants:
            _attempt(variant, extra_bytes_of, results)  # the first run takes what libraries then keep
            if (extra_bytes := _attempt(variant, extra_bytes_of, results)) is not None:
                results.measured.setdefault(variant.name, Measurement()).extra_bytes = extra_bytes
    return results


def clock(
    variants: Sequence[Variant], results: Results, rounds: int = 5, peer_rounds: int | None = None,
    deadline: float = float("inf"),
) -> Results:  # fmt: skip
    """Times the variants, interleaved, and adds the times to the results.

    Args:
        variants: what to run, with unique names.
        results: from `weigh`, or empty.
        rounds: runs per variant.
        peer_rounds: runs per peer, spread evenly over the rounds; None for as many as everyone.
        deadline: in time.monotonic's seconds; no round begins after it.
    """
    with _cheap_collection(), recycled_memory() if DEVICE.type == "cpu" else nullcontext():
        for number in range(rounds):
            if number and time.monotonic() > deadline:
                print(f"out of time after {number} of {rounds} rounds", flush=True)
                break
            for variant in variants:
                count = peer_rounds if variant.peer and peer_rounds else rounds
                if number * count % rounds < count:
                    seconds = _attempt(variant, seconds_of, results)
                    if seconds is not None:
                        results.measured.setdefault(variant.name, Measurement()).seconds.append(seconds)
    return results


@contextmanager
def _cheap_collection() -> Iterator[None]:
    """Excludes existing objects from garbage collection, so that a collection before every sample costs little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _attempt(variant: Variant, sample: Callable[[Callable[[], object]], Number], results: Results) -> Number | None:
    """Returns the sample's value. If a peer fails, notes the reason and returns None."""
    if variant.name in results.unavailable:
        return None
    try:
        return sample(variant.run)
    except Exception as error:
        if not variant.peer:
            raise
        results.measured.pop(variant.name, None)
        results.unavailable[variant.name] = reason(error)
        return None


@contextmanager
def recycled_memory(reserve: int = 3 << 30) -> Iterator[None]:
    """Makes malloc hand out freed memory instead of asking the system for fresh pages (glibc).

    Args:
        reserve: bytes that are free from the start.
    """
    _LIBC.mallopt(_M_MMAP_MAX, 0)
    _LIBC.mallopt(_M_TRIM_THRESHOLD, -1)
    torch.ones(reserve, dtype=torch.uint8)
    try:
        yield
    finally:
        _LIBC.mallopt(_M_MMAP_MAX, 65536)  # glibc's defaults
        _LIBC.mallopt(_M_TRIM_THRESHOLD, 128 * 1024)


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Makes malloc take every larger piece from the system and give it back when it is freed (glibc)."""
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 2**16)
    try:
        yield
    finally:
        _LIBC.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the highest value that malloc itself would choose


def reason(error: Exception) -> str:
    """One line on why a peer cannot run."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    gc.collect()
    if DEVICE.type == "cuda":
        return _device_seconds_of(run)
    _clear_caches()
    start = time.perf_counter()
    outputs = run()
    seconds = time.perf_counter() - start
    del outputs
    return seconds


def _device_seconds_of(run: Callable[[], object]) -> float:
    torch.cuda._sleep(_HEAD_START_CYCLES)
    _clear_caches()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    outputs = run()
    end.record()
    torch.cuda.synchronize()
    del outputs
    return start.elapsed_time(end) / 1e3


def _clear_caches() -> None:
    torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=DEVICE).zero_()


def synchronise() -> None:
    """Waits for the device, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def synchronised(run: Callable[[], object]) -> Callable[[], object]:
    """Makes `run` return only when the device has finished: pytest-benchmark times by the host's clock."""

    def wait() -> object:
        outputs = run()
        synchronise()
        return outputs

    return wait


def measured(benchmark: Any, run: Callable[[], object], rounds: int) -> Any:
    """Weighs and times `run` for pytest-benchmark, and returns its outputs.

    Args:
        benchmark: pytest-benchmark's fixture, which keeps peak_mib, the memory beyond inputs and outputs [MiB].
        run: as in `Variant`.
        rounds: timed runs.
    """
    extra_bytes_of(run)  # takes what libraries then keep
    benchmark.extra_info["peak_mib"] = extra_bytes_of(run) / 2**20
    return benchmark.pedantic(synchronised(run), rounds=rounds, warmup_rounds=1)


COPY = "copy"


def copy_of(source: Tensor) -> Callable[[], None]:
    """Returns a function that copies `source` into memory allocated here, so that the copy counts as no output."""
    destination = torch.zeros_like(source)

    def copy() -> None:
        destination.copy_(source)

    return copy


def extra_bytes_of(run: Callable[[], object]) -> int:
    """Peak bytes beyond inputs and outputs of one run."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = run()
        return torch.cuda.max_memory_allocated() - before - output_bytes(outputs)
    free_memory()
    before = status_bytes("VmRSS")
    reset_peak()
    outputs = run()
    return status_bytes("VmHWM") - before - output_bytes(outputs)


def free_memory() -> None:
    """Gives freed memory back to the system."""
    gc.collect()
    _LIBC.malloc_trim(0)


def reset_peak() -> None:
    """Resets VmHWM to the current resident set."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(key: str) -> int:
    """Bytes of VmRSS (the resident set of this process) or of VmHWM (its peak)."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def output_bytes(outputs: object) -> int:
    """Bytes of all tensors in nested tuples."""
    if isinstance(outputs, Tensor):
        return outputs.nbytes
    return sum(map(output_bytes, outputs)) if isinstance(outputs, Iterable) else 0


def environment() -> dict[str, str]:
    """Machine, commit and versions: without them, numbers cannot be compared."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    gpu = {}
    if DEVICE.type == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name()}
        if shutil.which("nvidia-smi"):
            query = ["--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
            told = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=False)
            gpu["driver, clock, power limit"] = told.stdout.strip()
    return gpu | {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git.stdout.strip() or "not committed",
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": f"{len(os.sched_getaffinity(0))}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "load": f"{LOAD_AT_START:.1f} at the start",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
