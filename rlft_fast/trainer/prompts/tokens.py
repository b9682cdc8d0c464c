"""Tokens of texts: those of many rows are made together, which takes about half the time of one by one.

A row is a generator. It yields texts once, is sent the tokens of each, and returns the result for the row.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from rlft_fast.errors import brief, without_panics
from rlft_fast.trainer.prompts.chat import Tokenizer

T = TypeVar("T")

_Tokens = list[int] | Exception

Encoding = Generator[list[str], Any, T]
"""Yields texts once, is sent the ids of each, and returns the result. A text without tokens raises its error there."""

_ROWS = 1024  # that are made together
_CHARACTERS = 1 << 20  # of texts that are tokenized together: tokenizers holds 50 bytes and more for each token


def encode_rows(tokenizer: Tokenizer, rows: Iterable[Encoding[T]]) -> Iterator[T]:
    """The results of rows, in their order.

    A thread makes the tokens of some rows while the texts of the next rows are made.

    Args:
        tokenizer: makes tokens, without special tokens of its own.
        rows: at most 2048 run at once.

    Raises:
        Exception: a row raises it.
    """
    rows = iter(rows)
    with ThreadPoolExecutor(1) as thread:
        before: _Started[T] | None = None
        while some := [*islice(rows, _ROWS)]:
            started = _Started(some, tokenizer, thread)
            if before is not None:
                yield from before.finish()
            before = started
        if before is not None:
            yield from before.finish()


class _Started(Generic[T]):
    """Rows whose texts a thread makes tokens of."""

    def __init__(self, rows: Sequence[Encoding[T]], tokenizer: Tokenizer, thread: ThreadPoolExecutor) -> None:
        self._rows = rows
        self._results: dict[int, T] = {}
        self._texts: dict[int, list[str]] = {}
        for i, row in enumerate(rows):
            try:
                self._texts[i] = next(row)
            except StopIteration as end:  # it asks for no tokens
                self._results[i] = end.value
        self._tokens = thread.submit(_encode, [*chain.from_iterable(self._texts.values())], tokenizer)

    def finish(self) -> list[T]:
        tokens_of_all = iter(self._tokens.result())
        for i, texts in self._texts.items():
            tokens = [*islice(tokens_of_all, len(texts))]
            failed = [x for x in tokens if isinstance(x, Exception)]
            try:
                self._rows[i].throw(failed[0]) if failed else self._rows[i].send(tokens)
            except StopIteration as end:
                self._results[i] = end.value
        return [self._results[i] for i in range(len(self._rows))]


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[_Tokens]:
    """The tokens of each text. Equal texts share their list."""
    found: dict[str, _Tokens] = {}
    some: list[str] = []
    size = 0
    for text in dict.fromkeys(texts):
        some.append(text)
        size += len(text)
        if size > _CHARACTERS:
            found |= zip(some, encode_texts(tokenizer, some), strict=True)
            some, size = [], 0
    found |= zip(some, encode_texts(tokenizer, some), strict=True)
    return [found[text] for text in texts]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[_Tokens]:
    """The ids of each text as ``tokenizer.encode(text, add_special_tokens=False)`` makes them, or its error."""
    try:
        with without_panics():
            if (found := _by_library(tokenizer, texts)) is not None:
                return [*found]
    except Exception:  # tokenizers has no error of its own, and names no text
        pass
    return [_encode_one(tokenizer, text) for text in texts]


def _by_library(tokenizer: Any, texts: Sequence[str]) -> list[list[int]] | None:
    """Ids that the library tokenizers makes without transformers; None: there is none, or transformers does more."""
    library = getattr(tokenizer, "backend_tokenizer", None)
    if len(texts) < 2 or not hasattr(library, "encode_batch_fast"):
        return None
    first = tokenizer.encode(texts[0], add_special_tokens=False)  # which also sets the library's options
    found = [encoded.ids for encoded in library.encode_batch_fast(texts, add_special_tokens=False)]
    return found if found[0] == first else None


def _encode_one(tokenizer: Tokenizer, text: str) -> list[int] | Exception:
    try:
        with without_panics():
            return tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:  # half of a pair such as \ud83d\ude00, which JSON can name
        failed = TypeError(f"it is no text that can be tokenized: {brief(repr(text))}")
        failed.__cause__ = error
        return failed
    except Exception as error:  # tokenizers has no error of its own
        return error


def start_of_texts(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text, such as BOS."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])


def with_start(ids: list[int], start: list[int]) -> list[int]:
    """The tokens of a text behind what the tokenizer puts before it, of which the text may have a part itself.

    Args:
        ids: of the text.
        start: see `start_of_texts`.
    """
    missing = next(n for n in range(len(start) + 1) if ids[: len(start) - n] == start[n:])
    return [*start[:missing], *ids]
