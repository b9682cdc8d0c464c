"""Packing: padded (B, L, *) <-> packed (T, *), and per-sequence arithmetic on packed tensors.

Packed tensors hold B sequences one behind the other; `cu_seqlens` (B + 1,) int32 says where: sequence b is
[cu_seqlens[b], cu_seqlens[b + 1]), cu_seqlens[0] is 0 and cu_seqlens[B] at most T. Empty sequences are allowed. Rows
behind cu_seqlens[B] belong to no sequence, so T may be an upper bound that is known without asking the device.

On the CPU the contents of cu_seqlens are checked. On CUDA they are not, because a check would stall the stream. Wrong
contents are safe there: no memory outside the tensors is touched, sequences are cut off at T, and places that no
sequence covers get zeros (`ignore_index`, `value`).
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from rlft_fast.ops.library import check_dense, check_device
from rlft_fast.ops.packing import autograd as autograd  # registers fakes and backward passes
from rlft_fast.ops.packing.checks import (
    PaddingSide,
    as_given,
    by_name,
    check_columns,
    check_count,
    check_cu_seqlens,
    check_packed,
    check_padded,
    fill_values,
    pads_left,
    token_count,
)

Data = TypeVar("Data", Tensor, dict[str, Tensor])


class MaskedTokens(NamedTuple):
    """Where the tokens of a padded tensor stand, see `masked_tokens`."""

    cu_seqlens: Tensor
    """(B + 1,) int32, see the module."""
    column_T: Tensor
    """(T,) int32, the column of each token in its row; -1 behind cu_seqlens[B]."""


def masked_tokens(mask_BL: Tensor, max_tokens: int | None = None) -> MaskedTokens:
    """The tokens that an attention mask names: padding may stand on the left, on the right, and in between.

    `unpad(data, *masked_tokens(mask_BL))` keeps what `data[mask_BL]` keeps, in the same order, without an index tensor
    wider than T and, given max_tokens, without waiting for the device. L is an upper bound of the longest sequence, and
    attention kernels take such a bound; `position_ids` counts the tokens of each row.

    Args:
        mask_BL: (B, L) bool or integer, nonzero at tokens.
        max_tokens: T, at least the number of tokens. The real number is cu_seqlens[B], on the device. On CUDA, tokens
            beyond T are cut off. None reads the number from the device, which waits for it.

    Returns:
        `MaskedTokens`.

    Raises:
        ValueError: the mask is not (B, L) or too large for int32, max_tokens is negative or, on the CPU, too small.
        TypeError: the mask is floating point.
    """
    check_dense({"mask_BL": mask_BL})
    check_device(mask_BL.device)
    if mask_BL.dtype.is_floating_point or mask_BL.dtype.is_complex:
        raise TypeError(f"mask_BL is {mask_BL.dtype}, expected bool or an integer: pass mask_BL > 0.")
    if mask_BL.dim() != 2 or mask_BL.numel() > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"mask_BL has shape {tuple(mask_BL.shape)}, expected (B, L) with at most 2^31 - 1 entries: "
            "pass the tokenizer's attention mask, in smaller batches if need be."
        )
    mask_BL = mask_BL.bool()
    cu_seqlens = functional.pad(mask_BL.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    num_tokens = token_count(cu_seqlens, max_tokens)
    return MaskedTokens(cu_seqlens, torch.ops.rlft_fast.mask_columns(mask_BL, cu_seqlens, num_tokens))


def unpad(
    padded: Data,
    cu_seqlens: Tensor,
    column_T: Tensor | None = None,
    *,
    num_tokens: int | None = None,
    padding_side: PaddingSide = "right",
) -> Data:
    """Removes the padding: packed[cu_seqlens[b] + i] = padded[b, column(b, i)].

    column(b, i) is column_T[cu_seqlens[b] + i] where that is given. Else it is i for right padding, and
    L - length_b + i for left padding, where every sequence ends at column L. All tensors of a dict move in one kernel.
    Differentiable in floating tensors; the backward is `pad` with zeros.

    Args:
        padded: (B, L, *), or a dict of such tensors that share B, L and the device. Any dtypes, any trailing shapes.
        cu_seqlens: (B + 1,) int32, see the module.
        column_T: (T,) int32, ascending within each sequence, from `masked_tokens`. None: sequences are contiguous.
        num_tokens: T, at least cu_seqlens[B]. None is column_T's or, without one, reads it from cu_seqlens, which on
            CUDA waits for the device.
        padding_side: "right" or "left", without column_T.

    Returns:
        (T, *), dtype and device of `padded`, or a dict of them. Rows behind cu_seqlens[B] are zero.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens or column_T is not int32, or an entry is not a tensor.
    """
    tensors = by_name(padded, "padded")
    check_cu_seqlens(cu_seqlens, tensors)
    check_padded(tensors, cu_seqlens.shape[0] - 1)
    left = pads_left(padding_side)
    if column_T is not None:
        check_columns(column_T, cu_seqlens, left)
        num_tokens = column_T.shape[0] if num_tokens is None else num_tokens
        if num_tokens != column_T.shape[0]:
            raise ValueError(f"num_tokens is {num_tokens}, but column_T has {column_T.shape[0]} entries: leave it out.")
    num_tokens = token_count(cu_seqlens, num_tokens)
    packed = torch.ops.rlft_fast.unpad(list(tensors.values()), cu_seqlens, column_T, num_tokens, left)
    return as_given(padded, packed)


def pad(
    packed: Data,
    cu_seqlens: Tensor,
    max_seqlen: int,
    column_T: Tensor | None = None,
    *,
    padding_side: PaddingSide = "right",
    value: float | dict[str, float] = 0.0,
) -> Data:
    """Adds padding: padded[b, column(b, i)] = packed[cu_seqlens[b] + i], and `value` everywhere else.

    The inverse of `unpad`, which is its backward and defines column(b, i). All tensors of a dict move in one kernel.

    Args:
        packed: (T, *), or a dict of such tensors that share T and the device. Any float, integer or bool dtypes.
        cu_seqlens: (B + 1,) int32, see the module.
        max_seqlen: L, at least the longest sequence.
        column_T: (T,) int32, as in `unpad`, below max_seqlen.
        padding_side: "right" or "left", without column_T.
        value: what the padding holds; for a dict of tensors one number for all, or a dict, in which 0 may be left out.
            An integer tensor takes whole numbers of its range, as far as a double holds them.

    Returns:
        (B, max_seqlen, *), dtype and device of `packed`, or a dict of them.

    Raises:
        ValueError: shapes, devices, names or contents do not fit together, or value does not fit a dtype.
        TypeError: cu_seqlens or column_T is not int32, an entry is not a tensor, or has another dtype than those.
    """
    tensors = by_name(packed, "packed")
    check_cu_seqlens(cu_seqlens, tensors)
    check_packed(tensors)
    check_count("max_seqlen", max_seqlen)
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen is {max_seqlen}, expected the padded length: pass at least the longest sequence.")
    left = pads_left(padding_side)
    if column_T is not None:
        check_columns(column_T, cu_seqlens, left)
        check_packed(tensors | {"column_T": column_T})
    values = fill_values(value, tensors)
    padded = torch.ops.rlft_fast.pad(list(tensors.values()), cu_seqlens, column_T, max_seqlen, left, values)
    return as_given(packed, padded)


def position_ids(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Positions within each sequence: out[cu_seqlens[b] + l] = l.

    Args:
        cu_seqlens: (B + 1,) int32, see the module.
        num_tokens: T, at least cu_seqlens[B]. None reads it from cu_seqlens, which on CUDA waits for the device.

    Returns:
        (T,) int64; 0 behind cu_seqlens[B].

    Raises:
        ValueError: contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    check_cu_seqlens(cu_seqlens, {})
    return torch.ops.rlft_fast.position_ids(cu_seqlens, token_count(cu_seqlens, num_tokens))


def next_token_targets(input_ids_T: Tensor, cu_seqlens: Tensor, ignore_index: int = -100) -> Tensor:
    """The token that follows each position in the same sequence; `ignore_index` at each sequence's last position.

    Behind cu_seqlens[B] it is `ignore_index`, too.

    Args:
        input_ids_T: (T,) int64.
        cu_seqlens: (B + 1,) int32, see the module.
        ignore_index: target of a position that nothing follows.

    Returns:
        (T,) int64.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: wrong dtypes.
    """
    check_cu_seqlens(cu_seqlens, {"input_ids_T": input_ids_T})
    if input_ids_T.dtype != torch.int64:
        raise TypeError(f"input_ids_T is {input_ids_T.dtype}, expected torch.int64: convert with .long().")
    if input_ids_T.dim() != 1:
        raise ValueError(f"input_ids_T has shape {tuple(input_ids_T.shape)}, expected (T,): unpad it first.")
    return torch.ops.rlft_fast.next_token_targets(input_ids_T, cu_seqlens, ignore_index)


def segment_sum(values_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence: out[b] = sum_l values[cu_seqlens[b] + l]. An empty sequence sums to 0.

    Same inputs, same bits: the order of the additions is fixed. Differentiable; the backward is `segment_expand`.

    Args:
        values_T: (T, *). Integers and bools are summed as float32.
        cu_seqlens: (B + 1,) int32, see the module.

    Returns:
        (B, *) float32, or float64 where the values are float64.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    check_cu_seqlens(cu_seqlens, {"values_T": values_T})
    if values_T.is_complex():
        raise TypeError(
            f"values_T is {values_T.dtype}, expected float, integer or bool: pass torch.view_as_real of it."
        )
    if not values_T.is_floating_point():
        values_T = values_T.float()
    return torch.ops.rlft_fast.segment_sum(values_T, cu_seqlens)


def segment_expand(values_B: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Repeats one value per sequence over its tokens: out[cu_seqlens[b] + l] = values[b].

    Differentiable; the backward is `segment_sum`.

    Args:
        values_B: (B, *), any float, integer or bool dtype.
        cu_seqlens: (B + 1,) int32, see the module.
        num_tokens: T, at least cu_seqlens[B]. None reads it from cu_seqlens, which on CUDA waits for the device.

    Returns:
        (T, *), dtype and device of `values_B`; zeros behind cu_seqlens[B].

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    check_cu_seqlens(cu_seqlens, {"values_B": values_B})
    if values_B.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            f"values_B has {values_B.shape[0]} rows, expected B = {cu_seqlens.shape[0] - 1} = len(cu_seqlens) - 1: "
            "pass one row per sequence."
        )
    return torch.ops.rlft_fast.segment_expand(values_B, cu_seqlens, token_count(cu_seqlens, num_tokens))


def segment_mean(values_T: Tensor, cu_seqlens: Tensor, weight_T: Tensor | None = None) -> Tensor:
    """Weighted mean over each sequence: sum_l w_l v_l / sum_l w_l, and 0 where the weights sum to 0.

    Tokens of weight 0 are left out altogether: a nan or inf there does not spread.

    Args:
        values_T: (T,) float.
        cu_seqlens: (B + 1,) int32, see the module.
        weight_T: (T,) bool, integer or float, for example a loss mask; None weighs every token 1.

    Returns:
        (B,) float32, or float64 where the values are float64.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    check_cu_seqlens(cu_seqlens, {"values_T": values_T})
    weight_T = torch.ones_like(values_T, dtype=torch.bool) if weight_T is None else weight_T
    check_dense({"weight_T": weight_T})
    for name, tensor in (("values_T", values_T), ("weight_T", weight_T)):
        if tensor.is_complex():
            raise TypeError(f"{name} is {tensor.dtype}, expected float, integer or bool.")
    if values_T.shape != weight_T.shape or values_T.dim() != 1:
        raise ValueError(
            f"values_T has shape {tuple(values_T.shape)} and weight_T {tuple(weight_T.shape)}, expected (T,) for both."
        )
    dtype = torch.promote_types(values_T.dtype, torch.float32)
    # Finite values keep their part in the gradient of a weight of 0.
    weighted_T = values_T.to(dtype).where((weight_T != 0) | values_T.isfinite(), 0) * weight_T
    weight_B = segment_sum(weight_T.to(dtype), cu_seqlens)
    # The denominator is replaced before the division: nan * 0 in the backward of the branch not taken would be nan.
    return segment_sum(weighted_T, cu_seqlens) / torch.where(weight_B == 0, torch.inf, weight_B)
