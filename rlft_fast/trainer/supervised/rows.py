"""Rows of data as tokens, and which of them are taught. Everything is checked before anything runs."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import SFTDataConfig, TaughtDataConfig
from rlft_fast.data import Batch, image_table
from rlft_fast.errors import brief, without_panics
from rlft_fast.trainer.episodes import THINKING, Style, find_styles
from rlft_fast.trainer.prompts import (
    COLUMNS,
    SYSTEM,
    Conversation,
    Encoding,
    ImageReader,
    LeftOut,
    Limits,
    Message,
    Overlong,
    PromptImages,
    Row,
    RowSet,
    are_written,
    conversation_of,
    encode_rows,
    find_media,
    find_media_column,
    find_mistake,
    folder_of,
    is_plain,
    name_rows,
    only_placeholders,
    reads,
    row_images,
    start_of_texts,
    tools_of,
    with_start,
    without_nulls,
)
from rlft_fast.trainer.supervised.spans import AssistantSpans, Span, Written, alternating, cut_text

T = TypeVar("T")

_MOST_CHARACTERS = 1000  # of a token; the longest tokens of vocabularies have 128 or so


class Tokens(NamedTuple):
    """A row as the model reads it."""

    ids: list[int]
    taught: bytes
    """Of each of them 1 if it is taught, else 0."""
    images: PromptImages | None = None
    is_cut: bool = False
    """Whether a part of the row was left out at its end."""


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Tokenized rows.

    Args:
        token_ids: of each row, int32.
        is_taught: of each row, bool, whether the model learns to say the token. The first token is never learned.
        images: by row, its images.
        sizes: rows of each set by its name.
        overlong: how many rows were left out, and of how many sequences a part was.
        left_out: the rows that were left out.
    """

    token_ids: list[np.ndarray]
    is_taught: list[np.ndarray]
    images: dict[int, PromptImages] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    overlong: Overlong = field(default_factory=Overlong)
    left_out: list[LeftOut] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def description(self) -> dict[str, Any]:
        """What tells the data from other data."""
        columns = self.token_ids, self.is_taught
        found: dict[str, Any] = {
            "rows": len(self), "tokens": sum(map(len, self.token_ids)), "taught_tokens": self.num_taught,
            "checksum": [zlib.crc32(np.concatenate(column).tobytes()) for column in columns],
        }  # fmt: skip
        if self.images:
            keys = "".join(f"{row} {own.key}\n" for row, own in self.images.items())
            found["images"] = zlib.crc32(keys.encode())
        return found | ({"overlong": self.overlong._asdict()} if self.overlong else {})

    @property
    def num_taught(self) -> int:
        return int(sum(map(np.count_nonzero, self.is_taught)))

    def __str__(self) -> str:
        lengths = self.num_tokens
        text = f"{len(self)} rows of {min(lengths)} to {max(lengths)} tokens"
        text += f", {self.num_taught:,} of {sum(lengths):,} are taught"
        return text + (f"; {self.overlong}" if self.overlong else "")

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self.token_ids]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.num_tokens)

    @property
    def highest_token(self) -> int:
        return max(int(ids.max()) for ids in self.token_ids)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The named rows, packed.

        Raises:
            ImageError: a file has changed since the start of the run, or is gone.
        """
        ids, taught = ([column[i] for i in rows] for column in (self.token_ids, self.is_taught))
        each, one = np.arange(len(rows)), np.ones(len(rows), np.int64)
        batch = Batch.from_columns(
            torch.from_numpy(np.array([x[0] for x in ids])), one, each,
            torch.from_numpy(np.concatenate([x[1:] for x in ids])), np.array([len(x) - 1 for x in ids]),
            torch.from_numpy(np.concatenate([x[1:] for x in taught])), {},
        )  # fmt: skip
        loaded = {i: self.images[i].load() for i in {*rows} & self.images.keys()}
        return batch.replace(**image_table(loaded.get(i) for i in rows))


def chunks(rows: Sequence[int], num_tokens: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """The rows in order, in lists of at most so many tokens, or of one row.

    Args:
        rows: numbers of rows.
        num_tokens: of each row of the set.
        most_tokens: of a list.
    """
    found: list[int] = []
    total = 0
    for i in rows:
        if found and total + num_tokens[i] > most_tokens:
            yield found
            found, total = [], 0
        found.append(i)
        total += num_tokens[i]
    if found:
        yield found


def load_rows(
    config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, path: str, sets: Sequence[RowSet],
    image_reader: ImageReader | None = None,
) -> TaughtRows:  # fmt: skip
    """Checks and tokenizes all rows.

    Args:
        config: names the columns, and says how texts become tokens.
        tokenizer: of the model.
        path: folder of the tokenizer, for messages.
        sets: the rows.
        image_reader: of the model; None: the model takes no images.

    Raises:
        ValueError: rows that teach nothing or are too long, images that cannot be used, or a chat template that does
            not show what the assistant says; rows are named.
    """
    reader = Reader(config, tokenizer, path, image_reader)
    return taught_rows(reader.each(sets, lambda row: read_taught(reader, config, row)), reader)


def taught_rows(found: Sequence[Tokens], reader: "Reader") -> TaughtRows:
    """The sequences that the reader has made."""
    token_ids = [np.array(own.ids, np.int32) for own in found]
    is_taught = [np.frombuffer(own.taught, np.bool_) for own in found]
    images = {i: own.images for i, own in enumerate(found) if own.images is not None}
    overlong = Overlong(len(reader.left_out), sum(own.is_cut for own in found))
    return TaughtRows(token_ids, is_taught, images, reader.sizes, overlong, reader.left_out)


class OverlongError(ValueError):
    """A row has too many tokens, and nothing can be learned from its beginning."""


class _TemplateError(ValueError):
    """The chat template cannot be used for any row."""


class Reader:
    """Makes tokens of rows.

    Attributes:
        sizes: rows of each set that were kept, by its name.
        left_out: rows that were left out.
    """

    def __init__(
        self, config: TaughtDataConfig, tokenizer: PreTrainedTokenizerBase, path: str,
        image_reader: ImageReader | None = None,
    ) -> None:  # fmt: skip
        self.config, self.tokenizer, self.path, self.image_reader = config, tokenizer, path, image_reader
        self.folder = Path()  # of the rows that are read
        self.start, self.limits = start_of_texts(tokenizer), Limits()
        a, b = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
        self.joins = tokenizer.decode(a + b) == "ab"
        self._spans: AssistantSpans | None = None
        self._styles: dict[str, Style] = {}  # by the tools, which most rows share
        self.sizes: dict[str, int] = {}
        self.left_out: list[LeftOut] = []

    def each(self, sets: Sequence[RowSet], read: Callable[[Row], Written[T]]) -> list[T]:
        """What each row of the sets becomes.

        Args:
            sets: the rows.
            read: makes it; raises an error for a row that cannot be learned.

        Raises:
            ValueError: rows cannot be learned, which are named.
        """
        return [found for given in sets for found in self._each(given, read)]

    def _each(self, given: RowSet, read: Callable[[Row], Written[T]]) -> list[T]:
        found: list[T] = []
        mistakes: dict[int, str] = {}
        self.folder = folder_of(given.source)
        with self.limits.many():
            rows = [*encode_rows(self.tokenizer, (_tried(read, row) for row in given.rows))]
        for i, made in enumerate(rows):
            if not isinstance(made, Exception):
                found.append(made)
            elif not isinstance(made, OverlongError) or self.config.overlong == "refuse":
                mistakes[i] = brief(made)
            else:
                self.left_out.append(LeftOut(given.source, i, brief(made)))
        self.sizes[given.name] = len(found)
        if mistakes:
            first = min(mistakes)
            rows = f"{given.source}: {name_rows([*mistakes])} cannot be learned"
            raise ValueError(f"{rows}: row {first}: {mistakes[first]}")
        if not found:
            raise ValueError(f"{given.source}: all rows are overlong: raise data.max_sequence_tokens")
        return found

    @property
    def spans(self) -> AssistantSpans:
        """Made for the first conversation: rows of texts need no chat template."""
        if self._spans is None:
            try:
                self._spans = AssistantSpans(self.tokenizer, self.path, self.limits)
            except ValueError as error:
                raise _TemplateError(str(error)) from error
        return self._spans

    def answered(self, row: Row, prompt: Any, answer: Any) -> Written[Tokens]:
        """A prompt with an answer, which is taught; each is a text, or messages without nulls.

        Raises:
            ValueError: there is nothing to learn, or it is too long, or the answer repeats another prompt.
        """
        if first := num_asked(prompt, answer):
            return self.said(row, answer, first)
        if not self.config.chat and isinstance(prompt, str):
            return self.told(row, prompt, _require_text("answer", answer))
        for text in (prompt, answer):
            if are_written(text):
                raise ValueError(f"messages must be a list, and not a text such as {brief(repr(text), 200)}")
        if isinstance(answer, str) and not answer.strip():
            raise ValueError("its answer is empty: leave the row out")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if not isinstance(asked, list) or not isinstance(said, list):
            raise ValueError(f"prompt and answer must be texts or messages, got {brief(repr((prompt, answer)))}")
        return self.said(row, [*asked, *said], len(asked))

    def said(self, row: Row, messages: Any, first: int = 0) -> Written[Tokens]:
        """A conversation, of which the assistant's messages from the first on are taught."""
        if not isinstance(messages, list) or not all(map(is_plain, messages)):  # most conversations are plain
            self._check(messages)
        images = self._images(row, messages)
        messages = only_placeholders(messages)
        if not any(message["role"] == "assistant" for message in messages[first:]):
            raise ValueError("the assistant says nothing")
        are_taught = [_is_taught(message) for message in messages[first:] if message["role"] == "assistant"]
        tools = tools_of(row)
        if tools and not reads(self.tokenizer, "tools", tools):
            conversation, first = self._as_in_episodes(row, tools, messages, first)
        else:
            conversation = conversation_of(messages, row, self.config, self.tokenizer, self.limits)
            first += len(conversation.messages) - len(messages)  # the system prompt
        text, spans = self.spans.find(conversation, first)
        spans = _chosen(spans, are_taught)
        conversation.require_shown(text, self.tokenizer, self.limits)
        _require_thought(messages[-1], text)
        self._require_short(text)
        if self.image_reader is not None:
            text, spans = _with_images(self.image_reader, text, spans, images)
        cut = cut_text(text, spans, joins=self.joins)
        return Written(cut.texts, lambda found: self._checked(*cut.make(found), images))

    def _check(self, messages: Any) -> None:
        """Raises ValueError for messages that no template can take."""
        if not isinstance(messages, list) or not all(isinstance(x, dict) and "role" in x for x in messages):
            raise ValueError(f"messages must have a role and content, got {brief(repr(messages))}")
        if (mistake := find_mistake(messages)) is not None:
            raise ValueError(mistake)
        if (media := find_media(messages, takes_images=self.image_reader is not None)) is not None:
            raise ValueError(
                f"its messages have {media!r}: images reach models that learn from them, in the objectives rl and sft; "
                "videos and audio reach none"
            )

    def _images(self, row: Row, messages: list[Message]) -> PromptImages | None:
        known = COLUMNS if self.image_reader is not None else ()
        if (media := find_media_column(row, known)) is not None:
            raise ValueError(
                f"it has something in its column {media!r}, which does not reach the model: leave the row or the "
                "column out"
            )
        if self.image_reader is None:
            return None
        sources = row_images({**row, "": messages}, "", self.folder)
        return self.image_reader.open(sources) if sources else None

    def _as_in_episodes(
        self, row: Row, tools: list[Any], messages: list[Message], first: int
    ) -> tuple[Conversation, int]:
        """A conversation whose template has no tools, as an environment would show it, and the first taught message."""
        key = json.dumps(tools, default=str)
        style = self._styles.get(key) or self._styles.setdefault(key, next(find_styles(self.tokenizer, tools)))
        before, after = style.written(messages[:first]), style.written(messages[first:])
        told = {**row, "tools": None}
        given = conversation_of([*before, *after], told, self.config, self.tokenizer, self.limits)
        conversation = style.with_tools(given)
        return conversation, len(conversation.messages) - len(after)

    def told(self, row: Row, prompt: str, text: str) -> Written[Tokens]:
        """A text behind a prompt, which may be empty, and the end token behind it. No template is applied."""
        self._images(row, [])  # a text has no place for an image
        self._require_short(prompt + text)
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer names no end token, with which a text ends: set eos_token in its settings")
        cut = cut_text(prompt + text, [Span(len(prompt), len(prompt + text))], joins=self.joins)

        def make(found: Sequence[list[int]]) -> Tokens:
            ids, taught = cut.make(found)
            if 1 not in taught:
                raise ValueError("its text becomes no token")
            added = [end] * (ids[-1] != end)
            whole, num_taught = [*with_start(ids, self.start), *added], taught.count(1) + len(added)
            return self._checked(whole, alternating([len(whole) - num_taught, num_taught]))

        return Written(cut.texts, make)

    def _checked(self, ids: list[int], taught: bytes, images: PromptImages | None = None) -> Tokens:
        most = self.config.max_sequence_tokens
        if 1 not in taught[1:]:
            raise ValueError("it teaches no token")
        if len(ids) <= most:
            return Tokens(ids, taught, images)
        if images is not None and self.config.overlong == "truncate":
            raise OverlongError(f"it has {len(ids)} tokens, and those of images stay together")
        if self.config.overlong != "truncate":
            raise OverlongError(
                f"it has {len(ids)} tokens, more than data.max_sequence_tokens={most}: raise it, or set data.overlong"
            )
        if 1 not in taught[1:most]:
            raise OverlongError("its first tokens teach nothing")
        return Tokens(ids[:most], taught[:most], is_cut=True)

    def _require_short(self, text: str) -> None:
        """Tokenizing megabytes would take minutes."""
        if len(text) > _MOST_CHARACTERS * self.config.max_sequence_tokens:
            raise OverlongError(f"it has {len(text)} characters, more than {_MOST_CHARACTERS} for each allowed token")


