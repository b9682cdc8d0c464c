"""Prompts: read from JSONL, a dataset folder or a reasoning-gym task, checked and tokenized before anything runs."""

import json
import re
import signal
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from rlft_fast.config import DataConfig
from rlft_fast.files import read_text

_MAX_NAMED_ROWS = 5
_MOST_CHARACTERS = 1000  # of a token; the longest tokens of vocabularies have 128 or so
_TEMPLATE_SECONDS = 1.5  # of CPU time for one row; templates take milliseconds
_MEDIA = re.compile(r"(input_)?(image|video|audio)s?(_url)?")  # types and keys of transformers, OpenAI and Qwen


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokenized prompts with the columns that reward functions see.

    Args:
        texts: N prompts as the model reads them.
        token_ids: N lists of token ids.
        columns: the other columns of the data, each N long.
    """

    texts: list[str]
    token_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def description(self) -> dict[str, int]:
        """What tells these prompts from others."""
        everything = json.dumps([self.texts, self.columns], sort_keys=True, default=lambda value: type(value).__name__)
        return {"rows": len(self), "tokens": sum(map(len, self.token_ids)), "checksum": zlib.crc32(everything.encode())}

    def select(self, indices: Sequence[int]) -> "Prompts":
        """The named rows, in that order."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return Prompts([self.texts[i] for i in indices], [self.token_ids[i] for i in indices], columns)

    def order(self, start: int, count: int, seed: int) -> list[int]:
        """Rows ``start`` to ``start + count`` of an endless stream of shuffled passes over the data.

        A pure function of its arguments: a resumed run needs to know nothing but its step.
        """
        indices: list[int] = []
        while len(indices) < count:
            epoch, offset = divmod(start + len(indices), len(self))
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            shuffled = torch.randperm(len(self), generator=generator)
            indices += shuffled[offset : offset + count - len(indices)].tolist()
        return indices


def load_prompts(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, path: str | None = None) -> Prompts:
    """Reads, checks and tokenizes all prompts.

    Args:
        config: where they come from and how texts become tokens.
        tokenizer: the policy's.
        max_prompt_tokens: tokens of the longest prompt allowed.
        path: read this file or folder instead, for example the held-out one.

    Raises:
        ValueError: unreadable or empty data, rows without a prompt, or prompts that are too long; rows are named.
    """
    source = path or config.path
    rows = _read(source) if source is not None else _make_task(config)
    column = config.prompt_column if source is not None else "question"
    name = source or f"task {config.task}"
    _check_rows(rows, column, name)
    texts, token_ids = [], []
    for i, row in enumerate(rows):
        text, options = _as_read(i, row[column], config, tokenizer, name)
        if len(text) > _MOST_CHARACTERS * max_prompt_tokens:  # tokenizing megabytes would take minutes
            raise ValueError(
                f"{name}: row {i} (counted from 0) has {len(text)} characters, more than {_MOST_CHARACTERS} for each "
                f"of rollout.max_prompt_tokens={max_prompt_tokens}: leave the row out"
            )
        texts.append(text)
        token_ids.append(_encode(i, text, tokenizer, name, options))
    if long := [i for i, ids in enumerate(token_ids) if len(ids) > max_prompt_tokens]:
        worst = max(long, key=lambda i: len(token_ids[i]))
        raise ValueError(
            f"{name}: {_name_rows(long)} are longer than rollout.max_prompt_tokens={max_prompt_tokens} "
            f"(row {worst} has {len(token_ids[worst])} tokens): raise it, or leave these rows out"
        )
    others = sorted({key for row in rows for key in row} - {column})
    return Prompts(texts, token_ids, {key: [row.get(key) for row in rows] for key in others})


def _check_rows(rows: list[dict[str, Any]], column: str, name: str) -> None:
    if not rows:
        raise ValueError(f"{name} holds no rows: there is nothing to train on")
    if empty := [i for i, row in enumerate(rows) if not str(row.get(column) or "").strip()]:
        raise ValueError(
            f"{name}: {_name_rows(empty)} have no {column!r}; its columns are {sorted(rows[0])}: "
            "fill them in, or set data.prompt_column"
        )
    if other := [i for i, row in enumerate(rows) if not _is_prompt(row[column])]:
        raise ValueError(
            f"{name}: {_name_rows(other)} have a {column!r} that is neither a text nor a list of messages with role "
            f"and content, for example {rows[other[0]][column]!r}"
        )
    in_prompts = {i: found for i, row in enumerate(rows) if (found := _media(row[column]))}
    beside = {i: found for i, row in enumerate(rows) if (found := _first_media(_filled(row, but=column)))}
    for media, where in ((in_prompts, f"in their {column!r}"), (beside, f"beside their {column!r}")):
        if media:
            first = min(media)
            raise ValueError(
                f"{name}: {_name_rows([*media])} have images, videos or audio {where} (row {first} has "
                f"{media[first]!r}), which do not reach the model: leave these rows out"
            )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    return isinstance(value, str)


