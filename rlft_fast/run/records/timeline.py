"""When each part of a run worked: ``timeline.jsonl``, and the picture that is drawn from it.

A line has a ``step``, the ``start`` and the ``end`` of the time that it is about, and ``spans``: lists of a phase, a
worker, and the start and the end of its work. Times are seconds since the epoch. The time of a line begins where the
time of the line before ends, if the run has not been started again between them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlft_fast.errors import printable
from rlft_fast.files import replacing
from rlft_fast.run.records.plot import COLORS, drawable, is_exact_integer, parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "timeline.jsonl"
PARTS = {
    "generate": "generation", "environment": "environments", "reward": "rewards", "teacher": "training",
    "logprobs": "training", "update": "training", "sync": "sync",
}  # fmt: skip
PHASE_COLORS = dict(zip(PARTS, (COLORS[0], COLORS[2], COLORS[3], *COLORS[4:6], COLORS[1], COLORS[6]), strict=True))
_SHOWN_STEPS = 8
_MOST_ROWS = 40
_RESOLUTION = 2000  # a shorter pause than this part of the time is not drawn


class Span(NamedTuple):
    """As `rlft_fast.world.Span`, which is not imported here: torch takes seconds."""

    phase: str
    worker: str
    start: float
    end: float


class Row(NamedTuple):
    """The work of one part of the run, of one worker where several have such work."""

    name: str
    spans: list[tuple[str, float, float]]
    """Phase, start and end, in seconds since the start of the picture."""
    idle: float
    """Share of the whole run's time in which nothing of it worked."""


class Timeline(NamedTuple):
    """The newest steps of a run."""

    steps: tuple[int, int]
    """The first and the last."""
    seconds: float
    rows: list[Row]
    num_rows: int
    """Of the run; the first ones are ``rows``."""


class _Line(NamedTuple):
    step: int
    start: float
    end: float
    spans: list[Span]


def merged(spans: Iterable[tuple[str, str, float, float]], pause: float = 0.0) -> list[Span]:
    """The spans by phase and worker, in order; spans that overlap, or that a pause below `pause` [s] parts, are one."""
    found: list[Span] = []
    for span in sorted(Span(*span) for span in spans):
        last = found[-1] if found else None
        if last is not None and last[:2] == span[:2] and span.start <= last.end + pause:
            found[-1] = last._replace(end=max(last.end, span.end))
        else:
            found.append(span)
    return found


def read_timeline(run: Path) -> Timeline | None:
    """The newest steps without an interruption; None if the run has noted none. Damaged lines are left out.

    Args:
        run: folder of the run.
    """
    path = run / FILE
    if not path.is_file():
        return None
    lines = [line for text in path.read_bytes().split(b"\n")[:-1] if (line := _parse(text)) is not None]
    if not lines:
        return None
    shown = lines[-1:]
    for line in reversed(lines[-_SHOWN_STEPS:-1]):
        if line.end != shown[0].start:
            break
        shown.insert(0, line)
    start, end = shown[0].start, shown[-1].end
    by_row: dict[tuple[str, str], list[Span]] = {}
    for line in lines:
        for span in line.spans:
            by_row.setdefault((PARTS[span.phase], span.worker), []).append(span)
    whole = sum(line.end - line.start for line in lines)
    rows = [
        Row(
            _name(part, worker, [*by_row]),
            [
                (span.phase, max(span.start, start) - start, min(span.end, end) - start)
                for span in merged(by_row[part, worker], (end - start) / _RESOLUTION)
                if span.end > start and span.start < end
            ],
            _idle(by_row[part, worker], whole),
        )
        for part in dict.fromkeys(PARTS.values())
        for worker in _in_order(own for of, own in by_row if of == part)
    ]
    return Timeline((shown[0].step, shown[-1].step), end - start, rows[:_MOST_ROWS], len(rows))


def draw_timeline(run: Path, output: Path) -> bool:
    """Draws `read_timeline`, a row for each part of the run. Returns whether there is something to draw.

    Args:
        run: folder of the run.
        output: path of the picture. Its suffix sets the format.

    Raises:
        ValueError: a folder has the path of the picture.
    """
    timeline = read_timeline(run)
    if timeline is None or not timeline.rows:
        return False
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.3 + 0.32 * len(timeline.rows)  # inches
    figure = Figure(figsize=(12.6, height))
    axis = figure.subplots()
    longest = _draw_rows(axis, timeline.rows)
    # Texts are not measured, as in `plot_runs`: a character is 0.07 inches wide.
    left = min(0.2 + 0.07 * longest, 6.0)
    figure.subplots_adjust(left=left / 12.6, right=0.985, bottom=0.75 / height, top=1 - 0.4 / height)
    axis.set_xlim(0, timeline.seconds or 1)
    axis.set_xlabel("time [s]", fontsize=9)
    first, last = timeline.steps
    left_out = timeline.num_rows - len(timeline.rows)
    more = f"; {left_out} more workers are not shown" if left_out else ""
    title = f"{printable(run.resolve().name)}: steps {first} to {last}{more}"
    figure.suptitle(title, y=1 - 0.08 / height, parse_math=False, fontsize=10)
    used = {phase for row in timeline.rows for phase, *_ in row.spans}
    patches = [Patch(color=color, label=phase) for phase, color in PHASE_COLORS.items() if phase in used]
    if patches:
        figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=8)
    with replacing(output) as picture:
        figure.savefig(picture, dpi=150, format=output.suffix.removeprefix("."))
    return True


def _draw_rows(axis: "Axes", rows: Sequence[Row]) -> int:
    """Returns the number of characters of the longest label."""
    for i, row in enumerate(rows):
        for phase in dict.fromkeys(phase for phase, *_ in row.spans):
            bars = [(start, end - start) for own, start, end in row.spans if own == phase]
            axis.broken_barh(bars, (i - 0.4, 0.8), facecolors=PHASE_COLORS[phase])
    labels = [f"{printable(row.name)}  (idle {row.idle:.0%})" for row in rows]
    axis.set_yticks(range(len(rows)), labels, parse_math=False)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    return max(map(len, labels))


def _name(part: str, worker: str, every: Sequence[tuple[str, str]]) -> str:
    return part if sum(own == part for own, _ in every) == 1 else f"{part}, {worker}"


def _in_order(workers: Iterable[str]) -> list[str]:
    """Names that end with numbers, by name and number."""
    return sorted(workers, key=lambda name: (name.rstrip("0123456789"), len(name), name))


def _idle(spans: Sequence[Span], whole: float) -> float:
    busy = sum(span.end - span.start for span in merged(span._replace(phase="") for span in spans))
    return max(1 - busy / whole, 0.0) if whole > 0 else 0.0


def _parse(text: bytes) -> _Line | None:
    try:
        line = parse_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not is_exact_integer(line.get("step")) or not isinstance(line.get("spans"), list):
        return None
    start, end = drawable(line.get("start")), drawable(line.get("end"))
    if start is None or end is None or start > end:
        return None
    spans = [Span(*span) for span in line["spans"] if _is_span(span)]
    return _Line(line["step"], start, end, spans)


def _is_span(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 4:
        return False
    phase, worker, start, end = found[0], found[1], drawable(found[2]), drawable(found[3])
    is_known = isinstance(phase, str) and phase in PARTS and isinstance(worker, str)
    return is_known and start is not None and end is not None and start <= end
