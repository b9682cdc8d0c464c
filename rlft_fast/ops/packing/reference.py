"""Plain PyTorch definitions of every packing op, which its tests compare with. They loop over sequences on the host.

Packed tensors and cu_seqlens are those of `rlft_fast.ops.packing.pack`: sequence b has tokens
[cu_seqlens[b], cu_seqlens[b + 1]). The layout is that of variable-length FlashAttention (Dao 2023, arXiv:2307.08691).
"""

from itertools import pairwise

import torch
from torch import Tensor


def masked_tokens(mask_BL: Tensor, max_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """cu_seqlens[b] = number of tokens in rows before b; column_T = l of every (b, l) with a token, row by row.

    column_T has max_tokens entries, -1 behind the last token. None: as many entries as tokens.
    """
    row_T, column_T = mask_BL.nonzero(as_tuple=True)
    counts = [int((row_T == b).sum()) for b in range(mask_BL.shape[0])]
    cu_seqlens = torch.tensor([sum(counts[:b]) for b in range(len(counts) + 1)], dtype=torch.int32)
    num_tokens = len(column_T) if max_tokens is None else max_tokens
    bounded_T = column_T.new_full((num_tokens,), -1)
    bounded_T[: len(column_T)] = column_T[:num_tokens]
    return cu_seqlens.to(mask_BL.device), bounded_T.int()


def unpad(
    padded: Tensor,
    cu_seqlens: Tensor,
    column_T: Tensor | None = None,
    *,
    num_tokens: int | None = None,
    padding_side: str = "right",
) -> Tensor:
    """packed[cu_seqlens[b] + i] = padded[b, column(b, i)], and 0 behind cu_seqlens[B]; column as in `_columns`."""
    bounds = _bounds(cu_seqlens)
    num_tokens = _num_tokens(cu_seqlens, column_T, num_tokens)
    packed = padded.new_zeros((num_tokens, *padded.shape[2:]))
    for b, (start, end) in enumerate(bounds):
        packed[start:end] = padded[b, _columns(start, end, column_T, padded.shape[1], padding_side)]
    return packed


def pad(
    packed: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    column_T: Tensor | None = None,
    *,
    padding_side: str = "right",
    value: float = 0.0,
) -> Tensor:
    """padded[b, column(b, i)] = packed[cu_seqlens[b] + i], and `value` everywhere else; column as in `_columns`."""
    bounds = _bounds(cu_seqlens)
    padded = packed.new_full((len(bounds), max_seqlen, *packed.shape[1:]), value)
    for b, (start, end) in enumerate(bounds):
        padded[b, _columns(start, end, column_T, max_seqlen, padding_side)] = packed[start:end]
    return padded


def position_ids(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """out[cu_seqlens[b] + l] = l, and 0 behind cu_seqlens[B]."""
    out = torch.zeros(_num_tokens(cu_seqlens, None, num_tokens), dtype=torch.int64, device=cu_seqlens.device)
    for start, end in _bounds(cu_seqlens):
        out[start:end] = torch.arange(end - start)
    return out


def next_token_targets(input_ids_T: Tensor, cu_seqlens: Tensor, ignore_index: int = -100) -> Tensor:
    """out[t] = input_ids[t + 1] inside a sequence; `ignore_index` at its last token and behind cu_seqlens[B]."""
    out = torch.full_like(input_ids_T, ignore_index, memory_format=torch.contiguous_format)
    for start, end in _bounds(cu_seqlens):
        out[start : max(start, end - 1)] = input_ids_T[start + 1 : end]
    return out


def segment_sum(values_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """out[b] = sum_l values[cu_seqlens[b] + l], added and returned in float64."""
    sums = [values_T[start:end].double().sum(0) for start, end in _bounds(cu_seqlens)]
    return torch.stack(sums) if sums else values_T.new_zeros((0, *values_T.shape[1:]), dtype=torch.float64)


def segment_expand(values_B: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """out[cu_seqlens[b] + l] = values[b], and 0 behind cu_seqlens[B]."""
    out = values_B.new_zeros((_num_tokens(cu_seqlens, None, num_tokens), *values_B.shape[1:]))
    for b, (start, end) in enumerate(_bounds(cu_seqlens)):
        out[start:end] = values_B[b]
    return out


def segment_mean(values_T: Tensor, cu_seqlens: Tensor, weight_T: Tensor | None = None) -> Tensor:
    """out[b] = sum_l w_l v_l / sum_l w_l over the l with w_l != 0, and 0 where the weights sum to 0, in float64."""
    weight_T = torch.ones_like(values_T) if weight_T is None else weight_T
    means = []
    for start, end in _bounds(cu_seqlens):
        kept = weight_T[start:end] != 0
        value, weight = values_T[start:end][kept].double(), weight_T[start:end][kept].double()
        means.append((weight * value).sum() / weight.sum() if weight.sum() != 0 else (0 * value).sum())
    return torch.stack(means) if means else values_T.new_zeros(0, dtype=torch.float64)


def take_rows(values_T: Tensor, index_M: Tensor) -> Tensor:
    """out[m] = values[index[m]]."""
    return torch.stack([values_T[t] for t in index_M.tolist()]) if len(index_M) else values_T[:0]


def sum_rows(values_M: Tensor, index_M: Tensor, num_rows: int) -> Tensor:
    """out[t] = the sum of values[m] over the m with index[m] = t, added in float64 and rounded once."""
    sums = [values_M[index_M == t].double().sum(0) for t in range(num_rows)]
    return torch.stack(sums).to(values_M.dtype) if sums else values_M[:0]


def _bounds(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Start and end of every sequence."""
    ends = cu_seqlens.tolist()
    return list(pairwise(ends))


def _num_tokens(cu_seqlens: Tensor, column_T: Tensor | None, num_tokens: int | None) -> int:
    if num_tokens is not None:
        return num_tokens
    return int(cu_seqlens[-1]) if column_T is None else len(column_T)


def _columns(start: int, end: int, column_T: Tensor | None, max_seqlen: int, padding_side: str) -> slice | Tensor:
    """The columns of a sequence's tokens: column_T's, else the first ones (right padding) or the last ones (left)."""
    if column_T is not None:
        return column_T[start:end].long()
    first = max_seqlen - (end - start) if padding_side == "left" else 0
    return slice(first, first + end - start)
