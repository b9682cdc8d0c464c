"""Draws the training curves of one or more runs in one picture, from their ``metrics.jsonl``."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "reward_mean": "Reward, mean",
    "accuracy": "Held-out accuracy",
    "ref_kl": "KL from the initial model",
    "approx_kl": "KL of an update",
    "entropy": "Entropy [nats/token]",
    "completion_length_mean": "Completion length [tokens]",
    "tokens_per_second": "Throughput [tokens/s]",
}
# Okabe and Ito's palette without its yellow. Colour-blind readers can tell these colours apart, also in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_NUM_SMOOTHED = 20  # a series of this many points or more also gets a running mean over a tenth of its points

Series = tuple[list[int], list[float]]


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draws reward, held-out accuracy, divergences, entropy, completion length and throughput over the steps.

    A series that no run has gets no panel. Several runs share the panels, and a legend names their colours.

    Args:
        runs: folders with a ``metrics.jsonl``, which holds one JSON object with a ``step`` per line.
        output: path of the picture. Its suffix sets the format (png, svg, pdf).

    Raises:
        ValueError: a run has no readable metrics, or no run has a series to draw.
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    rows_by_run = [read_metrics(run) for run in runs]
    series = {name: [_series(rows, name) for rows in rows_by_run] for name in PANELS}
    names = [name for name in PANELS if any(steps for steps, _ in series[name])]
    if not names:
        raise ValueError(f"nothing to draw: {', '.join(map(str, runs))} hold none of {', '.join(PANELS)}")
    num_columns = 2 if len(names) == 4 else min(len(names), 3)
    num_rows = -(-len(names) // num_columns)
    figure = Figure(figsize=(4.2 * num_columns, 2.9 * num_rows + 0.3), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for name, axis in zip(names, axes, strict=False):
        _draw_panel(axis, name, series[name])
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        figure.legend(*_legend(runs), loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
    else:
        figure.suptitle(runs[0].resolve().name)
    figure.savefig(output, dpi=150)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``. A last line without a newline is left out: the run is still writing it.

    Args:
        run: folder of the run.

    Raises:
        ValueError: the file is missing, has no complete line, or has a line that is no JSON object with a ``step``.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl: give the output_dir of a training run")
    # Damaged bytes are replaced, so that the error about invalid JSON names their line.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    if not lines:
        raise ValueError(f"{path} holds no complete line: the run has not finished a step yet")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError(f"{place} must be a JSON object with an integer step, got {line[:80]}")
    return row


def _series(rows: list[dict[str, Any]], name: str) -> Series:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _legend(runs: list[Path]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(runs))]
    return handles, [str(run) for run in runs]


def _draw_panel(axis: "Axes", name: str, series_by_run: list[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, (steps, values) in enumerate(series_by_run):
        color = COLORS[i % len(COLORS)]
        if name == "accuracy" or len(values) < _NUM_SMOOTHED:  # the points are few, so each is marked
            axis.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4)
        else:
            axis.plot(steps, values, color=color, linewidth=1.0, alpha=0.3)
            axis.plot(steps, _running_mean(values, reach=len(values) // _NUM_SMOOTHED), color=color, linewidth=1.8)
    axis.set_title(PANELS[name], fontsize=10, loc="left")
    axis.set_xlabel("step", fontsize=9)
    if name == "accuracy":  # from 0 to 1, or wider if the reward is no share of right answers
        every = [value for _, values in series_by_run for value in values]
        low, high = min(0.0, *every), max(1.0, *every)
        axis.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    if name == "tokens_per_second":  # an axis from 0 on keeps its noise small
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _running_mean(values: list[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` values on either side. A centred mean does not delay a trend."""
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
