"""Draws the training curves of one or more runs in one picture, from their ``metrics.jsonl``."""

import json
import math
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from rlft_fast.errors import printable
from rlft_fast.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "reward_mean": "Reward, mean",
    "accuracy": "Held-out accuracy",
    "train_loss": "Training loss [nats/token]",
    "held_out_loss": "Held-out loss [nats/token]",
    "pair_accuracy": "Pairs in the right order, training",
    "held_out_pair_accuracy": "Pairs in the right order, held-out",
    "ref_kl": "KL from the initial model",
    "teacher_kl": "KL from the teacher",
    "teacher_divergence": "KL of the teacher from the model",
    "approx_kl": "KL of an update",
    "entropy": "Entropy [nats/token]",
    "completion_length_mean": "Completion length [tokens]",
    "tokens_per_second": "Throughput [tokens/s]",
}
# Okabe and Ito's palette without its yellow. Colour-blind readers can tell these colours apart, also in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INEXACT = 2**53  # from here on, float64 does not hold every integer
_LARGEST = 1e300  # of a number: float64 holds sums and differences of thousands of these
_NUM_SMOOTHED = 20  # a series of this many points or more also gets a running mean over a tenth of its points

Series = tuple[list[int], list[float]]


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draws reward, held-out accuracy, divergences, entropy, completion length and throughput over the steps.

    A series that no run has gets no panel. Several runs share the panels, and a legend names their colours.

    Args:
        runs: folders with a ``metrics.jsonl``, which holds one JSON object with a ``step`` per line.
        output: path of the picture. Its suffix sets the format (png, svg, pdf).

    Raises:
        ValueError: a run has no readable metrics, no run has a series to draw, or a folder has the path of the picture.
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
    header = 0.3 if len(runs) == 1 else 0.1 + 0.25 * -(-len(runs) // 4)
    width, height = 4.2 * num_columns, 2.9 * num_rows + header  # inches, as all sizes are
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    # Margins of 0.7 and 0.1 beside each panel, of 0.5 below it and 0.3 above. matplotlib would measure every text for
    # its own layouts, which doubles the time of a picture.
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.1 / width, bottom=0.5 / height, top=1 - (header + 0.3) / height,
        wspace=0.8 / 3.4, hspace=0.8 / 2.1,
    )  # fmt: skip
    for name, axis in zip(names, axes, strict=False):
        _draw_panel(axis, name, series[name])
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        legend = figure.legend(*_legend(runs), loc="upper center", ncols=min(len(runs), 4), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    else:
        figure.suptitle(printable(runs[0].resolve().name), y=1 - 0.08 / height, parse_math=False)
    with replacing(output) as picture:
        figure.savefig(picture, dpi=150, format=output.suffix.removeprefix("."))


def read_metrics(run: Path, warn: Callable[[str], object] = warnings.warn) -> list[dict[str, Any]]:
    """The numbers of a run's ``metrics.jsonl`` by line: ``step``, and `drawable` numbers.

    Lines whose step is not exact in float64 are left out, and so is a last line without a newline: the run is still
    writing it.

    Args:
        run: folder of the run.
        warn: gets a sentence about steps, and about numbers, that are left out.

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
    rows = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    kept = [row for row in rows if is_exact_integer(row["step"])]
    if num_left_out := len(rows) - len(kept):
        warn(f"{num_left_out} lines of {path} are left out: their steps are 2^53 or more in size")
    if num_left_out := sum(_is_number(value) and drawable(value) is None for row in kept for value in row.values()):
        warn(f"{num_left_out} numbers of {path} are left out: they are not finite, or larger than {_LARGEST:g} in size")
    return [{name: drawable(value) for name, value in row.items()} for row in kept]


def parse_json(line: str | bytes) -> Any:
    """The value of a line. An integer with more digits than Python reads is infinite.

    Raises:
        ValueError: the line is no JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 4000 else float(digits))


def is_exact_integer(value: object) -> bool:
    """Whether it is an integer that float64 holds exactly, in which axes and JavaScript compute."""
    return _is_number(value) and isinstance(value, int) and abs(value) < _INEXACT


def drawable(value: object) -> float | None:
    """A number that a picture can show; None for texts, truth values, numbers that are not finite, and huge numbers."""
    return value if _is_number(value) and abs(value) <= _LARGEST else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    step = row.get("step") if isinstance(row, dict) else None
    if not _is_number(step) or not (isinstance(step, int) or math.isinf(step)):
        raise ValueError(f"{place} must be a JSON object with an integer step, got {line[:80]}")
    return row


def _series(rows: list[dict[str, Any]], name: str) -> Series:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _legend(runs: list[Path]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(runs))]
    return handles, [printable(run) for run in runs]


def _draw_panel(axis: "Axes", name: str, series_by_run: list[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, (steps, values) in enumerate(series_by_run):
        color = COLORS[i % len(COLORS)]
        if name == "accuracy" or len(values) < _NUM_SMOOTHED:  # the points are few, so each is marked
            axis.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4)
        else:
            axis.plot(steps, values, color=color, linewidth=1.0, alpha=0.3)
            axis.plot(steps, _running_mean(values, reach=len(values) // _NUM_SMOOTHED), color=color, linewidth=1.8)
    axis.set_title(PANELS[name], fontsize=10, loc="left", y=1.0)  # y, or matplotlib looks for room above the ticks
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
