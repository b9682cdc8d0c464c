"""Cuts a batch into micro-batches: under a hard token cap, balanced across ranks, planned on the CPU in C++."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from rlft_fast import _planner
from rlft_fast.data.batch import integer_array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MicroBatchPlan:
    """Which sequences each rank computes at each step.

    Args:
        indices: (B,) int64, sequences in execution order: rank after rank, micro-batch after micro-batch.
        offsets: (world_size * num_micro_batches + 1,) int64, micro-batch m of rank r holds
            `indices[offsets[k] : offsets[k + 1]]` with `k = r * num_micro_batches + m`; it may be empty.
        world_size: number of ranks.
        num_micro_batches: micro-batches per rank, the same on each.
    """

    indices: np.ndarray
    offsets: np.ndarray
    world_size: int
    num_micro_batches: int

    def micro_batches(self, rank: int) -> list[np.ndarray]:
        """Sequence indices of each of the rank's micro-batches, costliest first, so that memory peaks at once."""
        first = self._first_micro_batch(rank)
        bounds = self.offsets[first : first + self.num_micro_batches + 1]
        return [self.indices[begin:end] for begin, end in pairwise(bounds)]

    def rank_indices(self, rank: int) -> np.ndarray:
        """Sequence indices of the rank, in execution order."""
        first = self._first_micro_batch(rank)
        return self.indices[self.offsets[first] : self.offsets[first + self.num_micro_batches]]

    def _first_micro_batch(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in this plan for {self.world_size} ranks: plan with your world size")
        return rank * self.num_micro_batches


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray | Tensor,
    max_tokens: int,
    *,
    world_size: int = 1,
    cost: tuple[float, float] = (1.0, 0.0),
) -> MicroBatchPlan:
    """Packs sequences into micro-batches of at most `max_tokens` tokens and deals these to the ranks.

    Ranks meet at every micro-batch, so a step takes the sum over steps of the maximum over ranks of
    `sum(a * L + b * L**2)`. The plan keeps this small: micro-batches of the same step cost nearly the same, and so do
    the ranks in total. The number of micro-batches is that of best-fit decreasing, rounded up to full steps. Sequences
    are dealt longest first, exchanged within a step, and steps are merged by balanced largest differencing
    (Karmarkar & Karp 1982; Michiels et al. 2003).

    The plan is a pure function of its arguments: every rank computes it alone and all get the same.

    Args:
        lengths: (B,) integers >= 1, tokens of each sequence; B may be 0.
        max_tokens: cap on the tokens of a micro-batch, never exceeded.
        world_size: number of ranks that share the sequences.
        cost: (a, b), the cost of a token and of a pair of tokens; (1, 0) balances tokens.

    Returns:
        A plan in which every rank has equally many micro-batches, at least one.

    Raises:
        TypeError: `lengths`, `max_tokens` or `world_size` are not integers.
        ValueError: a length below 1 or above `max_tokens`, or another argument out of range.
    """
    length_B = integer_array("lengths", lengths)
    max_tokens, world_size = _integer("max_tokens", max_tokens), _integer("world_size", world_size)
    linear, quadratic = cost
    if max_tokens < 1 or world_size < 1:
        raise ValueError(f"max_tokens and world_size must be at least 1, got {max_tokens} and {world_size}")
    if not (math.isfinite(linear + quadratic) and min(cost) >= 0 and max(cost) > 0):
        raise ValueError(f"cost must be two numbers >= 0, not both 0, got {cost}: (1, 0) balances tokens")
    if length_B.size and length_B.min() < 1:
        raise ValueError(f"sequence {length_B.argmin()} has length {length_B.min()}: drop sequences without tokens")
    check_lengths(length_B, max_tokens)
    indices, offsets = _planner.plan(length_B, max_tokens, world_size, linear, quadratic)
    return MicroBatchPlan(indices, offsets, world_size, (len(offsets) - 1) // world_size)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {value!r}: convert it with int()") from error


def check_lengths(length_B: np.ndarray, max_tokens: int) -> None:
    """Raises ValueError naming the longest sequence if it exceeds the cap."""
    if length_B.size and length_B.max() > max_tokens:
        raise ValueError(
            f"sequence {length_B.argmax()} has {length_B.max()} tokens, more than max_tokens={max_tokens}: raise "
            "max_tokens to at least this length, or limit the lengths of prompts and completions"
        )
