"""The report of the race to accuracy: bars, tables and curves, from the files of the finished legs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.learning.workload import EVALUATE_EVERY, SETTINGS, TASKS
from benchmarks.support.document import Bar, bar_table, fill, table, write_files
from benchmarks.support.picture import OURS_COLOR, save

TRL, HF, VLLM = "trl", "ours-hf", "ours-vllm"
NAMES = {TRL: "TRL 1.16", HF: "rlft_fast", VLLM: "rlft_fast, rollouts by vLLM"}
MAX_MINUTES = {HF: 0.35, VLLM: 0.33}
MAX_MINUTES_BFLOAT16 = 0.15  # of both, where `compute_dtype: auto` takes bfloat16
MAX_STANDARD_ERRORS = 2.0
MAX_GRADIENT_DIFFERENCE = 1e-4
MAX_UPDATE_DIFFERENCE = 1e-3
_COLORS = {TRL: "#2e4057", HF: OURS_COLOR, VLLM: "#edae49"}

METHOD = """\
TRL is its `GRPOTrainer` with the `dapo` loss, and ours `rlft-fast train`. Both train SmolLM2-135M-Instruct with AdamW,
without KL penalty, entropy bonus, or filtering of groups, with these settings: {settings}. The learning rate falls
linearly to 0. Both get the same problems in the same order, and the same reward: 1 for the right number at the end,
less the truncation penalty where an answer is cut off. The two sides draw different random numbers. Weights are
float32. TRL computes with the fastest of its settings above, and ours with `compute_dtype: auto`, which was {ours}
here. TRL holds 16 sequences at a time, the fastest of 8, 16, 32 and 64 on two cores. Seeds and levels were fixed before
the first leg.

Held-out problems are answered every {every} steps with the most likely tokens, by transformers on TRL's side. The clock
stops for that. Minutes to a level are interpolated between two evaluations. Each leg is a process of its own, and runs
alone on the machine. The bars of minutes take the seeds whose legs of both sides ran on one kind of machine. The
standard error is the error of a difference of two means. Its variance is pooled over both sides and all evaluations
after the first."""

PHASES = """\
Seconds are means per step over all legs of a side. Rows are positions that the updates of a step run. TRL pads every
prompt and every answer to the longest of a micro-batch; ours packs answers without padding, and runs a prompt once for
all of its answers. So of the speed of an update, the ratio of rows is less work, and the rest is faster work."""

UPDATES = """\
Both optimizer steps of TRL's first step are compared. Our engine takes the same answers in the same mini-batches, with
TRL's advantages. The difference of gradients, before clipping, is the norm of the difference over TRL's norm.
One factor is taken out of it: ours divides a loss by the tokens of the mini-batch, TRL by the mean over the
mini-batches of a step ({tokens} tokens). The difference of updates is the norm of the difference of all weights after
both optimizer steps, over the norm of TRL's change of the weights, as both sides train. The advantages of both sides
differ by {advantages} at most there, because they divide by the standard deviation plus different small numbers
(TRL 1e-4)."""


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one leg.

    Attributes:
        leg: its file's contents.
        steps: with an evaluation.
        minutes: of training until each of these steps.
        accuracy: at each of these steps.
    """

    leg: dict[str, Any]
    steps: list[int]
    minutes: list[float]
    accuracy: list[float]

    @classmethod
    def of(cls, leg: dict[str, Any]) -> Curve:
        until = [0.0, *accumulate(step["seconds"] / 60 for step in leg["steps"])]
        steps, accuracy = zip(*leg["accuracy"], strict=True)
        return cls(leg, list(steps), [until[step] for step in steps], list(accuracy))

    @property
    def machine(self) -> str:
        """The kind of machine that the leg ran on; the same CPU model may offer other instructions elsewhere."""
        return f"{self.leg['environment']['cpu']}, {self.leg['environment']['cores']}"

    def minutes_to(self, level: float) -> float:
        """Minutes until the accuracy first is at the level, between two evaluations by interpolation; or infinity."""
        return crossing([*zip(self.minutes, self.accuracy, strict=True)], level)


def crossing(points: list[tuple[float, float]], level: float) -> float:
    """Where the accuracy first is at the level, between two evaluations by interpolation; or infinity.

    Args:
        points: work, such as minutes, and the accuracy after this work.
        level: to be reached.
    """
    before = None
    for work, accuracy in points:
        if accuracy >= level:
            if before is None:
                return work
            share = (level - before[1]) / (accuracy - before[1])
            return before[0] + share * (work - before[0])
        before = work, accuracy
    return math.inf


