"""Tokens of texts: those of many rows are made together, which takes about half the time of one by one.

A row is a generator. It yields texts, is sent the tokens of each, and returns the result for the row.
"""

import gc
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from rlft_fast.errors import without_panics
from rlft_fast.trainer.prompts.chat import Tokenizer

T = TypeVar("T")

Encoding = Generator[list[str], list[list[int]], T]
"""Yields texts, is sent the ids of each, and returns the result. A text without tokens raises an error in there."""

_ROWS = 1024  # that are made together
_CHARACTERS = 1 << 22  # of texts that are tokenized together: tokenizers holds 50 bytes and more for each token


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector does not run inside.

    Rows have no cycles, and the collector would look through all rows again and again: a quarter of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def encode_rows(tokenizer: Tokenizer, rows: Iterable[Encoding[T]]) -> Iterator[T]:
    """The results of rows, in their order.

    Args:
        tokenizer: makes tokens, without special tokens of its own.
        rows: at most 1024 run at once.

    Raises:
        Exception: a row raises it.
    """
    rows = iter(rows)
    while some := [*islice(rows, _ROWS)]:
        yield from _together(tokenizer, some)


def _together(tokenizer: Tokenizer, rows: Sequence[Encoding[T]]) -> list[T]:
    results: dict[int, T] = {}
    asked: dict[int, list[str]] = {}

    def resume(i: int, found: list[list[int] | Exception] | None) -> None:
        failed = next((x for x in found or () if isinstance(x, Exception)), None)
        try:
            if failed is not None:
                asked[i] = rows[i].throw(failed)
            else:
                asked[i] = next(rows[i]) if found is None else rows[i].send([x for x in found if isinstance(x, list)])
        except StopIteration as end:
            results[i] = end.value

    for i in range(len(rows)):
        resume(i, None)
    known: dict[str, list[int] | Exception] = {}
    while asked:
        now, asked = asked, {}
        known |= _encode({text: None for texts in now.values() for text in texts if text not in known}, tokenizer)
        for i, texts in now.items():
            resume(i, [known[text] for text in texts])
    return [results[i] for i in range(len(rows))]


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> dict[str, list[int] | Exception]:
    found: dict[str, list[int] | Exception] = {}
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size > _CHARACTERS:
            found |= zip(some, encode_texts(tokenizer, some), strict=True)
            some, size = [], 0
    return found | dict(zip(some, encode_texts(tokenizer, some), strict=True))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int] | Exception]:
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
    except Exception as error:  # tokenizers has no error of its own
        return error


def start_of_texts(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text, such as BOS."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])
