"""Prompts: checked and tokenized before anything runs."""

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from rlft_fast.config import DataConfig
from rlft_fast.data import Images
from rlft_fast.errors import brief
from rlft_fast.garbage import uncollected
from rlft_fast.trainer.prompts.chat import Conversation, Rendered, Tokenizer, render_row, without_nulls
from rlft_fast.trainer.prompts.formats import Row
from rlft_fast.trainer.prompts.images import COLUMNS, ImageReader, PromptImages, folder_of, row_images
from rlft_fast.trainer.prompts.limits import Limits
from rlft_fast.trainer.prompts.messages import Message, are_written, find_mistake, is_plain
from rlft_fast.trainer.prompts.rows import LeftOut, Overlong, RowSet, Stream, prompt_column, read_sets
from rlft_fast.trainer.prompts.tokens import Encoding, encode_rows, start_of_texts, with_start

T = TypeVar("T")

_MAX_NAMED_ROWS = 5
_MOST_CHARACTERS = 1000  # of a token; the longest tokens of vocabularies have 128 or so
_CLOCK = "strftime_now"  # the only function of a template that reads the clock
_MEDIA = re.compile(r"(input_)?(image|video|audio)s?(_url)?")  # types and keys of transformers, OpenAI and Qwen


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokenized prompts with the columns that reward functions see.

    Args:
        texts: N prompts as the model reads them.
        token_ids: N lists of token ids.
        columns: the other columns of the data, each N long.
        continued: by row, the assistant's words at the end of the text. The answer to the prompt begins with them.
        conversations: by row, the conversation whose text the prompt is. Other prompts are texts without a template.
        images: by row, the images of the prompt.
        description: what tells the data from other data, see `_describe`. Empty in a selection of rows.
        stream: the order in which a run takes them; None: one set, shuffled.
        overlong: how many rows were left out, and of how many prompts a part was.
        left_out: the rows that were left out.
    """

    texts: list[str]
    token_ids: list[list[int]]
    columns: dict[str, list[Any]]
    continued: dict[int, str] = field(default_factory=dict)
    conversations: dict[int, Conversation] = field(default_factory=dict)
    images: dict[int, PromptImages] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    stream: Stream | None = None
    overlong: Overlong = field(default_factory=Overlong)
    left_out: list[LeftOut] = field(default_factory=list, compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int]) -> "Prompts":
        """The named rows, in that order, without the description of all rows."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return Prompts(
            [self.texts[i] for i in indices], [self.token_ids[i] for i in indices], columns,
            _renumbered(self.continued, indices), _renumbered(self.conversations, indices),
            _renumbered(self.images, indices),
        )  # fmt: skip

    def load_images(self) -> list[Images | None]:
        """The images of each prompt, None where it has none; empty: no prompt has.

        Raises:
            ImageError: a file has changed since the start of the run, or is gone.
        """
        loaded = {row: images.load() for row, images in self.images.items()}
        return [loaded.get(row) for row in range(len(self))] if loaded else []

    def answered(self, completions: Sequence[str]) -> tuple[list[str], list[str]]:
        """Prompts and whole answers: the answer has the words that it continues, and the prompt ends before them.

        Args:
            completions: N texts that the model has added to the prompts.
        """
        words = [self.continued.get(i, "") for i in range(len(self))]
        asked = [text[: len(text) - len(begun)] for text, begun in zip(self.texts, words, strict=True)]
        return asked, [begun + text for begun, text in zip(words, completions, strict=True)]

    def answered_messages(self, completions: Sequence[str]) -> tuple[list[str | list[Message]], list[Any]]:
        """As `answered`, but of a conversation the messages, and the answer as a list of one message, as in TRL."""
        asked, answers = self.answered(completions)
        pairs: list[Any] = [*zip(asked, answers, strict=True)]
        for row, conversation in self.conversations.items():
            messages, message = conversation.split(answers[row])
            pairs[row] = messages, [message]
        return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]

    def check_tokens(self, key: str, num_embeddings: int) -> None:
        """Refuses a token without an embedding: on a GPU its look-up ends the process without a reason.

        Args:
            key: of the model, in messages.
            num_embeddings: of the model.

        Raises:
            ValueError: a prompt has such a token.
        """
        highest = max(max(ids) for ids in self.token_ids)
        if highest >= num_embeddings:
            raise ValueError(
                f"{key} has embeddings of {num_embeddings} tokens, but the prompts have the token {highest}: the "
                "tokenizer in the policy's folder is of another model, or knows tokens that were added without new "
                "embeddings"
            )

    def order(self, start: int, count: int, seed: int) -> list[int]:
        """Rows of the stream, see `Stream.rows`."""
        return (self.stream or Stream((len(self),))).rows(start, count, seed)


