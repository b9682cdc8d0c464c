"""Time, memory and waiting in the parts of a step."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rlft_fast.cluster import TotalUsage
from rlft_fast.world import SPANS, PeakMemory, Span, World

# Generators, environments and reward functions note their own work, in any thread.
_NOTED = ("teacher", "logprobs", "update", "sync")


class Phases:
    """Measures the phases of one step on this rank.

    Memory is the peak of what torch's allocator holds on a GPU, and the peak of the resident set on a CPU. Both peaks
    restart at the beginning of a phase, so that a peak over more than a phase is the largest of its phases.

    Args:
        world: the ranks that make the step together.
        elsewhere: the models live in workers, and this process drives them. The function returns what calls took of the
            workers since it was last called. Time, memory and waiting are theirs then.
    """

    def __init__(self, world: World, *, elsewhere: Callable[[], TotalUsage] | None = None) -> None:
        self.world = world
        self.elsewhere = elsewhere
        self._peak = PeakMemory(world.device)
        self.restart()

    def restart(self) -> None:
        """Forgets the step that was measured."""
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.busy_seconds: dict[str, list[float]] = {}  # of this rank, or of each worker

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A phase, or another part of it."""
        self._peak.restart() if self.elsewhere is None else self.elsewhere()
        started = time.perf_counter()
        is_noted = self.elsewhere is None and name in _NOTED
        with torch.profiler.record_function(name), SPANS.noted(name) if is_noted else contextlib.nullcontext():
            yield  # in a trace of the step
        seconds = time.perf_counter() - started
        took = TotalUsage(self._peak.measure(), seconds) if self.elsewhere is None else self.elsewhere()
        self._add_seconds(name, took.seconds)
        for worker, start, end in took.spans:
            SPANS.add(Span(name, worker, start, end))
        if took.peak_bytes is not None:
            self.peak_bytes[name] = max(took.peak_bytes, self.peak_bytes.get(name, 0))
        if took.busy_seconds:
            self._add_busy(name, took.busy_seconds)

    def busy(self, name: str, seconds: float) -> None:
        """Adds time in which this process did its own share of a phase, and so waited for no other rank.

        A driver's own share comes before or after the calls of its workers.
        """
        if self.elsewhere is None:
            self._add_busy(name, (seconds,))
        else:
            self._add_seconds(name, seconds)

    def within(self, name: str, seconds: float) -> None:
        """Adds time of this process that is a part of a phase, and has a name of its own."""
        self._add_seconds(name, seconds)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _add_busy(self, name: str, seconds: Sequence[float]) -> None:
        before = self.busy_seconds.get(name, [0.0] * len(seconds))
        self.busy_seconds[name] = [x + own for x, own in zip(before, seconds, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Numbers of all ranks; all ranks must call it together.

        ``seconds_*``: this rank's time in a phase [s]; of a driver, the calls of the worker with the most, and the
        driver's own share. ``memory_gib_*``: the peak of the rank with the highest peak [GiB]. ``idle_share_*``: the
        share of the slowest rank's work in which the other ranks, on average, wait. A number that is not measured is
        left out.
        """
        own = {f"{name}.peak_max": float(peak) for name, peak in self.peak_bytes.items()}
        for name, seconds in self.busy_seconds.items():
            own |= {f"{name}.busy": sum(seconds) / len(seconds), f"{name}.busy_max": max(seconds)}
        found = self.world.all_reduce({name: torch.tensor(value) for name, value in own.items()})
        metrics = {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
        metrics |= {f"memory_gib_{name}": found[f"{name}.peak_max"].item() / 2**30 for name in self.peak_bytes}
        for name in self.busy_seconds:
            mean, most = found[f"{name}.busy"].item() / self.world.size, found[f"{name}.busy_max"].item()
            metrics[f"idle_share_{name}"] = 1 - mean / most if most else 0.0
        return metrics
