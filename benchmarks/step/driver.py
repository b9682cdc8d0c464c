"""`python -m benchmarks.step.driver`: what a step costs the driver of a cluster; writes benchmarks/results/driver.*.

The driver gathers samples, packs, judges and plans them, cuts a share for each worker, hands it over, and puts the
outputs in order. The workers are simulated: each share is serialized as for Ray, and its buffers are copied once, as
into Ray's object store. No model runs. It needs 12 GiB, and takes about four minutes.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from benchmarks.step.host import OUTPUTS, Step, Workload, draw_rollout
from benchmarks.step.host import STAGES as HOST_STAGES
from benchmarks.support.document import Bar, bar_table, fill, table, write_files
from benchmarks.support.harness import environment, free_memory, fresh_memory, reset_peak, status_bytes
from benchmarks.support.picture import OURS_COLOR, save
from rlft_fast.cluster.buffers import to_array
from rlft_fast.cluster.dispatch import split_batch
from rlft_fast.world import keep_freed_memory

ROOT = Path(__file__).parents[2]
MAX_SECONDS, MAX_GB = 4.0, 8.0
STEPS = 3  # the first takes its memory from the system
PLAN = "plan"
DISPATCH = "shares of all workers, into the store"


class _Pickler(pickle.Pickler):
    """Pickles tensors as Ray does in this package's processes."""

    def reducer_override(self, value: object) -> object:
        return (to_array, (to_array(value),)) if isinstance(value, Tensor) else NotImplemented


class _Sink:
    """Takes the bytes of a pickle and of its buffers, one share after the other, in the same memory."""

    def __init__(self) -> None:
        self.memory = bytearray()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self._copy(memoryview(data).cast("B"))
        return len(data)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        self._copy(buffer.raw())

    def _copy(self, view: memoryview) -> None:
        if len(view) > len(self.memory):
            self.memory = bytearray(len(view))
        memoryview(self.memory)[: len(view)] = view
        self.num_bytes += len(view)


class DriverStep(Step):
    """A step whose shares go to workers."""

    sent_bytes = 0

    def make_ready(self, stage: str) -> None:
        if stage == OUTPUTS:
            self.make_plan()
        super().make_ready(stage)

    def dispatch(self) -> None:
        split = split_batch(self.batch, (), self.work.max_tokens, self.work.num_ranks, 1, trains=False)
        sink = _Sink()
        for arguments in split.arguments:
            _Pickler(sink, protocol=5, buffer_callback=sink.take).dump(arguments)
        self.sent_bytes = sink.num_bytes


# The plan is a part of the dispatch, and puts the outputs in order.
STAGES = {name: stage for name, stage in HOST_STAGES.items() if name not in (PLAN, "micro-batches of a rank")}
STAGES |= {DISPATCH: DriverStep.dispatch}  # type: ignore[dict-item]


@dataclass
class Cost:
    """A step with so many workers: CPU seconds, and most bytes beyond the samples, by stage; and bytes sent."""

    work: Workload
    seconds_of: dict[str, float]
    bytes_of: dict[str, int]
    sent_bytes: int


def measure(works: Sequence[Workload]) -> list[Cost]:
    """Memory of one step each, and then seconds of the median step of `STEPS` each, in a process that keeps memory."""
    bytes_of = [_bytes_of(work) for work in works]
    keep_freed_memory()  # as the driver of a run does; the peaks need malloc to give memory back
    return [Cost(work, _seconds_of(work), *found) for work, found in zip(works, bytes_of, strict=True)]


def _bytes_of(work: Workload) -> tuple[dict[str, int], int]:
    """Most bytes beyond the samples, by stage; and bytes sent."""
    with fresh_memory():
        step = DriverStep(work, draw_rollout(work))
        free_memory()
        before = status_bytes("VmRSS")
        most = {}
        for name, stage in STAGES.items():
            step.make_ready(name)
            reset_peak()
            stage(step)
            most[name] = status_bytes("VmHWM") - before
    return most, step.sent_bytes


def _seconds_of(work: Workload) -> dict[str, float]:
    """CPU seconds by stage."""
    steps: list[dict[str, float]] = []
    for _ in range(STEPS):
        step = DriverStep(work, draw_rollout(work))
        steps.append({})
        for name, stage in STAGES.items():
            step.make_ready(name)
            started = time.process_time()
            stage(step)
            steps[-1][name] = time.process_time() - started
        del step
    return sorted(steps, key=lambda own: sum(own.values()))[STEPS // 2]


METHOD = """\
{num_tokens} tokens in {num_samples} completions, {group_size} of each prompt. Completions are as long as in
[the step on the host](host.md). For each number of workers, the median of three steps gives the seconds, and one more
step gives the memory. While seconds are measured, the process keeps the memory that it frees, as the driver of a run
does. The plan is a part of the dispatch. The update needs one dispatch; a step
with inference, a reference and a critic dispatches the batch several times. The time of the network and of the workers
is not counted. The CPU seconds are of the process, the kernel's included, with {threads} thread(s) of torch. Memory is
the peak of the resident set during a stage, less the resident set before the step, when the samples were there; the
store's own memory is not in it."""


def write_report(costs: Sequence[Cost], output: Path) -> bool:
    """Writes driver.md, driver.json and driver.png; returns whether all bars hold."""
    last, facts = costs[-1], environment()
    total, most = sum(last.seconds_of.values()), max(last.bytes_of.values()) / 1e9
    what = f"{last.work.num_tokens / 1e6:g} M tokens, {last.work.num_ranks} workers"
    bars = [
        Bar(f"CPU seconds of the driver, {what}", total, MAX_SECONDS, unit=" s"),
        Bar(f"memory besides the store, {what}", most, MAX_GB, unit=" GB"),
    ]
    header = ("stage", *(f"{cost.work.num_ranks} workers" for cost in costs))
    seconds = [(name, *(f"{cost.seconds_of[name]:.2f}" for cost in costs)) for name in STAGES]
    seconds.append(("in all", *(f"{sum(cost.seconds_of.values()):.2f}" for cost in costs)))
    memory = [(name, *(f"{cost.bytes_of[name] / 1e9:.2f}" for cost in costs)) for name in STAGES]
    sent = ("GB sent", *(f"{cost.sent_bytes / 1e9:.2f}" for cost in costs))
    sections = [
        "## Bars", bar_table(bars), "## CPU seconds", table(header, seconds),
        "## Most GB beyond the samples", table(header, [*memory, sent]),
        "## Method", fill(METHOD.format(**asdict(last.work), threads=torch.get_num_threads())),
    ]  # fmt: skip
    raw = {"environment": facts, "costs": [asdict(cost) for cost in costs]}
    subtitle = f"{facts['cpu']}, {facts['date']}, {what}"
    print(write_files(
        output, "driver", "A step on the driver of a cluster", facts, sections, raw,
        lambda path: save_plot(last, path, subtitle),
    ))  # fmt: skip
    return all(bar.holds for bar in bars)


def save_plot(cost: Cost, path: Path, subtitle: str) -> None:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    bars = axis.barh([*STAGES], [*cost.seconds_of.values()], color=OURS_COLOR)
    axis.bar_label(bars, fmt="{:.2f}", padding=4)
    axis.set_xlabel("CPU seconds")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, subtitle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=64, help="of tokens")
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024], help="rising")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    works = [replace(Workload.of_millions(args.millions), num_ranks=workers) for workers in args.workers]
    return 0 if write_report(measure(works), args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
