"""The report of the engine's benchmark: bars, tables and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.engine.profile import PARTS
from benchmarks.engine.workload import Workload, make_workload
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import OURS_COLOR, save
from benchmarks.support.sides import Side

MAX_TIME_RATIO, MAX_MEMORY_RATIO, MAX_BEYOND_STATE, MAX_HOST_SHARE = 0.33, 0.58, 0.33, 0.03
MAX_SLOWDOWN = 1.1  # a TRL counts as fast up to this multiple of the fastest TRL's time
_VOCAB_SIZE, _NUM_PARAMETERS = 49152, 134_515_008  # SmolLM2-135M's
FOUR = "TRL, 4 sequences"
STATE_MIB = 16 * _NUM_PARAMETERS / 2**20  # float32 weights, gradients and two moments: the floor of every side

AGREEMENT = """\
Losses and gradient norms of all sides agree in every update, within {difference:.0e} of their values. TRL reports
torch's float32 norm, which is itself off by 2e-5."""

METHOD = """\
One GRPO update of SmolLM2-135M-Instruct in float32 on {num_sequences} sequences, {num_prompts} prompts with
{num_samples} completions each: forward and backward over all sequences, and one AdamW step with clipping at 1. Lengths
are log-normal with a fixed seed: {lengths}. Both sides get the same old log-probabilities, advantages and weights. Ours
is `FSDPEngine.train_step` with micro-batches of at most 384 tokens. TRL's is the inner loop of `GRPOTrainer.train()`,
from `on_step_begin` to `on_step_end`: its own shuffling, splitting, `training_step`, clipping, fused AdamW and metrics.
Only generating and scoring is replaced. TRL pads to the longest prompt and the longest completion; the engine packs,
and runs a prompt once for all its completions.

The first bar compares the faster of our updates with the fastest TRL. The bars on memory use our update that recomputes
each block's activations in backward (`activation_checkpointing: full`). Weights, gradients and moments take
{state:.0f} MiB on every side. One bar therefore compares the memory beyond this state, with the leanest TRL among those
that take at most {slowdown:g} times the time of the fastest TRL. The other bars compare the whole memory and the time
with TRL's at micro-batches of 4 sequences.

Liger's layer kernels (`use_liger_kernel`) were tried, too: they need Triton and so a GPU. TRL's own fused head is
always on. Neither side infers old log-probabilities, which a rollout that serves one update does not need; a row of
its own shows the cost of such a pass.

Each side runs in a process of its own, one at a time, in turns. Times are medians of {rounds} updates after a first
update, ± the full range. Memory is the peak of the resident set during an update, less the resident set after the
imports: imported libraries are not part of an update, but weights, gradients and moments are."""


BESIDE_LEANEST = """\
No bar: the peak memory of our update that recomputes is {ratio:.2f} of {leanest}, the leanest fast TRL. The float32
state alone (weights, gradients and moments, {state:.0f} MiB) is {floor:.3f} of it{consequence}."""


