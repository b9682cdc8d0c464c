"""A run in the terminal: its curves, the times of its last step, and a sample, drawn again as the run goes on."""

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlft_fast.config import ConfigError, load_config
from rlft_fast.errors import brief, printable
from rlft_fast.run import PANELS, is_in_use, read_metrics, running_since
from rlft_fast.view.contents import newest_samples

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # characters of a curve
_SAMPLE_BYTES, _SAMPLE_CHARACTERS = 2**16, 400
_TIMED_STEPS = 10  # of which the mean tells when the run ends


def watch_run(run: Path, every_s: float, console: Console | None = None) -> None:
    """Draws the run until it has ended or is interrupted; once, if the output is no terminal.

    Args:
        run: folder of the run.
        every_s: seconds between two pictures.
        console: where it draws; None: the standard output.

    Raises:
        ValueError: there is no run in the folder, or its metrics are damaged.
    """
    console = console or Console()
    if not console.is_terminal:
        console.print(picture(run))
        return
    with Live(picture(run), console=console, auto_refresh=False) as live:
        while is_in_use(run):
            time.sleep(every_s)
            live.update(picture(run), refresh=True)
        live.update(picture(run), refresh=True)


def picture(run: Path) -> RenderableType:
    """The run as it is now.

    Args:
        run: folder of the run.

    Raises:
        ValueError: see `watch_run`.
    """
    if is_in_use(run) and not _has_a_step(run):
        return Text(printable(f"{run} runs: it has not finished a step yet"), style="bold")
    rows = read_metrics(run, warn=lambda _: None)
    return Group(Text(_headline(run, rows), style="bold"), _curves(rows), _times(rows), *_sample(run))


def _has_a_step(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def _headline(run: Path, rows: list[dict[str, Any]]) -> str:
    step, since = rows[-1]["step"], running_since(run)
    state = "runs" if since is not None else "has ended" if _ended(run) else "does not run"
    try:
        most = load_config(run / "config.yaml").steps
    except ConfigError:
        return printable(f"{run} {state}: step {step}")
    line = f"{run} {state}: step {step} of {most}"
    if since is not None and (seconds := seconds_per_step(rows, since)) is not None:
        line += f", {seconds:.3g} s per step, {_duration(seconds * (most - step))} left"
    return printable(line)


def seconds_per_step(rows: list[dict[str, Any]], since: float) -> float | None:
    """Mean of the newest steps, with the evaluations and checkpoints between them; None before the second step.

    Args:
        rows: of `read_metrics`. A step has a row, and an evaluation after it one more.
        since: when the run was started, in seconds since the epoch. Rows of an earlier start do not count.
    """
    times = {row["step"]: row["time"] for row in rows if row.get("time") is not None and row["time"] >= since}
    newest = [*times.items()][-_TIMED_STEPS - 1 :]
    if len(newest) < 2:
        return None
    (first, begun), (last, ended) = newest[0], newest[-1]
    return (ended - begun) / (last - first) if ended > begun and last > first else None


def _ended(run: Path) -> bool:
    return (run / "summary.json").is_file()


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(max(seconds, 0) / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _curves(rows: list[dict[str, Any]]) -> Table:
    table = Table("", "over the steps", "last", "least", "most", box=None, pad_edge=False)
    for name, title in PANELS.items():
        if values := [row[name] for row in rows if row.get(name) is not None]:
            ends = (f"{value:.4g}" for value in (values[-1], min(values), max(values)))
            table.add_row(Text(title), sparkline(values, _WIDTH), *ends)  # a text is no markup: titles have [units]
    return table


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most ``width`` characters: means of equally many neighbours, from the least to the most of them.

    Args:
        values: finite numbers, at least one.
        width: most characters.
    """
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [math.fsum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    least, most = min(means), max(means)
    if least == most:
        return _BARS[0] * count
    return "".join(_BARS[round((mean - least) / (most - least) * (len(_BARS) - 1))] for mean in means)


def _times(rows: list[dict[str, Any]]) -> Text:
    """The parts of the last step, longest first. The row of an evaluation has none."""
    found = ({name: x for name, x in row.items() if name.startswith("seconds_") and x} for row in reversed(rows))
    parts = {name.removeprefix("seconds_"): x for name, x in next(filter(None, found), {}).items()}
    ordered = sorted(parts.items(), key=lambda part: -part[1])[:8]
    return Text(printable("  ".join(f"{name} {seconds:.3g} s" for name, seconds in ordered)), style="dim")


def _sample(run: Path) -> list[Text]:
    samples = newest_samples(run, _SAMPLE_BYTES)
    if not samples:
        return []
    sample = samples[0]
    title = f"a sample with reward {sample['reward']}" if sample["reward"] is not None else "a sample"
    texts = [brief(printable(sample[name] or ""), _SAMPLE_CHARACTERS) for name in ("prompt", "completion")]
    return [Text(f"\n{title}", style="bold"), Text(texts[0], style="dim"), Text(texts[1])]
