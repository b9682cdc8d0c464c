"""Attention over packed sequences, registered with transformers under the name ``rlft_packed``.

transformers passes ``cu_seq_lens_q`` and ``max_length_q`` through to the attention function and builds no mask for
implementations that register none, so packed sequences cost no (T, T) mask. On CUDA one variable-length kernel
(``torch.nn.attention.varlen``), on the CPU one causal SDPA call per segment.

A segment is a sequence, or a completion whose prompt is a segment of its own that several completions attend to.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "rlft_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of each packed segment to its keys: query i of m sees the first n - m + i + 1 of n keys.

    Args:
        module: the attention layer, unused.
        query: (1, heads, T, head_dim).
        key: (1, kv_heads, T, head_dim); heads is a multiple of kv_heads.
        value: (1, kv_heads, T, head_dim).
        attention_mask: must be None: packing needs no mask.
        cu_seq_lens_q: (S + 1,) int32 segment boundaries.
        cu_seq_lens_k: (S + 1,) int32 boundaries of their keys; None: a segment attends to itself.
        max_length_q: length of the longest segment.
        max_length_k: most keys of a segment.
        key_index: (K,) int64 token of each key; None: the tokens in order.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        dropout: attention dropout probability.
        sliding_window: positions that a token sees, itself included; None: all before it.
        softcap: score soft-capping, which these kernels do not have.

    Returns:
        (1, T, heads, head_dim) and None (no attention weights).

    Raises:
        ValueError: called without boundaries, or with a score soft-cap.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"the {PACKED_ATTENTION} attention needs cu_seq_lens_q and max_length_q; "
            "use model.set_attn_implementation('sdpa') for padded batches and generation"
        )
    if softcap is not None:
        raise ValueError("models that soft-cap attention scores (Gemma 2) are not supported by packed attention")
    if key_index is not None:
        key, value = key.index_select(2, key_index), value.index_select(2, key_index)
    if cu_seq_lens_k is None or max_length_k is None:
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    if query.is_cuda:
        boundaries = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _varlen(query, key, value, boundaries, scaling, sliding_window), None
    queries = query.split(cu_seq_lens_q.diff().tolist(), dim=2)  # split's backward is one cat
    keys, values = (x.split(cu_seq_lens_k.diff().tolist(), dim=2) for x in (key, value))
    segments = zip(queries, keys, values, strict=True)
    outputs = [_causal(q, k, v, scaling, dropout, sliding_window) for q, k, v in segments]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, window: int | None) -> Tensor:
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask = None
    if num_queries != num_keys or (window is not None and num_keys > window):
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout, enable_gqa=True
    )


def _varlen(q, k, v, boundaries: tuple, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    packed_q, packed_k, packed_v = (x[0].transpose(0, 1) for x in (q, k, v))  # (T, heads, head_dim)
    out = varlen_attn(
        packed_q, packed_k, packed_v, *boundaries,
        scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
