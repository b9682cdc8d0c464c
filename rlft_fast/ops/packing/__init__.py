"""Padded and packed tensors, sums over the sequences of a packed one, and rows that are taken several times."""

from rlft_fast.ops.packing.pack import (
    MaskedTokens,
    masked_tokens,
    next_token_targets,
    pad,
    position_ids,
    segment_expand,
    segment_mean,
    segment_sum,
    unpad,
)
from rlft_fast.ops.packing.rows import RowIndex, row_index, take_rows

__all__ = [
    "MaskedTokens",
    "RowIndex",
    "masked_tokens",
    "next_token_targets",
    "pad",
    "position_ids",
    "row_index",
    "segment_expand",
    "segment_mean",
    "segment_sum",
    "take_rows",
    "unpad",
]