def curves_of(legs: list[dict[str, Any]], task: str) -> dict[str, list[Curve]]:
    """The curves of a task by side, in the order of NAMES."""
    found = {side: [Curve.of(leg) for leg in legs if (leg["task"], leg["side"]) == (task, side)] for side in NAMES}
    return {side: curves for side, curves in found.items() if curves}


def standard_errors(ours: list[Curve], theirs: list[Curve]) -> float | None:
    """The largest difference of mean accuracies at equal steps, in standard errors; None with one seed of a side."""
    sides = [[curve.accuracy[1:] for curve in side] for side in (ours, theirs)]
    if min(map(len, sides)) < 2:
        return None
    columns = [list(zip(*side, strict=True)) for side in sides]
    freedom = sum((len(side) - 1) * len(side[0]) for side in sides)
    squares = sum(statistics.variance(at) * (len(at) - 1) for side in columns for at in side)
    error = math.sqrt(squares / freedom * sum(1 / len(side) for side in sides))
    differences = [abs(statistics.mean(a) - statistics.mean(b)) for a, b in zip(*columns, strict=True)]
    return max(differences) / error if error else math.inf


def on_one_machine(ours: list[Curve], theirs: list[Curve]) -> list[tuple[Curve, Curve]]:
    """The two legs of each seed, where both ran on the same kind of machine."""
    return [(a, b) for a in ours for b in theirs if (a.leg["seed"], a.machine) == (b.leg["seed"], b.machine)]


def max_minutes(side: str, ours: list[Curve]) -> float:
    """The bar of a side's minutes over TRL's."""
    return MAX_MINUTES_BFLOAT16 if ours[0].leg["setting"] == "bfloat16" else MAX_MINUTES[side]


def bars_of(legs: list[dict[str, Any]], updates: dict[str, dict[str, Any]]) -> list[Bar]:
    bars = []
    for task in TASKS:
        curves = curves_of(legs, task)
        for side in MAX_MINUTES:
            if side not in curves or TRL not in curves:
                continue
            level = TASKS[task].level
            if pairs := on_one_machine(curves[side], curves[TRL]):
                ours, theirs = (statistics.mean(c.minutes_to(level) for c in own) for own in zip(*pairs, strict=True))
                ratio = math.inf if math.isinf(ours) else 0.0 if math.isinf(theirs) else ours / theirs
                limit = max_minutes(side, curves[side])
                bars.append(Bar(f"{task}: minutes to {level:.2f}, {NAMES[side]} / TRL", ratio, limit))
            if (errors := standard_errors(curves[side], curves[TRL])) is not None:
                name = f"{task}: largest difference at equal steps, {NAMES[side]}, in standard errors"
                bars.append(Bar(name, errors, MAX_STANDARD_ERRORS))
        if task in updates:
            found = max(updates[task]["gradients"])
            bars.append(Bar(f"{task}: difference of gradients", found, MAX_GRADIENT_DIFFERENCE))
            bars.append(Bar(f"{task}: difference of updates", updates[task]["updates"], MAX_UPDATE_DIFFERENCE))
    return bars


def side_table(curves: dict[str, list[Curve]], level: float) -> str:
    rows = []
    for side, own in curves.items():
        for curve in own:
            steps = curve.leg["steps"]
            name = f"{curve.leg['task']}-{side}-seed{curve.leg['seed']}"
            minutes = curve.minutes_to(level)
            rows.append((
                f"[{NAMES[side]}, seed {curve.leg['seed']}](learning/{name}.json)", curve.leg["setting"],
                curve.machine,
                "not reached" if math.isinf(minutes) else f"{minutes:.1f}", f"{curve.minutes[-1]:.1f}",
                f"{sum(step['tokens'] for step in steps) / sum(step['seconds'] for step in steps):.0f}",
                *(f"{accuracy:.3f}" for accuracy in curve.accuracy),
            ))  # fmt: skip
    steps = next(iter(curves.values()))[0].steps
    header = ("leg", "computes with", "machine, cores", f"minutes to {level:.2f}", "minutes in all",
              "sampled tokens / s", *("before" if step == 0 else f"step {step}" for step in steps))  # fmt: skip
    return table(header, rows)


