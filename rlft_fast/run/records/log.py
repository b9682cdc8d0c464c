"""Writes the numbers of a run to disk as JSON lines, shows a line and a progress bar, and sends the numbers on."""

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlft_fast.errors import printable
from rlft_fast.files import fsync
from rlft_fast.run.folder import LOGS
from rlft_fast.run.records.step_files import STEP_FOLDERS, step_files_after
from rlft_fast.run.records.timeline import FILE as TIMELINE
from rlft_fast.run.records.trackers import Tracker
from rlft_fast.world import Span, write_at_once

_SHOWN = (
    "train_loss", "pair_accuracy", "held_out_loss", "held_out_pair_accuracy", "reward_mean", "accuracy", "approx_kl",
    "ref_kl", "teacher_kl", "teacher_divergence", "clip_share", "tokens_per_second",
)  # fmt: skip
# For trackers. torchrun waits for a process 30 s in all after a signal and after the failure of another process.
_SECONDS_AT_THE_END, _SECONDS_AFTER_A_FAILURE = 30.0, 5.0
_SKIPPED = ("skipped_steps", "critic_skipped_steps")  # counts of the whole run, shown if they are not 0


class RunLog:
    """Writes ``metrics.jsonl`` and ``samples.jsonl`` and shows progress. Only rank 0 writes and shows anything.

    Args:
        directory: the run's folder.
        num_steps: number of steps of the run.
        rank: this process's rank.
    """

    def __init__(self, directory: Path, num_steps: int, rank: int) -> None:
        self.directory = directory
        self.active = rank == 0
        self.console = Console(quiet=not self.active)
        self.trackers: list[Tracker] = []
        self.num_texts = 0
        self._texts: list[dict[str, Any]] = []  # samples of the step that are to be uploaded with its numbers
        self._failing: set[str] = set()  # files to which the last line could not be written
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(),
        )  # fmt: skip
        # Without a terminal a bar would print only its last state.
        self.progress = Progress(*columns, console=self.console, disable=not (self.active and self.console.is_terminal))
        self.task = self.progress.add_task("train", total=num_steps)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.progress.stop()
        seconds = _SECONDS_AT_THE_END if kind is None else 0 if kind is KeyboardInterrupt else _SECONDS_AFTER_A_FAILURE
        deadline = time.monotonic() + seconds
        for tracker in self.trackers:
            tracker.close(max(deadline - time.monotonic(), 0), failed=kind is not None)

    def send_to(self, trackers: list[Tracker], num_texts: int) -> None:
        """Sends numbers to trackers from here on, and the texts of the first so many samples of each step."""
        self.trackers, self.num_texts = trackers, num_texts

    def num_bytes(self) -> dict[str, int]:
        """Sizes of the files, for `rewind`. The counted bytes are made durable, because a checkpoint relies on them."""
        paths = [path for name in LOGS if (path := self.directory / name).exists()]
        if self.active:
            for path in (*paths, self.directory):
                fsync(path)
        return {path.name: path.stat().st_size for path in paths}

    def set_aside(self) -> list[str]:
        """Renames files that hold lines, and folders with files of steps, so that a run can start from the beginning.

        Returns:
            The new names.
        """
        found = [name for name in LOGS if (path := self.directory / name).is_file() and path.stat().st_size]
        if found:
            found += [name for name in STEP_FOLDERS if (self.directory / name).is_dir()]
        names = (*LOGS, *STEP_FOLDERS)
        number = next(
            n for n in itertools.count(1) if not any((self.directory / _numbered(x, n)).exists() for x in names)
        )
        for name in found:
            (self.directory / name).rename(self.directory / _numbered(name, number))
        return [_numbered(name, number) for name in found]

    def rewind(self, step: int, num_bytes: Mapping[str, int]) -> None:
        """Removes the lines and files of steps that an interrupted run wrote after its checkpoint.

        An incomplete last line, as after an edit or on a damaged disk, is removed, too.

        Args:
            step: the step of the checkpoint.
            num_bytes: sizes of the files at the checkpoint, from `num_bytes`.
        """
        if self.active:
            for name in LOGS:
                with open(self.directory / name, "a+b") as file:
                    file.truncate(_end_of_lines(file, min(num_bytes.get(name, 0), file.tell())))
            for path in step_files_after(self.directory, step):
                path.unlink()
        self.progress.update(self.task, completed=step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line of numbers and shows it. JSON has only finite numbers, so others are written as null."""
        values = {name: _in_float64(value) for name, value in values.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._write("metrics.jsonl", {"step": step, "time": round(time.time(), 3), **finite})
        for tracker in self.trackers:
            tracker.send(step, values, self._texts)
        self._texts = []
        self.progress.update(self.task, completed=step)
        self.console.print(f"step {step}  {_shown(values)}", highlight=False, soft_wrap=True)  # above the bar

    def sample(self, step: int, **fields: Any) -> None:
        self._write("samples.jsonl", {"step": step, **fields})
        if len(self._texts) < self.num_texts:
            self._texts.append(fields)

    def spans(self, step: int, start: float, end: float, spans: Sequence[Span]) -> None:
        """Writes the work between two times, in seconds since the epoch."""
        rows = [[*span[:2], round(span.start, 3), round(span.end, 3)] for span in spans]
        self._write(TIMELINE, {"step": step, "start": round(start, 3), "end": round(end, 3), "spans": rows})
        for tracker in self.trackers:
            tracker.trace(step, start, end, spans)

    def message(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def announce(self, text: str) -> None:
        """As `message`, from inside of a signal handler."""
        if self.active:
            write_at_once(cast(TextIO, self.console.file), printable(text))

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, *columns, show_lines=True)  # noqa: B026 (headers are positional in rich)
        for row in rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        self.console.print(table)

    def _write(self, name: str, record: dict[str, Any]) -> None:
        """Appends a line. One that cannot be written costs a warning: a full disk must not cost the training since."""
        if not self.active:
            return
        # A lone half of a UTF-16 pair, as an environment may say it, is then what JSON has for it.
        line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        try:
            _append(self.directory / name, line)
            self._failing.discard(name)
        except OSError as error:
            if name not in self._failing:  # once, until a line is written again
                self.message(f"warning: step {record['step']}: lines of {name} are not kept: {error}")
            self._failing.add(name)


def _append(path: Path, line: bytes) -> None:
    """Appends the whole line, or nothing of it."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise


def _in_float64(value: float) -> float:
    """The number; an infinity for an integer that float64 does not hold."""
    try:
        float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return value


def _shown(values: Mapping[str, float]) -> str:
    names = [name for name in _SHOWN if name in values] + [name for name in _SKIPPED if values.get(name)]
    return "  ".join(f"{name} {values[name]:.4g}" for name in names)


def _numbered(name: str, number: int) -> str:
    path = Path(name)
    return f"{path.stem}.{number}{path.suffix}"


def _end_of_lines(file: IO[bytes], size: int) -> int:
    """The position after the last newline in the first ``size`` bytes, or 0 if there is no newline."""
    while size > 0:
        start = max(size - 65_536, 0)
        file.seek(start)
        if newline := file.read(size - start).rfind(b"\n") + 1:
            return start + newline
        size = start
    return 0
