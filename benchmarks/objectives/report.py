"""The report of the objectives' benchmark: bars, tables and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.objectives.workload import LEAN, OBJECTIVES, OURS, PADDING_FREE, RECOMPUTING, THEIRS, Workload
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import OURS_COLOR, save
from benchmarks.support.sides import Side

MAX_DIFFERENCE, MAX_MEMORY_RATIO = 1e-4, 0.6
# By objective and side. A reward model has no bar on its time.
MAX_TIME_RATIO = {("sft", THEIRS): 0.5, ("sft", PADDING_FREE): 0.9, ("dpo", THEIRS): 0.5}
_STATE_BYTES = 16  # of a parameter: float32 weights, gradients and two moments

METHOD = """\
An optimizer step of SmolLM2-135M-Instruct in float32 on the same rows, with AdamW and clipping at 1: {num_rows} rows
for SFT, with prompts of about {prompt} tokens and answers of about {answer}, of which the longest have several times as
many; {num_pairs} pairs for DPO and the reward model, with prompts of {pair_prompt} tokens and answers of about
{pair_answer}. Each side reads the texts with its own code. Ours is `RowsTrainer` as the commands run it, with
micro-batches of at most 384 tokens, or 768 for pairs. TRL's is the inner loop of `train()`, from `on_step_begin` to
`on_step_end`, with its default batch size of 8, or all rows where they are fewer. TRL's fused head is always on.

TRL recomputes activations in the backward pass unless told otherwise. The bars compare sides that keep them, which is
faster; the table also has both sides recomputing. Without recomputing, a smaller cap of tokens is our way to less
memory, and a smaller batch TRL's.

TRL's DPO runs its reference model in each step. Our reference is inferred once for a row and kept; each of our timed
steps pays for this pass again, as the first epoch does. Later epochs do not.

Each side runs in a process of its own, one at a time, in turns. Times are medians of {rounds} steps after a first step,
± the full range. CPU seconds are those of the process: where others use the machine, too, they change less than the
time. Memory is the peak of the resident set during a step, less the resident set after the imports, and less weights,
gradients and two moments in float32; of TRL's DPO also less the weights of its reference. Loss and gradient norm are
those of the first step, whose difference is relative. TRL reports torch's float32 norm, which is itself off by 2e-5."""


def write_report(found: dict[str, list[Side]], work: Workload, threads: int, output: Path) -> bool:
    """Writes objectives.md, objectives.json and objectives.png; returns whether all bars hold."""
    bars = [bar for objective, sides in found.items() for bar in bars_of(objective, sides)]
    facts = environment() | versions() | {"threads": str(threads)}
    rounds = len(next(iter(found.values()))[0].seconds)
    sections = ["## Bars", bar_table(bars)]
    for objective, sides in found.items():
        sections += [f"## {OBJECTIVES[objective]}", side_table(objective, sides)]
    sections += ["## Method", fill(METHOD.format(**asdict(work), rounds=rounds))]
    raw = {
        "environment": facts, "work": asdict(work),
        "steps": {objective: {side.name: side.steps for side in sides} for objective, sides in found.items()},
        "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars],
    }  # fmt: skip
    print(write_files(
        output, "objectives", "SFT, DPO and reward models beside TRL", facts, sections, raw,
        lambda path: save_plot(found, path, f"{facts['cpu']}, {facts['date']}"),
    ))  # fmt: skip
    return all(bar.holds for bar in bars)


def bars_of(objective: str, sides: list[Side]) -> list[Bar]:
    """What must hold of an objective, as far as its sides have run."""
    by_name, title = {side.name: side for side in sides}, OBJECTIVES[objective]
    ours = by_name[OURS]
    bars = [
        Bar(f"{title}: first {key.replace('_', ' ')}, largest difference", difference(sides, key), MAX_DIFFERENCE)
        for key in ("loss", "grad_norm")
    ]
    for (name, theirs), limit in MAX_TIME_RATIO.items():
        if name == objective and theirs in by_name:
            other = by_name[theirs]
            bars.append(Bar(f"{title}: time / {theirs}", ours.median_s / other.median_s, limit))
            bars.append(Bar(f"{title}: CPU time / {theirs}", ours.median_cpu_s / other.median_cpu_s, limit))
    for own, theirs in ((OURS, THEIRS), (LEAN, RECOMPUTING)):
        if own in by_name and theirs in by_name:
            ratio = beyond_mib(objective, by_name[own]) / beyond_mib(objective, by_name[theirs])
            bars.append(Bar(f"{title}: memory beyond the state / {theirs}", ratio, MAX_MEMORY_RATIO))
    return bars


def difference(sides: list[Side], key: str) -> float:
    """The largest relative difference of a number of the first step from ours."""
    ours, *others = (side.steps[0][key] for side in sides)
    return max((abs(other - ours) / abs(ours) for other in others), default=0.0)


def beyond_mib(objective: str, side: Side) -> float:
    """Memory beyond model, gradients and moments, and beyond a reference model."""
    has_reference = objective == "dpo" and side.name.startswith("TRL")
    state = (_STATE_BYTES + 4 * has_reference) * side.steps[0]["num_parameters"]
    return side.memory_mib - state / 2**20


def side_table(objective: str, sides: list[Side]) -> str:
    ours = sides[0]
    rows = [
        (
            side.name, f"{side.median_s:.2f} ± {side.spread_s:.2f}", f"{side.median_cpu_s:.2f}",
            f"{ours.median_s / side.median_s:.2f}", f"{ours.median_cpu_s / side.median_cpu_s:.2f}",
            f"{side.memory_mib:.0f}", f"{beyond_mib(objective, side):.0f}", f"{side.steps[0]['loss']:.7f}",
            f"{side.steps[0]['grad_norm']:.5f}",
        )
        for side in sides
    ]  # fmt: skip
    header = (
        "side", "time, s", "CPU time, s", "our time / its", "our CPU time / its", "memory, MiB",
        "beyond the state, MiB", "loss", "gradient norm",
    )  # fmt: skip
    return table(header, rows)


def save_plot(found: dict[str, list[Side]], path: Path, subtitle: str) -> None:
    """Draws time and memory of every side."""
    sides = [(objective, side) for objective, each in found.items() for side in each]
    names = [f"{OBJECTIVES[objective]}: {side.name}" for objective, side in sides]
    colors = [OURS_COLOR if side.name.startswith(OURS) else "#b8c0cc" for _, side in sides]
    figure, axes = plt.subplots(1, 2, figsize=(10, 1 + 0.3 * len(sides)), layout="constrained", sharey=True)
    for axis, values, label in (
        (axes[0], [side.median_s for _, side in sides], "time of a step, s"),
        (axes[1], [beyond_mib(*each) for each in sides], "memory beyond the state, MiB"),
    ):
        axis.bar_label(axis.barh(names, values, color=colors), fmt="{:.4g}", padding=4, fontsize=8)
        axis.margins(x=0.15)
        axis.set_xlabel(label)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].invert_yaxis()
    save(figure, path, subtitle)
