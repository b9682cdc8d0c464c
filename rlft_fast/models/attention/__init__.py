"""Attention over packed sequences, and for generation.

functions  the attention functions that models are given
sinks      attention sinks, around any flash attention
row_cache  keys and values of a rollout, written in place
"""

from rlft_fast.models.attention.functions import (
    GROUPED_ATTENTION,
    PACKED_ATTENTION,
    LookAhead,
    all_rows_of_own_heads,
    packed_attention,
    sinks_of_own_heads,
)
from rlft_fast.models.attention.row_cache import RowCache, RowStates, takes_row_cache

__all__ = [
    "GROUPED_ATTENTION",
    "PACKED_ATTENTION",
    "LookAhead",
    "RowCache",
    "RowStates",
    "all_rows_of_own_heads",
    "packed_attention",
    "sinks_of_own_heads",
    "takes_row_cache",
]
