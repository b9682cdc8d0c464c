"""The report of the trainers' benchmark: bars, tables and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.integrations.comparison import Comparison
from benchmarks.integrations.workload import FLOOR, HF, OURS, THEIRS, TRAINERS, TRL_TRAINERS, Workload
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import Measurement, environment
from benchmarks.support.picture import OURS_COLOR, save

MAX_TIME_RATIO, MAX_MEMORY_RATIO = 0.9, 0.65
COLORS = {OURS: OURS_COLOR, THEIRS: "#b8c0cc", FLOOR: "#e3e7ec"}

METHOD = """\
A pass is a trainer's own `compute_loss` with its metrics, and the backward pass, on SmolLM2-135M-Instruct in float32
without gradient checkpointing. The batch has {num_rows} sequences of {length} random tokens without padding; {prompt}
of them are the prompt, whose positions have no label. DPO also runs its reference model. RLOO's old log-probabilities
come from the head that is measured, as in its training.

"{ours}" is `rlft_fast.integrations.trl.enable()`, or `FusedLossTrainer` in place of `Trainer`. "{theirs}" is TRL's
fused head, or the model's own loss. On a CPU, TRL's head projects all {num_positions} positions that have a successor;
ours projects the {num_labels} positions with a label. "{floor}" is the floor: it returns columns of the hidden states,
and zeros as gradients of the hidden states and of the head's weight. Every head has these gradients. Here the weight is
also the embedding's, so that autograd keeps the head's part of its gradient until the end of the backward pass.

Before anything is weighed, both heads run once under a profiler, which tells that each ran alone. Loss and gradients
have to agree within 1e-5; the gradients' difference is the norm of the difference of all gradients, beside their norm.

Memory is the peak of the resident set during a pass, less the resident set before the pass. Weights and gradients are
there before, as in every micro-batch but the first, and moments do not exist. So a bar on memory is strict: without
accumulation of gradients, most gradients are not there yet when activations and head take the most. Time is the median
of {rounds} interleaved rounds in one process, ± the interquartile range (of fewer than four rounds, the full range)."""


def write_report(comparison: Comparison, work: Workload, output: Path) -> bool:
    """Writes integrations.md, integrations.json and integrations.png; returns whether all bars hold."""
    bars, facts = bars_of(comparison), environment() | versions()
    rounds = len(passes_of(comparison, HF)[0].seconds)
    method = METHOD.format(
        **asdict(work), length=work.prompt + work.completion, ours=OURS, theirs=THEIRS, floor=FLOOR, rounds=rounds,
        num_positions=work.num_rows * (work.prompt + work.completion - 1), num_labels=work.num_rows * work.completion,
    )  # fmt: skip
    sections = [
        "## Bars", bar_table(bars), fill(floor_text(comparison)),
        "## Time of a forward and backward pass", time_table(comparison),
        "## Memory beyond weights and gradients", memory_table(comparison),
        "## Agreement of both heads", agreement_table(comparison),
        "## Method", fill(method),
    ]  # fmt: skip
    measured = {
        name: {"seconds": m.seconds, "extra_bytes": m.extra_bytes} for name, m in comparison.results.measured.items()
    }
    raw = {
        "environment": facts, "measured": measured, "work": asdict(work),
        "agreement": {name: asdict(agreement) for name, agreement in comparison.agreement.items()},
        "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars],
    }  # fmt: skip
    subtitle = f"{facts['cpu']}, {facts['date']}, {work.num_rows} x {work.prompt + work.completion} tokens"
    print(write_files(
        output, "integrations", "Trainers with the fused head", facts, sections, raw,
        lambda path: save_plot(comparison, path, subtitle),
    ))  # fmt: skip
    return all(bar.holds for bar in bars)


def bars_of(comparison: Comparison) -> list[Bar]:
    bars = []
    for name in TRL_TRAINERS:
        ours, theirs, _ = passes_of(comparison, name)
        bars.append(Bar(f"{name}: time / TRL's", ours.median_s / theirs.median_s, MAX_TIME_RATIO))
        bars.append(Bar(f"{name}: memory / TRL's", ours.extra_bytes / theirs.extra_bytes, MAX_MEMORY_RATIO))
    return bars


def floor_text(comparison: Comparison) -> str:
    """What the bars leave to a head: the shares of an empty one."""
    passes = [passes_of(comparison, name) for name in TRL_TRAINERS]
    times = [floor.median_s / theirs.median_s for _, theirs, floor in passes]
    memory = [floor.extra_bytes / theirs.extra_bytes for _, theirs, floor in passes]
    return (
        f"No head can take less than an empty one: {min(times):.2f} to {max(times):.2f} of the time of TRL's pass, and "
        f"{min(memory):.2f} to {max(memory):.2f} of its memory."
    )


def passes_of(comparison: Comparison, trainer: str) -> tuple[Measurement, Measurement, Measurement]:
    """Of our head, their head and the empty head."""
    ours, theirs, floor = (comparison.results[f"{trainer} | {way}"] for way in (OURS, THEIRS, FLOOR))
    return ours, theirs, floor


def time_table(comparison: Comparison) -> str:
    rows = []
    for name in TRAINERS:
        passes = passes_of(comparison, name)
        cells = (f"{each.median_s:.2f} ± {each.iqr_s:.2f}" for each in passes)
        ours, theirs, floor = (each.median_s for each in passes)
        rows.append((name, *cells, *_ratios(ours, theirs, floor), f"{(ours - floor) / (theirs - floor):.2f}"))
    return table((*_header("s"), "our head / their head"), rows)


def memory_table(comparison: Comparison) -> str:
    rows = []
    for name in TRAINERS:
        memory = [each.extra_mib for each in passes_of(comparison, name)]
        rows.append((name, *(f"{mib:.0f}" for mib in memory), *_ratios(*memory)))
    return table(_header("MiB"), rows)


def _header(unit: str) -> tuple[str, ...]:
    ways = (f"{way}, {unit}" for way in (OURS, THEIRS, FLOOR))
    return ("trainer", *ways, "ours / theirs", f"{FLOOR} / theirs")


def _ratios(ours: float, theirs: float, floor: float) -> tuple[str, str]:
    """Our pass beside the pass with their own head, and the lowest ratio that a head can reach."""
    return f"{ours / theirs:.2f}", f"{floor / theirs:.2f}"


def agreement_table(comparison: Comparison) -> str:
    rows = [(name, f"{each.loss:.0e}", f"{each.gradient:.0e}") for name, each in comparison.agreement.items()]
    return table(("trainer", "difference of the loss", "difference of the gradients"), rows)


def save_plot(comparison: Comparison, path: Path, subtitle: str) -> None:
    """Draws time and memory of every pass."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    shown = (("median_s", "forward and backward, s", "{:.1f}"), ("extra_mib", "memory beyond the state, MiB", "{:.0f}"))
    for axis, (key, label, form) in zip(axes, shown, strict=True):
        for offset, way in zip((-0.27, 0, 0.27), COLORS, strict=True):
            values = [getattr(comparison.results[f"{name} | {way}"], key) for name in TRAINERS]
            places = [i + offset for i in range(len(TRAINERS))]
            axis.bar_label(axis.barh(places, values, 0.25, color=COLORS[way], label=way), fmt=form, padding=3)
        axis.set_yticks(range(len(TRAINERS)), TRAINERS)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, fontsize=8, frameon=False, loc="outside lower right")
    save(figure, path, subtitle)