def num_asked(prompt: Any, answer: Any) -> int:
    """How many messages of an answer repeat its prompt, where it is a whole conversation; 0: it is an answer alone.

    Raises:
        ValueError: the conversation does not have the prompt, a text, in it.
    """
    if not isinstance(answer, list):
        return 0
    if isinstance(prompt, list):
        return len(prompt) if answer[: len(prompt)] == prompt else 0
    messages = [message if isinstance(message, dict) else {} for message in answer]
    begin = next((message.get("role") for message in messages if message.get("role") not in SYSTEM), None)
    if not isinstance(prompt, str) or begin != "user":
        return 0
    for i, message in enumerate(messages):
        if message.get("role") == "user" and _words(message.get("content")).strip() == prompt.strip():
            return i + 1
    raise ValueError(
        f"its prompt {brief(repr(prompt), 80)} is not in the conversation that answers it: give the answer alone, or "
        "leave the prompt out, for which data.prompt_column may name a column that no row has"
    )


def _is_taught(message: Message) -> bool:
    """Whether a message of the assistant's is taught: one with the weight 0 is not, as in OpenAI's files."""
    if (weight := message.get("weight", 1)) not in (0, 1):
        raise ValueError(f"a message has the weight {brief(repr(weight), 80)}, expected 0, which is not taught, or 1")
    return bool(weight)


