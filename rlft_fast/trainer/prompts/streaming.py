"""Prompts that are read and made into tokens when a step takes them, from files that need not fit into memory.

Memory holds where each row begins, in 8 bytes. The order of the rows is that of `load_prompts`, so a run that streams
its data has the numbers of a run that loads them.
"""

import threading
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import DataConfig
from rlft_fast.errors import RunError, StepError, brief
from rlft_fast.files import require_no_utf16
from rlft_fast.trainer.prompts.formats import (
    Row,
    parquet_file,
    parse_json,
    require_object,
    rows_of_table,
    suffixes_of,
)
from rlft_fast.trainer.prompts.loading import PromptReader, Prompts, ReadPrompt, checksum, prompts_of
from rlft_fast.trainer.prompts.rows import RowSet, Stream, prompt_column, with_prompts

_NUM_CHECKED = 1000  # rows of each set that are checked before the run starts
_BOM = b"\xef\xbb\xbf"


class StreamError(StepError, RunError):
    """A row of a file that is streamed cannot be used."""

    part = "data"


@dataclass(frozen=True, slots=True)
class StreamedPrompts(Prompts):
    """Prompts of which the first rows are in memory. `select` reads any.

    Args:
        num_rows: of all sets.
        read: returns the prompts of these rows.
        embeddings: of each model of `check_tokens`, by its key.
    """

    num_rows: int = 0
    read: Callable[[tuple[int, ...]], Prompts] | None = None
    embeddings: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_rows

    def check_tokens(self, key: str, num_embeddings: int) -> None:
        """See `Prompts.check_tokens`: of the rows in memory now, and of others when `select` reads them."""
        Prompts.check_tokens(self, key, num_embeddings)
        self.embeddings[key] = num_embeddings

    def select(self, indices: Sequence[int]) -> Prompts:
        """See `Prompts.select`.

        Raises:
            StreamError: a row cannot be used, or a file has changed.
        """
        assert self.read is not None
        try:
            found = self.read(tuple(indices))
            for key, num_embeddings in self.embeddings.items():
                found.check_tokens(key, num_embeddings)
            return found
        except ValueError as error:
            raise StreamError(str(error)) from error


def stream_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> StreamedPrompts:
    """Finds the rows of all files, and checks the first of each.

    Args:
        config: with paths of JSON lines and parquet.
        tokenizer: the policy's.
        max_prompt_tokens: tokens of the longest prompt allowed.

    Raises:
        ValueError: a file cannot be streamed, or has no rows, or a row that is checked cannot be used.
    """
    files = {name: _open(source) for name, source in config.sets.items()}
    most = config.max_rows if isinstance(config.max_rows, dict) else dict.fromkeys(files, config.max_rows)
    sizes = {name: min(len(file), most.get(name) or len(file)) for name, file in files.items()}
    column = prompt_column(config)
    reader = PromptReader(config, tokenizer, max_prompt_tokens, column, None)
    starts = [*accumulate(sizes.values(), initial=0)]
    lock, names = threading.Lock(), set[str]()

    def read_set(file: _RowFile, numbers: Sequence[int]) -> list[ReadPrompt]:
        sets = [RowSet("", file.read(numbers), file.source, numbers)]
        return reader.read(with_prompts(sets, column, config.template)[0])

    def read(rows: tuple[int, ...]) -> Prompts:
        found: dict[int, ReadPrompt] = {}
        with lock:
            for start, size, file in zip(starts, sizes.values(), files.values(), strict=False):
                own = [row for row in dict.fromkeys(rows) if start <= row < start + size]
                if own:
                    found |= zip(own, read_set(file, [row - start for row in own]), strict=True)
        return prompts_of([found[row] for row in rows], column, names)

    first = read(tuple(row for start, size in zip(starts, sizes.values(), strict=False)
                       for row in range(start, start + min(size, _NUM_CHECKED))))  # fmt: skip
    names |= first.columns.keys()
    described = {
        "rows": starts[-1], "files": {name or "path": file.checksum for name, file in files.items()},
        "chat_template": checksum(getattr(tokenizer, "chat_template", None)),
    }  # fmt: skip
    return StreamedPrompts(
        first.texts, first.token_ids, first.columns, first.continued, first.conversations,
        description=described, stream=Stream.of(config, sizes), num_rows=starts[-1], read=lru_cache(2)(read),
    )  # fmt: skip


class _RowFile(Protocol):
    source: str
    checksum: int

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[Row]: ...


def _open(source: str) -> _RowFile:
    path = Path(source)
    suffix = suffixes_of(path)[-1]
    if not path.is_file() or suffix in (".gz", ".csv", ".tsv"):
        raise ValueError(
            f"data.streaming reads files of JSON lines and of parquet, and {source} is none: leave data.streaming out"
        )
    try:
        file = _ParquetFile(path) if suffix == ".parquet" else _LinesFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot stream the data {source}: {brief(error)}") from error
    if not len(file):
        raise ValueError(f"{source} holds no rows: there is nothing to train on")
    return file


class _Unchanged:
    """A file that has to stay as it is while rows of it are read."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, str(path)
        self._state = self._now()

    def _now(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def require(self) -> None:
        """Raises ValueError for a file that has changed, or is gone."""
        try:
            is_same = self._now() == self._state
        except OSError as error:
            raise ValueError(f"cannot read the data {self.source}: {brief(error)}") from error
        if not is_same:
            raise ValueError(f"{self.source} has changed since the run started: put the file back, and resume")


class _LinesFile(_Unchanged):
    """Lines of JSON, read one by one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        starts, place, self.checksum = array("q"), 0, 0
        with path.open("rb") as file:
            for line in file:
                if not place:
                    require_no_utf16(line)
                    if line.removeprefix(_BOM).lstrip().startswith(b"["):
                        raise ValueError("it is a JSON array: write each row into a line of its own")
                if line.strip():
                    starts.append(place)
                place += len(line)
                self.checksum = zlib.crc32(line, self.checksum)
        self._starts = np.frombuffer(starts, np.int64) if starts else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        self.require()
        with self.path.open("rb") as file:
            return [self._row(file, number) for number in numbers]

    def _row(self, file: Any, number: int) -> Row:
        file.seek(int(self._starts[number]))
        where = f"{self.source}: row {number} (counted from 0)"
        try:
            row = parse_json(file.readline().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is no UTF-8 ({error.reason}): save the file in UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error} (each row stands in a line of its own)") from error
        return require_object(row, where)


class _ParquetFile(_Unchanged):
    """Rows of parquet. The groups of rows that have them are read whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with parquet_file(path) as file:
            found = file.metadata
            sizes = [found.row_group(i).num_rows for i in range(found.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        with path.open("rb") as content:  # the footer has sizes and places of all columns, and statistics of them
            content.seek(-8, 2)
            length = int.from_bytes(content.read(4), "little")
            content.seek(-8 - length, 2)
            self.checksum = zlib.crc32(content.read())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, numbers: Sequence[int]) -> list[Row]:
        self.require()
        groups = np.searchsorted(self._starts, numbers, side="right") - 1
        found: dict[int, Row] = {}
        with parquet_file(self.path) as file:
            for group in np.unique(groups).tolist():
                own = [n for n, other in zip(numbers, groups, strict=True) if other == group]
                places = [n - int(self._starts[group]) for n in own]
                found |= zip(own, rows_of_table(file.read_row_group(group).take(places)), strict=True)
        return [found[number] for number in numbers]
