"""Padded and packed tensors, and sums over the sequences of a packed one."""

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

__all__ = [
    "MaskedTokens",
    "masked_tokens",
    "next_token_targets",
    "pad",
    "position_ids",
    "segment_expand",
    "segment_mean",
    "segment_sum",
    "unpad",
]
