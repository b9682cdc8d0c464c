"""Attention over packed sequences, and for generation.

functions  the attention functions that models are given
chunks     attention within chunks of a sequence
sinks      attention sinks, around any flash attention
row_cache  keys and values of a rollout, written in place
"""

from rlft_fast.models.attention.chunks import (
    CHUNKED_LAYER,
    Chunks,
    CountedPositions,
    counts_tokens_before,
    needs_more_than_boundaries,
    prepare_chunks,
)
from rlft_fast.models.attention.functions import (
    GROUPED_ATTENTION,
    PACKED_ATTENTION,
    LookAhead,
    all_rows_of_own_heads,
    packed_attention,
    sinks_of_own_heads,
)
from rlft_fast.models.attention.row_cache import RowCache, RowStates, cache_argument, takes_row_cache

__all__ = [
    "CHUNKED_LAYER",
    "GROUPED_ATTENTION",
    "PACKED_ATTENTION",
    "Chunks",
    "CountedPositions",
    "LookAhead",
    "RowCache",
    "RowStates",
    "all_rows_of_own_heads",
    "cache_argument",
    "counts_tokens_before",
    "needs_more_than_boundaries",
    "packed_attention",
    "prepare_chunks",
    "sinks_of_own_heads",
    "takes_row_cache",
]