def _chosen(spans: list[Span], are_taught: Sequence[bool]) -> list[Span]:
    """The spans of those messages of the assistant's that are taught."""
    if all(are_taught):
        return spans
    if not any(are_taught):
        raise ValueError("all messages of the assistant's have the weight 0: leave the row out")
    if len(spans) != len(are_taught):
        raise ValueError(
            f"a message has the weight 0, but the chat template marks {len(spans)} texts of {len(are_taught)} messages "
            "with {% generation %}: mark one for each message, or leave the weight out"
        )
    return [span for span, is_taught in zip(spans, are_taught, strict=True) if is_taught]


def _require_thought(last: Message, text: str) -> None:
    """Raises ValueError where a template leaves out the assistant's last thought. It may leave out earlier ones."""
    thoughts = {key: last[key] for key in THINKING if isinstance(last.get(key), str) and last[key].strip()}
    if last["role"] == "assistant" and thoughts and not any(own.strip() in text for own in thoughts.values()):
        raise ValueError(
            f"the chat template does not show the thought in the last message's {min(thoughts)!r}, which would not be "
            "learned: give it the key that the template reads, write it into the content, or leave it out"
        )
    words = _words(last.get("content"))
    thought = words.partition("</think>")[0].replace("<think>", "").strip() if "</think>" in words else ""
    if last["role"] == "assistant" and thought not in text:
        raise ValueError(
            "the chat template leaves out the thought before </think> in the last message, which would not be learned: "
            "change the chat template in the model's folder, leave the thought out, or give prompt and completion as "
            "texts, with data.chat: false"
        )


