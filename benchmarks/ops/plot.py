"""The report's picture: time and scratch memory of every way, task by task."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.ops.ways import OURS
from benchmarks.support.harness import Measurement, Results
from benchmarks.support.picture import OURS_COLOR, save

_PEER_COLOR, _MARK_COLOR, _TEXT_COLOR = "#b8c0cc", "#1f2d3d", "#1f2d3d"
_STYLE = {
    "font.size": 9,
    "text.color": _TEXT_COLOR,
    "axes.labelcolor": _TEXT_COLOR,
    "xtick.color": "#66707c",
    "ytick.color": _TEXT_COLOR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#c8ced6",
    "ytick.left": False,
}


def save_plot(results: Results, floors: dict[str, float], max_extra_mib: float, path: Path, subtitle: str) -> None:
    """One row of panels per task: seconds on the left, MiB on the right.

    Args:
        results: measurements of every task in ``floors``.
        floors: seconds of the bare GEMMs by task, drawn as a line.
        max_extra_mib: the bar on memory, drawn as a line.
        path: where the picture goes.
        subtitle: machine and date.
    """
    tasks = {task: results.ways(task) for task in floors}
    heights = [len(ways) + 0.8 for ways in tasks.values()]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(tasks), 2, figsize=(10, 0.27 * sum(heights) + 1.6), layout="constrained",
            gridspec_kw={"height_ratios": heights}, squeeze=False,
        )  # fmt: skip
        for (left, right), (task, ways) in zip(axes, tasks.items(), strict=True):
            _bars(left, ways, {way: m.median_s for way, m in ways.items()}, "{:.2f}")
            _bars(right, ways, {way: m.extra_mib for way, m in ways.items()}, "{:.0f}")
            left.set_title(task, loc="left", fontweight="bold", fontsize=10)
            right.set_yticklabels([])
            _line(left, floors[task])
            _line(right, max_extra_mib)
        axes[-1, 0].set_xlabel("time, s   (line: the bare GEMMs)")
        axes[-1, 1].set_xlabel(f"memory beyond inputs and outputs, MiB   (line: {max_extra_mib:g})")
        save(figure, path, subtitle)


def _bars(axes: Axes, ways: dict[str, Measurement], values: dict[str, float], label: str) -> None:
    colors = [OURS_COLOR if way == OURS else _PEER_COLOR for way in ways]
    bars = axes.barh(list(ways), list(values.values()), color=colors, height=0.72)
    labels = axes.bar_label(bars, [label.format(value) for value in values.values()], padding=4, fontsize=8)
    for text in labels:  # readable in front of a line
        text.set(bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    for tick, way in zip(axes.get_yticklabels(), ways, strict=True):
        tick.set_fontweight("bold" if way == OURS else "normal")


def _line(axes: Axes, value: float) -> None:
    axes.axvline(value, color=_MARK_COLOR, linewidth=1, linestyle=(0, (3, 2)), zorder=3)
