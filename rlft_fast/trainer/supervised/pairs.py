"""Pairs of sequences as tokens: of each the better one, and the worse one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import PairDataConfig, RewardDataConfig
from rlft_fast.data import Batch
from rlft_fast.errors import brief
from rlft_fast.models import padding_id
from rlft_fast.trainer.prompts import LeftOut, Overlong, Row, RowSet, without_nulls
from rlft_fast.trainer.supervised.reference import Reference
from rlft_fast.trainer.supervised.rows import OverlongError, Reader, TaughtRows, Tokens, num_asked, taught_rows
from rlft_fast.trainer.supervised.spans import Written, alternating


@dataclass(frozen=True, slots=True)
class PairRows:
    """Tokenized pairs.

    Args:
        sequences: 2N; 2i is the chosen and 2i + 1 the rejected one of pair i.
        margin: (N,) float32.
        reference: log-probabilities of the tokens under the reference; None: there is none.
    """

    sequences: TaughtRows
    margin: np.ndarray
    reference: Reference | None = None

    def __len__(self) -> int:
        return len(self.margin)

    def __str__(self) -> str:
        return f"{len(self)} pairs; {self.sequences}"

    @property
    def description(self) -> dict[str, Any]:
        return self.sequences.description | {"margin": float(np.abs(self.margin).sum())}

    @property
    def sizes(self) -> dict[str, int]:
        return self.sequences.sizes

    @property
    def left_out(self) -> list[LeftOut]:
        return self.sequences.left_out

    @property
    def overlong(self) -> Overlong:
        return self.sequences.overlong

    @property
    def longest(self) -> int:
        return self.sequences.longest

    @property
    def highest_token(self) -> int:
        return self.sequences.highest_token

    def batch(self, rows: Sequence[int]) -> Batch:
        """The named pairs, packed: the chosen sequence of each before the rejected one."""
        both = [j for i in rows for j in (2 * i, 2 * i + 1)]
        margin = torch.zeros(len(rows), 2)
        margin[:, 0] = torch.from_numpy(self.margin[list(rows)])
        batch = self.sequences.batch(both).replace(
            unit_B=torch.arange(len(rows)).repeat_interleave(2), reward_B=margin.flatten()
        )
        return batch if self.reference is None else batch.replace(ref_logprob_T=self.reference.of(both))

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each pair."""
        lengths = self.sequences.num_tokens
        return [chosen + rejected for chosen, rejected in zip(lengths[::2], lengths[1::2], strict=True)]


class _Pair(NamedTuple):
    chosen: Tokens
    rejected: Tokens
    margin: float = 0.0


def load_pairs(
    config: PairDataConfig, tokenizer: PreTrainedTokenizerBase, path: str, sets: Sequence[RowSet], *, scored: bool
) -> PairRows:
    """Checks and tokenizes all pairs.

    Args:
        config: names the columns, and says how texts become tokens.
        tokenizer: of the model.
        path: folder of the model and its tokenizer.
        sets: the rows.
        scored: a reward model scores each sequence at its last token that is no padding. Otherwise all taught tokens
            are asked of.

    Raises:
        ValueError: see `load_rows`; or the two of a pair are equal.
    """
    reader = Reader(config, tokenizer, path)
    found = reader.each(sets, lambda row: _read(reader, config, row))
    sequences = [tokens for pair in found for tokens in (pair.chosen, pair.rejected)]
    if scored:
        padding = padding_id(path)
        sequences = [_scored_at_the_end(tokens, padding) for tokens in sequences]
    return PairRows(taught_rows(sequences, reader), np.array([pair.margin for pair in found], np.float32))


def _scored_at_the_end(tokens: Tokens, padding: int | None) -> Tokens:
    """A sequence with a token behind it, which is asked of and never runs.

    Its last token may be a line break that the chat template has behind the end token: classifiers of transformers
    score it there. Tokens of padding are left out at the end: where the token that ends texts is padding, too, they
    score the token before it. Of a sequence that was cut, what follows its last taught token is left out.
    """
    end = tokens.taught.rindex(1) + 1 if tokens.is_cut else len(tokens.ids)
    while end > 1 and tokens.ids[end - 1] == padding:
        end -= 1
    return tokens._replace(ids=[*tokens.ids[:end], tokens.ids[end - 1]], taught=alternating([end, 1]))


def _read(reader: Reader, config: PairDataConfig, row: Row) -> Written[_Pair]:
    columns = (config.prompt_column, config.chosen_column, config.rejected_column)
    prompt, chosen, rejected = (without_nulls(row.get(name)) for name in columns)
    if chosen is None or rejected is None:
        raise ValueError(f"it has no {columns[1]!r} or no {columns[2]!r}; its columns are {sorted(row)}")
    if prompt is None or (num_asked(prompt, chosen) and num_asked(prompt, rejected)):
        prompt, chosen, rejected = _without_beginning(chosen, rejected, columns[0])
    better, worse = (reader.answered(row, prompt, answer) for answer in (chosen, rejected))

    def make(found: Sequence[list[int]]) -> _Pair:
        size = len(better.texts)
        return _pair(config, row, better.make(found[:size]), worse.make(found[size:]))

    return Written([*better.texts, *worse.texts], make)


def _pair(config: PairDataConfig, row: Row, chosen: Tokens, rejected: Tokens) -> _Pair:
    if (chosen.ids, chosen.taught) == (rejected.ids, rejected.taught):
        if len(chosen.ids) == config.max_sequence_tokens and config.overlong == "truncate":
            raise OverlongError("its two answers begin alike")
        raise ValueError("its two answers are equal: there is nothing to prefer")
    margin = _margin(row.get(config.margin_column)) if isinstance(config, RewardDataConfig) else 0.0
    return _Pair(chosen, rejected, margin)


def _margin(value: Any) -> float:
    """A margin, which CSV has as a text; 0 where it is missing."""
    if value is None or value == "":
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"its margin must be a number, got {brief(repr(value))}")
    return margin


def _without_beginning(chosen: Any, rejected: Any, column: str) -> tuple[Any, Any, Any]:
    """The messages that two conversations begin with, and the rest of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise ValueError(f"it has no {column!r}, which texts need: only conversations show where answers begin")
    most = min(len(chosen), len(rejected)) - 1  # an answer has one message at least
    size = next((i for i in range(max(most, 0)) if chosen[i] != rejected[i]), max(most, 0))
    return chosen[:size], chosen[size:], rejected[size:]