def write_report(
    sides: list[Side], parts: list[dict[str, float]], difference: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Writes engine.md, engine.json and engine.png; returns the ratios that the bars are on."""
    workload = make_workload(_VOCAB_SIZE, arguments["scale"])
    ours, lean = sides[:2]
    fastest, leanest = rivals(sides)
    four = next(side for side in sides if side.name == FOUR)
    beyond = (lean.memory_mib - STATE_MIB) / (leanest.memory_mib - STATE_MIB)
    share = {part: statistics.median(p[part] for p in parts) for part in PARTS}
    total = sum(share.values())
    bars = [
        Bar(f"time / {fastest.name}", ours.median_s / fastest.median_s, MAX_TIME_RATIO),
        Bar(f"peak memory, recomputing / {FOUR}", lean.memory_mib / four.memory_mib, MAX_MEMORY_RATIO),
        Bar(f"time, recomputing / {FOUR}", lean.median_s / four.median_s, MAX_TIME_RATIO),
        Bar(f"memory beyond the state, recomputing / {leanest.name}", beyond, MAX_BEYOND_STATE),
        Bar("host's share of train_step", share["host"] / total, MAX_HOST_SHARE),
    ]
    facts = environment() | versions() | {"threads": str(arguments["threads"])}
    sections = [
        "## Bars", bar_table(bars), leanest_ratio(lean, leanest),
        "## Updates", side_table(sides, workload.num_tokens),
        AGREEMENT.format(difference=difference),
        "## Time by part", part_table(share, workload.num_tokens),
        "## Method", method(workload, arguments["rounds"]),
    ]  # fmt: skip
    raw = {
        "environment": facts, "updates": {side.name: side.steps for side in sides}, "parts": parts,
        "num_tokens": workload.num_tokens, "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars],
    }  # fmt: skip
    subtitle = f"{facts['cpu']}, {facts['date']}, {workload.num_tokens} tokens"
    print(write_files(
        arguments["output"], "engine", "One GRPO update beside TRL", facts, sections, raw,
        lambda path: save_plot(sides, share, path, subtitle),
    ))  # fmt: skip
    return {bar.name: bar.value for bar in bars} | {"holds": all(bar.holds for bar in bars)}


def rivals(sides: list[Side]) -> tuple[Side, Side]:
    """The fastest TRL, and the leanest TRL among those that are about as fast."""
    theirs = [side for side in sides if side.name.startswith("TRL")]
    fastest = min(theirs, key=lambda side: side.median_s)
    as_fast = [side for side in theirs if side.median_s <= MAX_SLOWDOWN * fastest.median_s]
    return fastest, min(as_fast, key=lambda side: side.memory_mib)


def leanest_ratio(lean: Side, leanest: Side) -> str:
    """The whole memory beside the leanest fast TRL, as information and not as a bar."""
    floor = STATE_MIB / leanest.memory_mib
    unreachable = f", so {MAX_MEMORY_RATIO:g} of this configuration cannot be reached with this state"
    text = BESIDE_LEANEST.format(
        ratio=lean.memory_mib / leanest.memory_mib, leanest=leanest.name, state=STATE_MIB, floor=floor,
        consequence=unreachable if floor > MAX_MEMORY_RATIO else "",
    )  # fmt: skip
    return fill(text)


def method(workload: Workload, rounds: int) -> str:
    prompts, completions = ([len(row) for row in rows] for rows in (workload.prompts, workload.completions))
    described = [
        f"{name} of {min(n)} to {max(n)} tokens, median {statistics.median(n):g}"
        for name, n in (("prompts", prompts), ("completions", completions))
    ]
    text = METHOD.format(
        num_sequences=len(prompts), num_prompts=len(prompts) // 4, num_samples=4, lengths=", ".join(described),
        rounds=rounds, state=STATE_MIB, slowdown=MAX_SLOWDOWN,
    )  # fmt: skip
    return fill(text)


def side_table(sides: list[Side], num_tokens: int) -> str:
    ours = sides[0]
    rows = [
        (
            side.name, f"{side.median_s:.2f} ± {side.spread_s:.2f}", f"{num_tokens / side.median_s:.0f}",
            f"{side.memory_mib:.0f}", f"{side.peak_mib:.0f}", f"{ours.median_s / side.median_s:.2f}",
            f"{ours.memory_mib / side.memory_mib:.2f}", f"{side.steps[0]['loss']:.7f}",
            f"{side.steps[0]['grad_norm']:.5f}",
        )
        for side in sides
    ]  # fmt: skip
    header = (
        "way", "time, s", "tokens / s", "memory, MiB", "with imports", "our time / its", "our memory / its", "loss",
        "gradient norm",
    )  # fmt: skip
    return table(header, rows)


def part_table(share: dict[str, float], num_tokens: int) -> str:
    total = sum(share.values())
    rows = [(part, f"{s:.3f}", f"{s / total:.1%}", f"{num_tokens / s:.0f}") for part, s in share.items()]
    rows.append(("in all", f"{total:.3f}", "100%", f"{num_tokens / total:.0f}"))
    return table(("part", "time, s", "share", "tokens / s"), rows)


def save_plot(sides: list[Side], share: dict[str, float], path: Path, subtitle: str) -> None:
    """Draws time and memory of every side, and below them the parts of our time."""
    names = [side.name for side in sides]
    colors = [OURS_COLOR if name.startswith("rlft_fast") else "#b8c0cc" for name in names]
    figure, axes = plt.subplot_mosaic(
        [["time", "memory"], ["parts", "parts"]], figsize=(10, 4.2), layout="constrained", height_ratios=[3, 1]
    )
    for key, values, label in (
        ("time", [side.median_s for side in sides], "time of an update, s"),
        ("memory", [side.memory_mib for side in sides], "peak memory beyond imports, MiB"),
    ):
        axes[key].bar_label(axes[key].barh(names, values, color=colors), fmt="{:.4g}", padding=4, fontsize=8)
        axes[key].invert_yaxis()
        axes[key].margins(x=0.15)
        axes[key].set_xlabel(label)
    axes["memory"].set_yticklabels([])
    left = 0.0
    for part, seconds in share.items():
        percent = 100 * seconds / sum(share.values())
        axes["parts"].barh(["parts of ours"], [percent], left=left, label=f"{part} {percent:.1f} %")
        left += percent
    axes["parts"].set_xlim(0, 100)
    axes["parts"].set_xlabel("share of time, %")
    axes["parts"].legend(ncols=len(share), fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.45, 1.6))
    for axis in axes.values():
        axis.spines[["top", "right", "left"]].set_visible(False)
    save(figure, path, subtitle)