def _renumbered(values: Mapping[int, T], indices: Sequence[int]) -> dict[int, T]:
    """The values of the named rows, by their places in the list of names."""
    return {new: values[i] for new, i in enumerate(indices) if i in values}


class ReadPrompt(NamedTuple):
    """A row as the model reads it."""

    row: Row
    read: Rendered
    token_ids: list[int]
    images: PromptImages | None


@uncollected()
def load_prompts(
    config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, path: str | None = None,
    max_rows: int | None = None, image_reader: ImageReader | None = None,
) -> Prompts:  # fmt: skip
    """Reads, checks and tokenizes all prompts.

    Args:
        config: where they come from and how texts become tokens.
        tokenizer: the policy's.
        max_prompt_tokens: tokens of the longest prompt allowed.
        path: read this source instead, for example the held-out one.
        max_rows: of this source; None: all.
        image_reader: of the policy; None: the policy takes no images.

    Raises:
        ValueError: unreadable or empty data, rows without a prompt, images that cannot be used, or prompts that are
            too long, unless ``data.overlong`` allows them; rows are named.
    """
    column = prompt_column(config, path)
    reader = PromptReader(config, tokenizer, max_prompt_tokens, column, image_reader)
    sets = {found.name: reader.read(found) for found in read_sets(config, path, max_rows)}
    read = [prompt for found in sets.values() for prompt in found]
    prompts = replace(
        prompts_of(read, column),
        stream=Stream.of(config, {name: len(found) for name, found in sets.items()}) if path is None else None,
        overlong=reader.overlong,
        left_out=reader.left_out,
    )
    uses_template = config.chat or any(isinstance(prompt.row[column], list) for prompt in read)
    template = json.dumps(getattr(tokenizer, "chat_template", None)) if uses_template else ""
    asked = {column: [without_nulls(prompt.row[column]) for prompt in read]}
    return replace(prompts, description=_describe(prompts, asked, template))


def prompts_of(read: Sequence[ReadPrompt], column: str, names: Iterable[str] = ()) -> Prompts:
    """The prompts of rows.

    Args:
        read: by a `PromptReader`.
        column: with the prompts.
        names: of columns that other rows have.
    """
    rows = [prompt.row for prompt in read]
    others = sorted({key for row in rows for key in row}.union(names) - {column})
    return Prompts(
        [prompt.read.text for prompt in read],
        [prompt.token_ids for prompt in read],
        {key: [row.get(key) for row in rows] for key in others},
        {i: prompt.read.continued for i, prompt in enumerate(read) if prompt.read.continued},
        {i: prompt.read.conversation for i, prompt in enumerate(read) if prompt.read.conversation is not None},
        {i: prompt.images for i, prompt in enumerate(read) if prompt.images is not None},
    )


