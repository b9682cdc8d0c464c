"""Rows as a model sees them: tokens, which of them are taught, lengths, and the rows that are left out."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rlft_fast.config import Config, RunConfig, TaughtConfig
from rlft_fast.garbage import uncollected
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import LeftOut, Overlong, Prompts, load_data, named_sets
from rlft_fast.trainer.supervised import PairRows, RowsData, TaughtRows


class Part(NamedTuple):
    """Tokens that belong together."""

    is_taught: bool
    text: str


class ShownSequence(NamedTuple):
    """A sequence of a row."""

    name: str
    """Such as "chosen"; "" of the only one."""
    token_ids: list[int]
    parts: list[Part]


@dataclass(frozen=True, kw_only=True)
class ShownSet:
    """A set of rows.

    Args:
        name: "data", or "held-out data" with the name of its set.
        lengths: tokens of each sequence, (N,) or of pairs (2N,).
        num_taught: tokens that are learned; None: the model answers the rows.
        overlong: how many rows are left out, and of how many sequences a part is.
        left_out: the rows that are left out.
        sequences: of the first rows.
        columns: of the first rows, that reward functions see.
    """

    name: str
    lengths: np.ndarray
    num_taught: int | None
    overlong: Overlong
    left_out: list[LeftOut]
    sequences: list[list[ShownSequence]]
    columns: list[dict[str, Any]]


@uncollected()
def show_data(config: RunConfig, count: int) -> list[ShownSet]:
    """The sets of a run. No weights are read.

    Args:
        config: rows that it refuses because they have too many tokens are told as left out.
        count: rows of each set to show.

    Raises:
        ValueError: the data cannot be used.
    """
    streams = isinstance(config, Config) and config.data.streaming
    if config.data.overlong == "refuse" and not streams:
        config = config.model_copy(update={"data": config.data.model_copy(update={"overlong": "filter"})})
    tokenizer = load_tokenizer(config.model)
    if isinstance(config, TaughtConfig):
        data = RowsData.load(config, tokenizer)
        return [_shown_rows(name, rows, tokenizer, count) for name, rows in data.named.items()]
    assert isinstance(config, Config)
    prompts, held_out = load_data(config, tokenizer)
    return [_shown_prompts(name, found, count) for name, found in named_sets(prompts, held_out).items()]


def _shown_prompts(name: str, prompts: Prompts, count: int) -> ShownSet:
    first = prompts.select(range(min(count, len(prompts))))
    pairs = zip(first.token_ids, first.texts, strict=True)
    shown = range(len(first))
    return ShownSet(
        name=name, lengths=np.array([*map(len, prompts.token_ids)]), num_taught=None, overlong=prompts.overlong,
        left_out=prompts.left_out,
        sequences=[[ShownSequence("", token_ids, [Part(False, text)])] for token_ids, text in pairs],
        columns=[{key: values[i] for key, values in first.columns.items() if values[i] is not None} for i in shown],
    )  # fmt: skip


def _shown_rows(name: str, rows: TaughtRows | PairRows, tokenizer: Any, count: int) -> ShownSet:
    sequences, names = (rows.sequences, ("chosen", "rejected")) if isinstance(rows, PairRows) else (rows, ("",))

    def shown(row: int) -> list[ShownSequence]:
        numbers = range(row * len(names), (row + 1) * len(names))
        return [
            _sequence(own, sequences.token_ids[i], sequences.is_taught[i], tokenizer)
            for own, i in zip(names, numbers, strict=True)
        ]

    return ShownSet(
        name=name, lengths=np.array([*map(len, sequences.token_ids)]), num_taught=sequences.num_taught,
        overlong=rows.overlong, left_out=rows.left_out, sequences=[shown(i) for i in range(min(count, len(rows)))],
        columns=[{} for _ in range(min(count, len(rows)))],
    )  # fmt: skip


def _sequence(name: str, token_ids: np.ndarray, is_taught: np.ndarray, tokenizer: Any) -> ShownSequence:
    """The tokens in runs of equal `is_taught`."""
    edges = [0, *(np.flatnonzero(np.diff(is_taught)) + 1).tolist(), len(token_ids)]
    parts = [
        Part(bool(is_taught[start]), tokenizer.decode(token_ids[start:end], clean_up_tokenization_spaces=False))
        for start, end in pairwise(edges)
    ]
    return ShownSequence(name, token_ids.tolist(), parts)
