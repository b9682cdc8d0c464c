"""`python -m benchmarks.step.host`: what a step costs on the host; writes benchmarks/results/host.*.

The host's part of a GRPO step is everything between the sampler and the model, and no arithmetic of a model: samples
are gathered, packed, judged, planned and cut, and the outputs of all ranks are put in order. Every stage is a function
of its own, and `STAGES` runs them in the order of a step. Run it on a machine that does nothing else, with 4 GiB free;
it takes about two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from benchmarks.support.document import Bar, bar_table, fill, table, write_files
from benchmarks.support.harness import (
    NUM_THREADS,
    environment,
    free_memory,
    fresh_memory,
    reset_peak,
    status_bytes,
)
from benchmarks.support.picture import OURS_COLOR, save
from rlft_fast.config import AlgorithmConfig
from rlft_fast.data import Batch, MicroBatchPlan, PackedLayout, Samples, join_outputs, plan_batch, share_prefixes
from rlft_fast.engine.forward import prepare_micro_batches
from rlft_fast.trainer.collect.experience import build_batch, rollout_metrics, rows_with_signal, scored_samples
from rlft_fast.trainer.learn.objective import Objective
from rlft_fast.world import World

ROOT = Path(__file__).parents[2]
VOCABULARY = 150_000
MAX_SECONDS, MAX_BYTES, MAX_GROWTH = 0.2, 80, 1.25


@dataclass(frozen=True)
class Workload:
    """A rollout, and the ranks that it is planned for.

    Attributes:
        num_tokens: of all prompts and completions.
        num_samples: completions in all.
        group_size: completions of a prompt.
        max_new_tokens: most tokens of a completion.
        max_tokens: cap on the rows of a micro-batch.
        num_ranks: ranks of the plan.
    """

    num_tokens: int = 16_000_000
    num_samples: int = 9_000
    group_size: int = 8
    max_new_tokens: int = 16_384
    max_tokens: int = 32_768
    num_ranks: int = 64

    @classmethod
    def of_millions(cls, millions: float) -> Workload:
        """The same shares of prompts and completions, in fewer samples."""
        whole = cls()
        num_groups = max(round(whole.num_samples * millions / 16 / whole.group_size), 2)
        return cls(num_tokens=round(millions * 1e6), num_samples=num_groups * whole.group_size)


OUTPUTS, WHOLE = "outputs in order", "whole step"
# Seconds per million tokens, and most bytes per token, of 16 M tokens at commit b521459: samples were Python lists. Two
# threads on the same idle AMD EPYC.
BEFORE = {
    "gather the samples": (0.145, 63), "find rows with a signal": (0.000, 43), "build the batch": (0.131, 81),
    "plan": (0.013, 84), "outputs in order": (0.028, 96), "metrics": (0.108, 140), "advantages": (0.020, 92),
    "micro-batches of a rank": (0.001, 84), WHOLE: (0.439, 140),
}  # fmt: skip


@dataclass
class Rollout:
    """What has been sampled and scored."""

    samples: Samples
    prompts: list[list[int]]


def draw_lengths(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the prompts, 300 to 2,000 tokens, and of the completions, with a long tail; together `num_tokens`."""
    draw = np.random.default_rng(0)
    prompts = np.exp(draw.uniform(np.log(300), np.log(2_000), work.num_samples // work.group_size)).astype(np.int64)
    for_completions = work.num_tokens - int(prompts.sum()) * work.group_size
    shares = draw.lognormal(0.0, 1.0, work.num_samples)
    completions = (shares / shares.sum() * for_completions).astype(np.int64).clip(1, work.max_new_tokens)
    return prompts, completions


def draw_rollout(work: Workload) -> Rollout:
    """The samples of all ranks, in the order of the ranks. Of N ranks, rank r answers prompts r, r + N, r + 2 N."""
    draw = np.random.default_rng(1)
    prompt_lengths, lengths = draw_lengths(work)
    prompts = [draw.integers(VOCABULARY, size=length).tolist() for length in prompt_lengths]
    number = np.arange(work.num_samples)
    rank = number // work.group_size % work.num_ranks
    order = rank.argsort(kind="stable")
    num_tokens = int(lengths.sum())
    samples = Samples(
        row_B=torch.from_numpy(number[order] // work.group_size),
        number_B=torch.from_numpy(number[order] % work.group_size),
        length_B=torch.from_numpy(lengths[order]),
        stopped_B=torch.from_numpy(lengths[order] < work.max_new_tokens),
        reward_B=torch.from_numpy(draw.integers(2, size=work.num_samples).astype(np.float64)),
        token_ids_T=torch.from_numpy(draw.integers(VOCABULARY, size=num_tokens, dtype=np.int32)),
        logprob_T=torch.from_numpy(-draw.standard_exponential(num_tokens, dtype=np.float32)),
        is_sampled_T=torch.ones(num_tokens, dtype=torch.bool),
        weight_version_T=torch.zeros(num_tokens, dtype=torch.int32),
    )
    return Rollout(samples, prompts)


class Step:
    """One step. Every stage adds its results, and results that a trainer keeps stay alive to the end."""

    samples: Samples
    with_signal: list[int]
    batch: Batch
    plan: MicroBatchPlan
    outputs: list[Tensor]
    metrics: dict[str, float]
    layouts: list[PackedLayout]

    def __init__(self, work: Workload, rollout: Rollout) -> None:
        self.work, self.rollout = work, rollout

    def gather(self) -> None:
        self.samples = self.rollout.samples.gather(World())

    def find_signal(self) -> None:
        self.with_signal = rows_with_signal(self.samples)

    def build(self) -> None:
        self.batch = build_batch(scored_samples(self.samples), self.rollout.prompts)

    def make_plan(self) -> None:
        self.plan = plan_batch(self.batch, self.work.max_tokens, self.work.num_ranks)

    def make_ready(self, stage: str) -> None:
        """What others do before a stage, which is not measured: the ranks compute log-probabilities."""
        if stage == OUTPUTS:
            assert self.batch.rollout_logprob_T is not None  # here they are the sampler's own
            of_rank = (self.batch.token_index(self.plan.rank_indices(rank)) for rank in range(self.plan.world_size))
            self.outputs = [self.batch.rollout_logprob_T[index] for index in of_rank]

    def gather_outputs(self) -> None:
        outputs_T = join_outputs(self.outputs, self.batch, self.plan)
        del self.outputs
        self.batch = self.batch.replace(logprob_T=outputs_T, old_logprob_T=outputs_T)

    def make_metrics(self) -> None:
        self.metrics = rollout_metrics(self.samples, self.batch, len(self.with_signal))

    def make_advantages(self) -> None:
        self.batch = Objective(AlgorithmConfig(), self.work.max_new_tokens).prepare(self.batch)

    def cut(self) -> None:
        """The micro-batches of one rank, and their layouts."""
        self.layouts = [share_prefixes(part) for part in prepare_micro_batches(self.batch, self.plan, 0)]


STAGES: dict[str, Callable[[Step], None]] = {
    "gather the samples": Step.gather,
    "find rows with a signal": Step.find_signal,
    "build the batch": Step.build,
    "plan": Step.make_plan,
    OUTPUTS: Step.gather_outputs,
    "metrics": Step.make_metrics,
    "advantages": Step.make_advantages,
    "micro-batches of a rank": Step.cut,
}


@dataclass
class Cost:
    """What a step of one size costs.

    Attributes:
        work: the size.
        bytes_of: most bytes beyond the samples during each stage.
        seconds_of: seconds of each stage, one entry per round.
    """

    work: Workload
    bytes_of: dict[str, int]
    seconds_of: dict[str, list[float]]

    def bytes_per_token_of(self, stage: str) -> float:
        return (max(self.bytes_of.values()) if stage == WHOLE else self.bytes_of[stage]) / self.work.num_tokens

    def seconds_per_million_of(self, stage: str) -> float:
        """The median over the rounds."""
        steps = map(sum, zip(*self.seconds_of.values(), strict=True))
        return statistics.median(steps if stage == WHOLE else self.seconds_of[stage]) / self.work.num_tokens * 1e6

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_token_of(WHOLE)

    @property
    def seconds_per_million(self) -> float:
        return self.seconds_per_million_of(WHOLE)


def weigh(work: Workload) -> dict[str, int]:
    """Runs a step in fresh memory; the most bytes beyond the samples that were resident during each stage."""
    with fresh_memory():
        step = Step(work, draw_rollout(work))
        free_memory()
        before, peaks = status_bytes("VmRSS"), {}
        for name, stage in STAGES.items():
            step.make_ready(name)
            reset_peak()
            stage(step)
            peaks[name] = status_bytes("VmHWM") - before
    return peaks


def clock(work: Workload, rounds: int) -> dict[str, list[float]]:
    """Runs a step so many times; the seconds of each stage."""
    seconds: dict[str, list[float]] = {name: [] for name in STAGES}
    rollout = draw_rollout(work)
    for _ in range(rounds):
        free_memory()  # also of the step before
        step = Step(work, rollout)
        for name, stage in STAGES.items():
            step.make_ready(name)
            started = time.perf_counter()
            stage(step)
            seconds[name].append(time.perf_counter() - started)
        del step
    return seconds


def measure(works: Sequence[Workload], rounds: int) -> list[Cost]:
    """Costs of every size. A first step fills the caches that libraries keep."""
    weigh(works[0])
    return [Cost(work, weigh(work), clock(work, rounds)) for work in works]


METHOD = """\
GRPO: {group_size} completions of every prompt, which has 300 to 2,000 tokens; lengths of completions are log-normal
with a long tail (sigma 1). The largest rollout has {num_samples} completions, the smaller ones have proportionally
fewer. One process takes the samples of all {num_ranks} ranks, as they arrive, so the time of the network is not in it.
The plan is for {num_ranks} ranks and at most {max_tokens} rows in a micro-batch; the outputs that are put in order are
the outputs of all ranks, and the micro-batches of one rank are cut and laid out.

Times are medians of {rounds} steps in one process. Large pieces of memory are fresh pages, as in a trainer: they take a
good part of the time. Memory is the peak of the resident set during a stage, less the resident set before the step,
when the samples were there; it counts the samples that are gathered, the batch and everything else that stays alive
until the stage."""


def bars_of(costs: Sequence[Cost]) -> list[Bar]:
    first, last = costs[0], costs[-1]
    growth = last.seconds_per_million / first.seconds_per_million
    millions = f"{last.work.num_tokens / 1e6:g} M tokens"
    return [
        Bar(f"seconds per million tokens, {millions}", last.seconds_per_million, MAX_SECONDS, unit=" s"),
        Bar(f"bytes per token beyond the samples, {millions}", last.bytes_per_token, MAX_BYTES, unit=" B"),
        Bar(f"time per token, {millions} / {first.work.num_tokens / 1e6:g} M", growth, MAX_GROWTH),
    ]


def write_report(costs: Sequence[Cost], rounds: int, output: Path) -> bool:
    """Writes host.md, host.json and host.png; returns whether all bars hold."""
    bars, facts = bars_of(costs), environment()
    sections = [
        "## Bars", bar_table(bars),
        "## Seconds per million tokens", stage_table(costs, Cost.seconds_per_million_of, "{:.3f}"),
        "## Most bytes per token beyond the samples", stage_table(costs, Cost.bytes_per_token_of, "{:.0f}"),
        "## At commit b521459, 16 M tokens in lists of Python numbers", before_table(),
        "## Method", fill(METHOD.format(**asdict(costs[-1].work), rounds=rounds)),
    ]  # fmt: skip
    raw = {"environment": facts, "costs": [asdict(cost) for cost in costs]}
    subtitle = f"{facts['cpu']}, {facts['date']}"
    print(write_files(
        output, "host", "A step on the host", facts, sections, raw, lambda path: save_plot(costs, path, subtitle)
    ))  # fmt: skip
    return all(bar.holds for bar in bars)


def stage_table(costs: Sequence[Cost], value: Callable[[Cost, str], float], form: str) -> str:
    """One row per stage and one for the whole step, one column per size."""
    rows = [(stage, *(form.format(value(cost, stage)) for cost in costs)) for stage in (*STAGES, WHOLE)]
    return table(("stage", *(f"{cost.work.num_tokens / 1e6:g} M tokens" for cost in costs)), rows)


def before_table() -> str:
    rows = [(stage, f"{seconds:.3f}", str(num_bytes)) for stage, (seconds, num_bytes) in BEFORE.items()]
    return table(("stage", "seconds per million tokens", "most bytes per token"), rows)


def save_plot(costs: Sequence[Cost], path: Path, subtitle: str) -> None:
    """Draws time and memory of every stage at the largest size."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    values = (Cost.seconds_per_million_of, Cost.bytes_per_token_of)
    labels = ("seconds per million tokens", "most bytes per token beyond the samples")
    for axis, value, label, form in zip(axes, values, labels, ("{:.3f}", "{:.0f}"), strict=True):
        bars = axis.barh(list(STAGES), [value(costs[-1], stage) for stage in STAGES], color=OURS_COLOR)
        axis.bar_label(bars, fmt=form, padding=4)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].invert_yaxis()
    save(figure, path, subtitle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 4, 16], help="of tokens, rising")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per size")
    parser.add_argument("--threads", type=int, default=NUM_THREADS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    costs = measure([Workload.of_millions(millions) for millions in args.millions], args.rounds)
    return 0 if write_report(costs, args.rounds, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