class PromptReader:
    """Makes prompts of rows.

    Args:
        config: see `load_prompts`.
        tokenizer: see `load_prompts`.
        max_prompt_tokens: see `load_prompts`.
        column: with the prompts.
        image_reader: see `load_prompts`.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, column: str,
        image_reader: ImageReader | None,
    ) -> None:  # fmt: skip
        self.config, self.tokenizer, self.most, self.column = config, tokenizer, max_prompt_tokens, column
        self.image_reader = image_reader
        self.start = start_of_texts(tokenizer)
        self.limits = Limits()
        self.overlong = Overlong()
        self.left_out: list[LeftOut] = []

    def read(self, found: RowSet) -> list[ReadPrompt]:
        """The prompts of a set."""
        _check_rows(found, self.column, takes_images=self.image_reader is not None, chat=self.config.chat)
        reading = (self._read(found.number(i), row, found.source) for i, row in enumerate(found.rows))
        with self.limits.many():
            prompts = [*encode_rows(self.tokenizer, reading)]
        long = [i for i, prompt in enumerate(prompts) if len(prompt.token_ids) > self.most]
        if not long:
            return prompts
        worst = max(long, key=lambda i: len(prompts[i].token_ids))
        too_long = (
            f"longer than rollout.max_prompt_tokens={self.most} (row {found.number(worst)} has "
            f"{len(prompts[worst].token_ids)} tokens): raise it, "
        )
        if self.config.overlong == "refuse":
            raise ValueError(
                f"{found.source}: {name_rows([*map(found.number, long)])} are {too_long}or set data.overlong to filter "
                "or truncate"
            )
        kept = [self._fitted(prompt) for prompt in prompts]
        num_left_out, num_before = kept.count(None), self.overlong
        self.left_out += [
            LeftOut(found.source, found.number(i), f"{len(prompts[i].token_ids)} tokens")
            for i in long
            if kept[i] is None
        ]
        self.overlong = Overlong(num_before.left_out + num_left_out, num_before.truncated + len(long) - num_left_out)
        if num_left_out == len(kept):
            raise ValueError(f"{found.source}: all rows are {too_long}or leave this set out")
        return [prompt for prompt in kept if prompt is not None]

    def _fitted(self, prompt: ReadPrompt) -> ReadPrompt | None:
        """The prompt with its last tokens behind the tokenizer's start; None: it cannot be cut."""
        ids, size = prompt.token_ids, len(self.start)
        if len(ids) <= self.most:
            return prompt
        if self.config.overlong == "filter" or prompt.images is not None:  # whose tokens stay together
            return None
        size = size if ids[:size] == self.start and size < self.most else 0
        ids = ids[:size] + ids[len(ids) - self.most + size :]
        shown = ids if prompt.read.conversation is not None else ids[size:]  # the start is no part of a bare text
        text = self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.endswith(prompt.read.continued):  # words that the answer continues
            return None
        return prompt._replace(read=prompt.read._replace(text=text), token_ids=ids)

    def _read(self, number: int, row: Row, source: str) -> Encoding[ReadPrompt]:
        is_text = isinstance(row[self.column], str) and not self.config.chat
        read = Rendered(row[self.column]) if is_text else self._rendered(number, row, source)
        most = _MOST_CHARACTERS * self.most  # tokenizing megabytes would take minutes
        if len(read.text) > most and self.config.overlong == "refuse":
            raise ValueError(
                f"{source}: row {number} (counted from 0) has {len(read.text)} characters, more "
                f"than {_MOST_CHARACTERS} for each of rollout.max_prompt_tokens={self.most}: leave it "
                "out, or set data.overlong"
            )
        text, images = self._with_images(number, row, read.text, source)
        if len(text) > most and images is None:
            text = text[:_MOST_CHARACTERS] + text[-most:]  # with its start; its tokens are too many, too
        ids = yield from _encode(number, text, source, self.start if is_text else [])
        return ReadPrompt(row, read, ids, images)

    def _with_images(self, number: int, row: Row, text: str, source: str) -> tuple[str, PromptImages | None]:
        """The text with the tokens of a row's images, and the images."""
        if self.image_reader is None:
            return text, None
        try:
            sources = row_images(row, self.column, folder_of(source))
            images = self.image_reader.open(sources) if sources else None
            return self.image_reader.expand(text, images), images
        except ValueError as error:
            raise ValueError(f"{source}: row {number} (counted from 0) {error}") from error

    def _rendered(self, number: int, row: Row, source: str) -> Rendered:
        """A row's prompt in the chat template."""
        prompt = row[self.column]
        try:
            return render_row(prompt, row, self.config, self.tokenizer, self.limits)
        except Exception as error:  # a template is code of the model's: it may divide by 0, or loop without end
            instead = " (data.chat: false sends texts without a template)" if isinstance(prompt, str) else ""
            raise ValueError(
                f"{source}: the tokenizer's chat template cannot be applied to row {number} (counted from 0): "
                f"{brief(error)}{instead}"
            ) from error


def _describe(prompts: Prompts, asked: dict[str, list[Any]], template: str) -> dict[str, Any]:
    """What tells the data from other data: checksums of what the rows hold, and of what the model reads.

    Args:
        prompts: of all rows.
        asked: the column with the prompts, as in the rows.
        template: the chat template; "" where no row needs it. If it writes the time, the texts differ from run to run,
            and the template stands for them.
    """
    columns = {name: checksum(values) for name, values in (asked | prompts.columns).items()}
    found: dict[str, Any] = {"rows": len(prompts), "columns": columns}
    if prompts.images:
        found["images"] = checksum([own.key for own in prompts.images.values()])
    if prompts.overlong:
        found["overlong"] = prompts.overlong._asdict()
    if _CLOCK in template:
        return found | {"chat_template": checksum(template)}
    num_tokens = sum(map(len, prompts.token_ids))
    return found | {"tokens": num_tokens, "checksum": checksum([prompts.texts, prompts.columns])}


def checksum(value: Any) -> int:
    """Of a value that JSON can hold, with bytes in it."""
    return zlib.crc32(json.dumps(value, sort_keys=True, default=_in_json).encode())


def _in_json(value: Any) -> Any:
    return zlib.crc32(value) if isinstance(value, bytes) else type(value).__name__


