"""The report of the benchmark of a whole step: bar, tables and a picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.step.sides import PARTS
from benchmarks.step.workload import Workload
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import OURS_COLOR, save
from benchmarks.support.sides import Side

MAX_TIME_RATIO = 0.7
_COLORS = dict(zip(PARTS, ("#d1495b", "#edae49", "#66a182", "#2e4057", "#8d96a3", "#c8ced6"), strict=True))

METHOD = """\
One GRPO step of SmolLM2-135M-Instruct in float32 on the CPU: {num_prompts} prompts, {num_samples} completions of each
with at most {max_new_tokens} tokens at temperature {temperature:g}, their rewards, and one AdamW step with clipping at
1. Ours is `PPOTrainer.train_step`. TRL's is a step of `GRPOTrainer.train()` with its own generation by transformers,
from `on_step_begin` to `on_step_end`. Prompts are arithmetic from reasoning-gym in the model's chat template, the same
tokens on both sides (checked). Also the same are learning rate, clipping range 0.2, loss (mean over all tokens of the
batch, TRL's `dapo`), no KL penalty, and reward (share of distinct words, so that every group has an advantage).
Completions come from an untrained model: most run into the limit, some end before. The two sides draw different random
numbers, so their lengths differ a little: by {difference:.1%} in all (at most 5% is let through).

TRL runs with `num_iterations=1`, `beta=0` and without gradient checkpointing; with these settings it infers no old
log-probabilities either. 8 sequences at a time is transformers' default (`--sides` also has 16). Liger's layer kernels
(`use_liger_kernel`) need Triton and so a GPU. TRL's own fused head is always on. Rollouts by vLLM are a side of ours
where vLLM is installed, also in float32.

Each side runs in a process of its own, one at a time, in turns. Times are medians of {rounds} steps after a first step,
± the full range. Memory is the peak of the resident set during a step, less the resident set after the imports.
Weights, gradients and moments alone take 2.2 GB in float32."""


def write_report(sides: list[Side], work: Workload, difference: float, threads: int, output: Path) -> dict[str, Any]:
    """Writes step.md, step.json and step.png; returns the ratios, and whether the bar holds."""
    ours, rival = sides[0], min((side for side in sides if side.name.startswith("TRL")), key=lambda s: s.median_s)
    others = [side for side in sides[1:] if not side.name.startswith("TRL")]
    ratios = {"time_ratio": ours.median_s / rival.median_s, "memory_ratio": ours.memory_mib / rival.memory_mib}
    ratios |= {f"time_ratio of {side.name}": side.median_s / rival.median_s for side in others}
    bar = Bar(f"time of a step / {rival.name}", ratios["time_ratio"], MAX_TIME_RATIO)
    facts = environment() | versions() | {"threads": str(threads)}
    sections = [
        "## Bar", bar_table([bar]),
        "## Steps", side_table(sides, rival),
        "## Time by part, s", part_table(sides),
        "## Method", fill(METHOD.format(**asdict(work), difference=difference, rounds=len(ours.seconds))),
    ]  # fmt: skip
    steps = {side.name: side.steps for side in sides}
    raw = {"environment": facts, "work": asdict(work), "steps": steps, "ratios": ratios}
    subtitle = f"{facts['cpu']}, {facts['date']}, SmolLM2-135M, 64 completions a step"
    print(write_files(
        output, "step", "A whole GRPO step beside TRL", facts, sections, raw,
        lambda path: save_plot(sides, path, subtitle),
    ))  # fmt: skip
    return ratios | {"against": rival.name, "holds": bar.holds}


def side_table(sides: list[Side], rival: Side) -> str:
    header = ("way", "time, s", "time / TRL's", "memory, MiB", "memory / TRL's", "generated tokens a step", "reward")
    rows = [
        (
            side.name, f"{side.median_s:.2f} ± {side.spread_s:.2f}", f"{side.median_s / rival.median_s:.2f}",
            f"{side.memory_mib:.0f}", f"{side.memory_mib / rival.memory_mib:.2f}",
            f"{statistics.mean(step['num_tokens'] for step in side.steps[1:]):.0f}",
            f"{statistics.mean(step['reward'] for step in side.steps[1:]):.3f}",
        )
        for side in sides
    ]  # fmt: skip
    return table(header, rows)


def part_table(sides: list[Side]) -> str:
    rows = [(part, *(f"{part_s(side, part):.2f}" for side in sides)) for part in PARTS]
    return table(("part", *(side.name for side in sides)), rows)


def part_s(side: Side, part: str) -> float:
    return statistics.median(step["parts"][part] for step in side.steps[1:])


def save_plot(sides: list[Side], path: Path, subtitle: str) -> None:
    """Draws every side's time by part, and its memory."""
    names = [side.name for side in sides]
    figure, (time, memory) = plt.subplots(
        1, 2, figsize=(10, 0.5 * len(sides) + 1.4), layout="constrained", width_ratios=(3, 1)
    )
    left = [0.0] * len(sides)
    for part in PARTS:
        seconds = [part_s(side, part) for side in sides]
        time.barh(names, seconds, left=left, label=part, color=_COLORS[part])
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    time.set_xlabel("time of a step, s")
    time.legend(ncols=len(PARTS), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    colors = [OURS_COLOR if name.startswith("rlft_fast") else "#b8c0cc" for name in names]
    memory.bar_label(memory.barh(names, [side.memory_mib for side in sides], color=colors), fmt="{:.0f}", padding=4)
    memory.set_xlabel("peak memory beyond imports, MiB")
    memory.set_yticklabels([])
    memory.margins(x=0.3)
    for axis in (time, memory):
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    save(figure, path, subtitle)
