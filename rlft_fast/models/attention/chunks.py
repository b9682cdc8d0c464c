"""Chunked attention (Llama 4): a token sees its own and the earlier tokens of its chunk alone.

Positions c C to (c + 1) C - 1 of a sequence are its chunk c. Packed segments are cut where a chunk begins, so that each
piece attends to keys of one chunk, and the attention of segments stays as it is.

A layer of another kind scales its queries by their positions (arXiv:2501.19399). transformers counts these positions
from the number of tokens in the cache, so `CountedPositions` stands for a cache.

Shapes: T packed rows, M keys.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlft_fast.ops.packing import RowIndex, row_index

CHUNKED_LAYER = "chunked_attention"


class Chunks(NamedTuple):
    """The segments of chunked layers."""

    key_index: RowIndex | None
    """The row of each of the M keys; None: the keys are the rows in order."""
    cu_seqlens_q: Tensor
    """(segments + 1,) int32 boundaries among the T rows."""
    cu_seqlens_k: Tensor
    """(segments + 1,) int32 boundaries of the segments' keys."""
    max_seqlen_q: int
    """Length of the longest segment."""
    max_seqlen_k: int
    """Most keys of a segment, at most the size of a chunk."""


def prepare_chunks(
    backbone: nn.Module, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, key_index: RowIndex | None
) -> Chunks | None:
    """The segments of a micro-batch, cut into chunks; None: no layer is chunked, or no segment is longer than a chunk.

    Args:
        backbone: the model's backbone.
        cu_seqlens_q: (segments + 1,) int32 on the CPU.
        cu_seqlens_k: (segments + 1,) int32 on the CPU. A segment's queries are the last of its keys.
        key_index: of the keys, on the CPU; None: they are the rows in order.
    """
    if (size := _chunk_size(backbone)) is None:
        return None
    begin_k, end_k = cu_seqlens_k.numpy()[:-1].astype(np.int64), cu_seqlens_k.numpy()[1:].astype(np.int64)
    num_keys = end_k - begin_k
    if num_keys.max(initial=0) <= size:
        return None
    first_query = num_keys - cu_seqlens_q.diff().numpy()
    first_chunk = first_query // size
    num_chunks = -(-num_keys // size) - first_chunk
    # Of each piece: its segment, its chunk, and positions in its sequence.
    segment = np.arange(len(num_keys)).repeat(num_chunks)
    chunk = np.arange(len(segment)) - (num_chunks.cumsum() - num_chunks - first_chunk)[segment]
    end = np.minimum((chunk + 1) * size, num_keys[segment])
    num_queries, num_keys = end - np.maximum(chunk * size, first_query[segment]), end - chunk * size
    if key_index is not None:
        places = np.arange(num_keys.sum()) - (num_keys.cumsum() - num_keys).repeat(num_keys)
        places += (begin_k[segment] + chunk * size).repeat(num_keys)
        key_index = row_index(key_index.index_M[torch.from_numpy(places)], len(key_index.cu_uses) - 1)
    return Chunks(
        key_index, _boundaries(num_queries), _boundaries(num_keys), int(num_queries.max()), int(num_keys.max())
    )


def is_chunked(module: nn.Module) -> bool:
    """Whether an attention layer attends within chunks."""
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return CHUNKED_LAYER in types and types[module.layer_idx] == CHUNKED_LAYER  # pyrefly: ignore[bad-index]


def counts_tokens_before(config: PreTrainedConfig) -> bool:
    """Whether layers take the position of a token for its place in the row plus the number of tokens in the cache."""
    return bool(getattr(config.get_text_config(), "attn_temperature_tuning", False))


def needs_more_than_boundaries(config: PreTrainedConfig) -> bool:
    """Whether a packed forward needs `Chunks` or `CountedPositions`, too."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return CHUNKED_LAYER in types or counts_tokens_before(config)


class CountedPositions:
    """Stands for a cache without tokens, from whose length a layer counts the positions of packed rows.

    Args:
        position_ids_T: (T,) int64 position of each row.
    """

    def __init__(self, position_ids_T: Tensor) -> None:
        self._length_T = position_ids_T - torch.arange(len(position_ids_T), device=position_ids_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """(T,) int64, to which a layer adds the place of each row."""
        return self._length_T

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keeps nothing."""
        return key_states, value_states


def _chunk_size(backbone: nn.Module) -> int | None:
    config = getattr(backbone, "config", None)
    text: Any = None if config is None else config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    return text.attention_chunk_size if CHUNKED_LAYER in types else None


def _boundaries(sizes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], sizes.cumsum()]).astype(np.int32))
