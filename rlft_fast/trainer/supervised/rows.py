"""Rows of data as tokens, and which of them are taught. Everything is checked before anything runs."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import SFTDataConfig
from rlft_fast.data import Batch
from rlft_fast.errors import brief, without_panics
from rlft_fast.trainer.prompts import (
    Row,
    conversation_of,
    find_mistake,
    name_rows,
    read_data,
    start_of_texts,
    without_nulls,
)
from rlft_fast.trainer.supervised.spans import AssistantSpans, Encode, encode_spans

_MOST_CHARACTERS = 1000  # of a token; the longest tokens of vocabularies have 128 or so

Tokens = tuple[list[int], list[bool]]
"""Ids of a row, and which of them are taught."""


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Tokenized rows.

    Args:
        token_ids: of each row, int32.
        is_taught: of each row, bool, whether the model learns to say the token. The first token is never learned.
        description: what tells the data from other data.
    """

    token_ids: list[np.ndarray]
    is_taught: list[np.ndarray]
    description: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __str__(self) -> str:
        lengths, taught = [len(ids) for ids in self.token_ids], self.description["taught_tokens"]
        return f"{len(self)} rows of {min(lengths)} to {max(lengths)} tokens, {taught:,} of {sum(lengths):,} are taught"

    @property
    def highest_token(self) -> int:
        return max(int(ids.max()) for ids in self.token_ids)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The named rows, packed."""
        ids, taught = ([column[i] for i in rows] for column in (self.token_ids, self.is_taught))
        each, one = np.arange(len(rows)), np.ones(len(rows), np.int64)
        return Batch.from_columns(
            torch.from_numpy(np.array([x[0] for x in ids])), one, each,
            torch.from_numpy(np.concatenate([x[1:] for x in ids])), np.array([len(x) - 1 for x in ids]),
            torch.from_numpy(np.concatenate([x[1:] for x in taught])), {},
        )  # fmt: skip


def load_rows(config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, path: str, source: str) -> TaughtRows:
    """Reads, checks and tokenizes all rows.

    Args:
        config: names the columns, and says how texts become tokens.
        tokenizer: of the model.
        path: folder of the tokenizer, for messages.
        source: file or folder of the rows.

    Raises:
        ValueError: unreadable or empty data, rows that teach nothing or are too long, or a chat template that does not
            show what the assistant says; rows are named.
    """
    rows = read_data(source)
    if not rows:
        raise ValueError(f"{source} holds no rows: there is nothing to train on")
    reader = _Reader(config, tokenizer, path)
    found: list[Tokens] = []
    mistakes: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            with without_panics():
                found.append(reader.read(row))
        except Exception as error:  # a template is code of the model's, and tokenizers has no error of its own
            if isinstance(error, _TemplateError):
                raise
            mistakes[i] = brief(error)
    if mistakes:
        first = min(mistakes)
        raise ValueError(f"{source}: {name_rows([*mistakes])} cannot be learned: row {first}: {mistakes[first]}")
    token_ids = [np.array(ids, np.int32) for ids, _ in found]
    is_taught = [np.array(taught, np.bool_) for _, taught in found]
    return TaughtRows(token_ids, is_taught, _describe(token_ids, is_taught))


def _describe(token_ids: list[np.ndarray], is_taught: list[np.ndarray]) -> dict[str, Any]:
    numbers = [zlib.crc32(np.concatenate(column).tobytes()) for column in (token_ids, is_taught)]
    found = {
        "rows": len(token_ids),
        "tokens": sum(map(len, token_ids)),
        "taught_tokens": int(sum(map(np.sum, is_taught))),
    }
    return found | {"checksum": numbers}


class _TemplateError(ValueError):
    """The chat template cannot be used for any row."""


class _Reader:
    """Makes tokens of rows."""

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        self.config, self.tokenizer, self.path = config, tokenizer, path
        self.start = start_of_texts(tokenizer)
        self.encode: Encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.joins = tokenizer.decode(self.encode("a") + self.encode("b")) == "ab"
        self._spans: AssistantSpans | None = None

    @property
    def spans(self) -> AssistantSpans:
        """Made for the first conversation: rows of texts need no chat template."""
        if self._spans is None:
            try:
                self._spans = AssistantSpans(self.tokenizer, self.path)
            except ValueError as error:
                raise _TemplateError(str(error)) from error
        return self._spans

    def read(self, row: Row) -> Tokens:
        """The tokens of a row.

        Raises:
            ValueError: there is nothing to learn, or it is too long.
        """
        ids, taught = self._tokens(row)
        if not any(taught[1:]):
            raise ValueError("it teaches no token")
        if len(ids) > self.config.max_sequence_tokens:
            most = self.config.max_sequence_tokens
            raise ValueError(f"it has {len(ids)} tokens, more than data.max_sequence_tokens={most}: leave it out")
        return ids, taught

    def _tokens(self, row: Row) -> Tokens:
        config = self.config
        columns = (config.messages_column, config.prompt_column, config.completion_column, config.text_column)
        messages, prompt, completion, text = (without_nulls(row.get(name)) for name in columns)
        if messages is not None:
            return self._said(row, messages, 0, config.messages_column)
        if prompt is not None and completion is not None:
            return self._answered(row, prompt, completion)
        if text is not None:
            return self._told("", _require_text(config.text_column, text))
        raise ValueError(
            f"it has no {columns[0]!r}, no {columns[1]!r} with {columns[2]!r}, and no {columns[3]!r}; its columns are "
            f"{sorted(row)}"
        )

    def _answered(self, row: Row, prompt: Any, completion: Any) -> Tokens:
        """A prompt with its completion."""
        config = self.config
        if not config.chat and isinstance(prompt, str):
            return self._told(prompt, _require_text(config.completion_column, completion))
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        if not isinstance(asked, list) or not isinstance(said, list):
            raise ValueError(f"its {config.prompt_column!r} and {config.completion_column!r} must be texts or messages")
        return self._said(row, [*asked, *said], len(asked), f"{config.prompt_column} and {config.completion_column}")

    def _said(self, row: Row, messages: Any, first: int, column: str) -> Tokens:
        """A conversation, of which the assistant's messages from the first on are taught."""
        if not isinstance(messages, list) or not all(isinstance(x, dict) and "role" in x for x in messages):
            raise ValueError(
                f"its {column!r} must be a list of messages with role and content, got {brief(repr(messages))}"
            )
        if (mistake := find_mistake(messages)) is not None:
            raise ValueError(f"of its {column!r}, {mistake}")
        if not any(message["role"] == "assistant" for message in messages[first:]):
            raise ValueError("the assistant says nothing")
        conversation = conversation_of(messages, row, self.config, self.tokenizer)
        added = len(conversation.messages) - len(messages)  # the system prompt
        text, spans = self.spans.find(conversation, first + added)
        self._require_short(text)
        return encode_spans(text, spans, self.encode, joins=self.joins)

    def _told(self, prompt: str, text: str) -> Tokens:
        """A text behind a prompt, which may be empty, and the end token behind it. No template is applied."""
        self._require_short(prompt + text)
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer names no end token, with which a text ends: set eos_token in its settings")
        before, ids = self.start + (self.encode(prompt) if prompt else []), self.encode(text)
        if not ids:
            raise ValueError("its text becomes no token")
        ids += [end] * (ids[-1] != end)
        return before + ids, [False] * len(before) + [True] * len(ids)

    def _require_short(self, text: str) -> None:
        """Tokenizing megabytes would take minutes."""
        if len(text) > _MOST_CHARACTERS * self.config.max_sequence_tokens:
            raise ValueError(f"it has {len(text)} characters, more than {_MOST_CHARACTERS} for each allowed token")


def _require_text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {column!r} must be a text, got {brief(repr(value))}")
    return value