def _words(content: Any) -> str:
    """The text of a content that was not checked yet."""
    parts = content if isinstance(content, list) and all(isinstance(part, dict) for part in content) else []
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in parts)


def _with_images(
    reader: ImageReader, text: str, spans: Sequence[Span], images: PromptImages | None
) -> tuple[str, list[Span]]:
    """The text and the spans with the tokens of images in place of placeholders."""
    if any(reader.placeholder in text[span.start : span.end] for span in spans):
        raise ValueError("the assistant shows an image, which no model learns to say: leave the row out")
    text, places = reader.expand_at(text, images, [place for span in spans for place in span])
    return text, [Span(*pair) for pair in zip(places[::2], places[1::2], strict=True)]


def _require_text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {column!r} must be a text, got {brief(repr(value))}")
    return value


def _tried(read: Callable[[Row], Written[T]], row: Row) -> Encoding[T | Exception]:
    """What a row becomes, or its error. A template that cannot be used for any row ends the reading."""
    try:
        with without_panics():
            written = read(row)
            return written.make((yield written.texts))
    except _TemplateError:
        raise
    except Exception as error:  # a template is code of the model's, and tokenizers has no error of its own
        return error


def read_taught(reader: Reader, config: SFTDataConfig, row: Row) -> Written[Tokens]:
    """The tokens of a row of supervised fine-tuning."""
    columns = (config.messages_column, config.prompt_column, config.completion_column, config.text_column)
    messages, prompt, completion, text = (without_nulls(row.get(name)) for name in columns)
    if messages is not None and config.template is None:
        return reader.said(row, messages)
    if prompt is not None and completion is not None:
        return reader.answered(row, prompt, completion)
    if text is not None and config.template is None:
        return reader.told(row, "", _require_text(config.text_column, text))
    raise ValueError(
        f"it has no {columns[0]!r}, no {columns[1]!r} with {columns[2]!r}, and no {columns[3]!r}; its columns are "
        f"{sorted(row)}"
    )