def phase_table(curves: dict[str, list[Curve]]) -> str:
    """Seconds per step by phase, and rows per step, by side."""
    steps = {side: [step for curve in own for step in curve.leg["steps"]] for side, own in curves.items()}
    phases = dict.fromkeys(name for own in steps.values() for step in own for name in step["phases"])
    rows = [
        (name.removeprefix("seconds_") + ", s",
         *(f"{statistics.mean(step['phases'].get(name, 0.0) for step in own):.2f}" for own in steps.values()))
        for name in phases
    ]  # fmt: skip
    rows.append(("in all, s", *(f"{statistics.mean(step['seconds'] for step in own):.2f}" for own in steps.values())))
    rows.append(("rows", *(f"{statistics.mean(step['rows'] for step in own):.0f}" for own in steps.values())))
    return table(("of a step", *(NAMES[side] for side in steps)), rows)


def times_table(times: dict[str, dict[str, Any]]) -> str:
    """Seconds per step of TRL with each of its settings, by task."""

    def cell(found: dict[str, Any], name: str) -> str:
        seconds = found["seconds_per_step"][name]
        return found["failures"][name] if seconds is None else f"{seconds:.1f}"

    names = next(iter(times.values()))["seconds_per_step"]
    rows = [(name, *(cell(found, name) for found in times.values())) for name in names]
    return table(("TRL with", *(f"s per step, {task}" for task in times)), rows)


def write_report(
    legs: list[dict[str, Any]], times: dict[str, dict[str, Any]], updates: dict[str, dict[str, Any]], output: Path
) -> str:
    """Writes learning.md, learning.json and learning.png; returns the text.

    Args:
        legs: contents of the files of finished legs, at least one.
        times: contents of the files of the legs that time TRL's settings, by task.
        updates: contents of the files of the legs of updates by task.
        output: folder.
    """
    bars = bars_of(legs, updates)
    facts = legs[0]["environment"]
    sections = ["## Bars", bar_table(bars) if bars else "No leg of TRL and no leg of ours on one task yet."]
    drawn = {task: curves for task in TASKS if (curves := curves_of(legs, task))}
    for task, curves in drawn.items():
        sections += [f"## {TASKS[task].title}", side_table(curves, TASKS[task].level), phase_table(curves)]
    if drawn:
        sections.append(fill(PHASES))
    if times:
        sections += ["## TRL's settings", times_table(times)]
    settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    ours = " and ".join(sorted({leg["setting"] for leg in legs if leg["side"] != TRL})) or "not run"
    sections += ["## Method", fill(METHOD.format(settings=settings, every=EVALUATE_EVERY, ours=ours))]
    if updates:
        most = max(found["advantages"] for found in updates.values())
        tokens = "; ".join(f"{task} {' and '.join(map(str, found['tokens']))}" for task, found in updates.items())
        sections.append(fill(UPDATES.format(advantages=f"{most:.2g}", tokens=tokens)))
    raw = {
        "environment": facts, "settings": SETTINGS,
        "updates": {task: {name: found[name] for name in ("gradients", "updates")} for task, found in updates.items()},
        "legs": [{key: leg[key] for key in ("task", "side", "seed", "accuracy")} for leg in legs],
        "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars],
    }  # fmt: skip
    subtitle = f"{facts['cpu']}, {facts['date']}, SmolLM2-135M, held-out accuracy of each leg"
    return write_files(
        output, "learning", "Time to accuracy beside TRL", facts, sections, raw,
        lambda path: draw(drawn, path, subtitle),
    )  # fmt: skip


def draw(drawn: dict[str, dict[str, list[Curve]]], path: Path, subtitle: str) -> None:
    """A row per task: held-out accuracy over minutes, and over steps; a line per leg."""
    figure, axes = plt.subplots(
        len(drawn), 2, figsize=(10, 3.4 * len(drawn)), sharey="row", squeeze=False, layout="constrained"
    )
    for row, (task, curves) in zip(axes, drawn.items(), strict=True):
        for axis, unit in zip(row, ("minutes", "steps"), strict=True):
            for side, own in curves.items():
                for i, curve in enumerate(own):
                    label = NAMES[side] if i == 0 else None
                    axis.plot(getattr(curve, unit), curve.accuracy, ".-", color=_COLORS[side], label=label, alpha=0.8)
            axis.axhline(TASKS[task].level, color="#8d96a3", linewidth=0.8, linestyle=":")
            axis.set_xlabel(f"{unit} of training")
            axis.set_title(task, loc="left", fontsize=9)
        row[0].set_ylabel("held-out accuracy")
        row[0].legend(fontsize=8, loc="lower right")
    save(figure, path, subtitle)