def _check_rows(found: RowSet, column: str, *, takes_images: bool, chat: bool) -> None:
    rows, name = found.rows, found.source

    def named(places: Iterable[int]) -> str:
        return name_rows([found.number(i) for i in places])

    if empty := [i for i, row in enumerate(rows) if not str(row.get(column) or "").strip()]:
        raise ValueError(
            f"{name}: {named(empty)} have no {column!r}; its columns are {sorted(rows[0])}: "
            "fill them in, or set data.prompt_column"
        )
    if other := [i for i, row in enumerate(rows) if not _is_prompt(row[column])]:
        raise ValueError(
            f"{name}: {named(other)} have a {column!r} that is neither a text nor a list of messages with role "
            f"and content or tool_calls, for example {brief(repr(rows[other[0]][column]))}"
        )
    if chat and (written := [i for i, row in enumerate(rows) if are_written(row[column])]):
        raise ValueError(
            f"{name}: {named(written)} have a {column!r} that is a text with messages in it, for example "
            f"{brief(repr(rows[written[0]][column]), 200)}: the model would read their brackets, too. JSON lines and "
            "parquet hold messages as lists; CSV does not (data.chat: false sends texts as they are)"
        )
    known = (column, *(COLUMNS if takes_images else ()))
    in_prompts = {i: kind for i, row in enumerate(rows) if (kind := find_media(row[column], takes_images=takes_images))}
    beside = {i: kind for i, row in enumerate(rows) if (kind := find_media_column(row, known))}
    for media, where in ((in_prompts, f"in their {column!r}"), (beside, f"beside their {column!r}")):
        if media:
            first = min(media)
            raise ValueError(
                f"{name}: {named(media)} have images, videos or audio {where} (row {found.number(first)} has "
                f"{media[first]!r}), which do not reach the model: leave these rows out"
            )
    chats = {i: without_nulls(row[column]) for i, row in enumerate(rows) if isinstance(row[column], list)}
    if mistakes := {i: mistake for i, chat in chats.items() if (mistake := find_mistake(chat)) is not None}:
        first = min(mistakes)
        raise ValueError(
            f"{name}: {named(mistakes)} have messages in their {column!r} that cannot be used: of row "
            f"{found.number(first)}, "
            f"{mistakes[first]}"
        )


def _is_prompt(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(isinstance(message, dict) and "role" in message for message in value)


def find_media(prompt: str | list[dict[str, Any]], *, takes_images: bool = False) -> str | None:
    """The type or key of the first image, video or audio in a prompt's messages; templates drop what they hold.

    Args:
        prompt: of a row.
        takes_images: whether parts of the type "image" are known.
    """
    if isinstance(prompt, str) or all(map(is_plain, prompt)):
        return None
    contents = [content if isinstance(content := m.get("content"), list) else [content] for m in prompt]
    parts = [part for part in (*prompt, *chain.from_iterable(contents)) if isinstance(part, dict)]
    known = [{"image"} if takes_images and part.get("type") == "image" else set() for part in parts]
    named = zip(known, ((part.get("type"), *_filled(part)) for part in parts), strict=True)
    return _first_media(name for own, names in named for name in names if name not in own)


def find_media_column(row: Row, known: Collection[str]) -> str | None:
    """The first column of a row that holds images, videos or audio by its name, and is not known."""
    return _first_media(_filled(row, but=known))


def _first_media(names: Iterable[Any]) -> str | None:
    return next((name for name in names if isinstance(name, str) and _MEDIA.fullmatch(name)), None)


def _filled(values: Mapping[str, Any], but: Collection[str] = ()) -> list[str]:
    """The keys that hold something."""
    return [key for key, value in values.items() if value and key not in but]


def _encode(row: int, text: str, name: str, start: list[int]) -> Encoding[list[int]]:
    """The tokens of a text after `start`, of which the text may have a part, and without an end token."""
    try:
        (ids,) = yield [text]
    except TypeError as error:  # half of a pair such as \ud83d\ude00, which JSON can name
        raise ValueError(
            f"{name}: row {row} (counted from 0) is no text that can be tokenized: {brief(repr(text))}"
        ) from error
    except Exception as error:  # tokenizers has no error of its own
        raise ValueError(
            f"{name}: row {row} (counted from 0) cannot be tokenized ({brief(error)}): correct tokenizer.json of the "
            f"model, or leave the row out: {brief(repr(text))}"
        ) from error
    if not ids:
        raise ValueError(
            f"{name}: row {row} (counted from 0) becomes no token, as the model reads it: {brief(repr(text))}"
        )
    return with_start(ids, start)


def name_rows(rows: list[int]) -> str:
    """The numbers of the first rows, and how many more there are."""
    named = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    more = len(rows) - _MAX_NAMED_ROWS
    return f"rows {named}" + (f" and {more} more" if more > 0 else "") + " (counted from 0)"