def _media(prompt: str | list[dict[str, Any]]) -> str | None:
    """The type or key of the first image, video or audio in a prompt's messages; templates drop what they hold."""
    messages = prompt if isinstance(prompt, list) else []
    contents = [m["content"] if isinstance(m["content"], list) else [m["content"]] for m in messages]
    parts = [part for part in (*messages, *chain.from_iterable(contents)) if isinstance(part, dict)]
    return _first_media(name for part in parts for name in (part.get("type"), *_filled(part)))


def _first_media(names: Iterable[Any]) -> str | None:
    return next((name for name in names if isinstance(name, str) and _MEDIA.fullmatch(name)), None)


def _filled(values: Mapping[str, Any], but: str | None = None) -> list[str]:
    """The keys that hold something."""
    return [key for key, value in values.items() if value and key != but]


def _as_read(row: int, prompt: Any, config: DataConfig, tokenizer: Tokenizer, name: str) -> tuple[str, dict[str, Any]]:
    """A prompt as the model reads it, and how it is tokenized."""
    if isinstance(prompt, str) and not config.chat:
        return prompt, {}
    messages = prompt
    if isinstance(prompt, str):
        system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        messages = [*system, {"role": "user", "content": prompt}]
    try:
        with _at_most(_TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code of the model's: it may divide by 0, or loop without end
        raise ValueError(
            f"{name}: the tokenizer's chat template cannot be applied to row {row} (counted from 0): {error} "
            "(data.chat: false sends texts without a template)"
        ) from error
    return text, {"add_special_tokens": False}  # a template writes them itself


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError once the main thread has computed for `seconds`.

    In another thread nothing is limited, because Python handles signals in the main thread alone. One long call of C
    code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def stop(number: int, frame: Any) -> None:
        if time.thread_time() - started > seconds:  # the timer counts all threads
            raise TimeoutError(f"it takes more than {seconds} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)  # again, if an error is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _encode(row: int, text: str, tokenizer: Tokenizer, name: str, options: dict[str, Any]) -> list[int]:
    try:
        ids = tokenizer.encode(text, **options)
    except TypeError as error:  # half of a pair such as \ud83d\ude00, which JSON can name
        raise ValueError(f"{name}: row {row} (counted from 0) is no text that can be tokenized: {text!r}") from error
    if not ids:
        raise ValueError(f"{name}: row {row} (counted from 0) becomes no token, as the model reads it: {text!r}")
    return ids


def _read(source: str) -> list[dict[str, Any]]:
    path = Path(source)
    if path.is_dir():
        return _read_dataset(path)
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read the data {source}: {error} (expected JSON lines in UTF-8, or a folder written by "
            "datasets.save_to_disk)"
        ) from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028 within a text
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of numbers too long and lists too deep
                raise ValueError(f"{source}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{source}, line {number} must be a JSON object, got {type(row).__name__}")
            rows.append(row)
    return rows


def _read_dataset(path: Path) -> list[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} is a folder: reading dataset folders needs `pip install datasets`") from error
    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a folder written by datasets.save_to_disk: {error}") from error
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{path} holds the splits {sorted(dataset)}: name one, for example {path / 'train'}")
    return dataset.to_list()


def _make_task(config: DataConfig) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError("data.task needs reasoning-gym: pip install 'rlft_fast[demo]'") from error
    assert config.task is not None
    try:
        dataset = reasoning_gym.create_dataset(config.task, size=config.task_size, seed=0, **config.task_options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make the task {config.task!r}: {error}") from error
    return [{"question": entry["question"], "entry": entry} for entry in dataset]


def _name_rows(rows: list[int]) -> str:
    named = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    more = len(rows) - _MAX_NAMED_ROWS
    return f"rows {named}" + (f" and {more} more" if more > 0 else "") + " (counted from 0)"
