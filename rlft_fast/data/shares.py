"""`Share`: what one rank needs of a planned batch, where no rank holds the whole."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data.batch import Batch, cumulative, new_rows, put_pieces
from rlft_fast.data.planning import MicroBatchPlan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A rank's part of a batch that was planned elsewhere.

    Args:
        batch: the rank's sequences, in execution order, on the CPU. Training needs ``loss_weight_T`` of the whole.
        offsets: (num_micro_batches + 1,) int64, micro-batch m holds the sequences `[offsets[m], offsets[m + 1])`; it
            may be empty. All ranks have as many micro-batches.
        scale: factor on the weighted sum of a loss, as `rlft_fast.engine.weighted` returns it for the whole batch.
    """

    batch: Batch
    offsets: np.ndarray
    scale: float = 1.0

    def unweighted(self) -> "Share":
        """The share with `Batch.unweighted` of its batch."""
        return dataclasses.replace(self, batch=self.batch.unweighted())

    def micro_batches(self) -> list[Batch]:
        return [self.batch.select(np.arange(begin, end)) for begin, end in pairwise(self.offsets)]


def cut_shares(batch: Batch, plan: MicroBatchPlan, scale: float = 1.0) -> Iterator[Share]:
    """The share of each rank of the plan, one after the other: all of them are as large as the batch.

    Args:
        batch: the whole batch, on the CPU.
        plan: of this batch, see `rlft_fast.data.plan_batch`.
        scale: see `Share`.
    """
    for rank in range(plan.world_size):
        first = rank * plan.num_micro_batches
        offsets = plan.offsets[first : first + plan.num_micro_batches + 1]
        yield Share(batch.select(plan.rank_indices(rank)), offsets - offsets[0], scale)


def join_outputs(parts: Sequence[Tensor], batch: Batch, plan: MicroBatchPlan) -> Tensor:
    """Outputs of all ranks in the order of the batch instead of the plan's.

    Args:
        parts: of each rank of the plan, one value per token, or one per sequence, of the rank's share.
        batch: the whole batch.
        plan: of this batch.
    """
    if sum(map(len, parts)) == batch.num_sequences:
        values = torch.cat(list(parts))
        joined = torch.empty_like(values)
        joined[torch.from_numpy(plan.indices)] = values
        return joined
    first_B, lengths = cumulative(batch.lengths), batch.lengths
    joined = new_rows(batch.num_tokens, parts[0].dtype, *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        own = plan.rank_indices(rank)
        put_pieces(joined, first_B[own], part, cumulative(lengths[own])[:-1], lengths[own])
    return joined
