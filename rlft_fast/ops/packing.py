"""Packing: padded (B, L, *) <-> packed (T, *), and per-sequence arithmetic on packed tensors.

Packed tensors hold B sequences one behind the other; `cu_seqlens` (B + 1,) int32 says where: sequence b is
[cu_seqlens[b], cu_seqlens[b + 1]), cu_seqlens[0] is 0 and cu_seqlens[B] is T. Empty sequences are allowed.

On the CPU the contents of cu_seqlens are checked. On CUDA they are not, for that would stall the stream; there no
memory outside the tensors is touched whatever cu_seqlens holds, and places that no sequence covers get zeros
(`ignore_index`, `value`).
"""

from typing import Literal

import torch
from torch import Tensor

from rlft_fast.ops._library import check_device

PaddingSide = Literal["right", "left"]


def unpad(
    padded: Tensor, cu_seqlens: Tensor, *, num_tokens: int | None = None, padding_side: PaddingSide = "right"
) -> Tensor:
    """Removes the padding: packed[cu_seqlens[b] + l] = padded[b, l + shift_b].

    shift_b is 0 for right padding and L - length_b for left padding, where every sequence ends at column L.
    Differentiable; the backward is `pad` with zeros.

    Args:
        padded: (B, L, *), any float, integer or bool dtype.
        cu_seqlens: (B + 1,) int32, see the module.
        num_tokens: T = cu_seqlens[B]. None reads it from cu_seqlens, which on CUDA waits for the device.
        padding_side: "right" or "left".

    Returns:
        (T, *), dtype and device of `padded`.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    _check_cu_seqlens(cu_seqlens, padded)
    if padded.dim() < 2 or padded.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            f"padded has shape {tuple(padded.shape)}, expected (B, L, ...) with B = {cu_seqlens.shape[0] - 1} "
            "= len(cu_seqlens) - 1: pass one row per sequence."
        )
    num_tokens = _num_tokens(cu_seqlens, num_tokens)
    return torch.ops.rlft_fast.unpad(padded, cu_seqlens, num_tokens, _is_left(padding_side))


def pad(
    packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, padding_side: PaddingSide = "right", value: float = 0.0
) -> Tensor:
    """Adds padding: padded[b, l + shift_b] = packed[cu_seqlens[b] + l], and `value` everywhere else.

    The inverse of `unpad`, which is its backward.

    Args:
        packed: (T, *), any float, integer or bool dtype.
        cu_seqlens: (B + 1,) int32, see the module.
        max_seqlen: L, at least the longest sequence.
        padding_side: "right" or "left".
        value: what the padding holds.

    Returns:
        (B, max_seqlen, *), dtype and device of `packed`.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    _check_cu_seqlens(cu_seqlens, packed)
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen is {max_seqlen}, expected the padded length: pass at least the longest sequence.")
    return torch.ops.rlft_fast.pad(packed, cu_seqlens, max_seqlen, _is_left(padding_side), float(value))


def position_ids(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Positions within each sequence: out[cu_seqlens[b] + l] = l.

    Args:
        cu_seqlens: (B + 1,) int32, see the module.
        num_tokens: T = cu_seqlens[B]. None reads it from cu_seqlens, which on CUDA waits for the device.

    Returns:
        (T,) int64.

    Raises:
        ValueError: contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    _check_cu_seqlens(cu_seqlens)
    return torch.ops.rlft_fast.position_ids(cu_seqlens, _num_tokens(cu_seqlens, num_tokens))


def next_token_targets(input_ids_T: Tensor, cu_seqlens: Tensor, ignore_index: int = -100) -> Tensor:
    """The token that follows each position in the same sequence; `ignore_index` at each sequence's last position.

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
    _check_cu_seqlens(cu_seqlens, input_ids_T)
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
    _check_cu_seqlens(cu_seqlens, values_T)
    if not values_T.is_floating_point():
        values_T = values_T.float()
    return torch.ops.rlft_fast.segment_sum(values_T, cu_seqlens)


def segment_expand(values_B: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Repeats one value per sequence over its tokens: out[cu_seqlens[b] + l] = values[b].

    Differentiable; the backward is `segment_sum`.

    Args:
        values_B: (B, *), any float, integer or bool dtype.
        cu_seqlens: (B + 1,) int32, see the module.
        num_tokens: T = cu_seqlens[B]. None reads it from cu_seqlens, which on CUDA waits for the device.

    Returns:
        (T, *), dtype and device of `values_B`.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: cu_seqlens is not int32.
    """
    _check_cu_seqlens(cu_seqlens, values_B)
    if values_B.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            f"values_B has {values_B.shape[0]} rows, expected B = {cu_seqlens.shape[0] - 1} = len(cu_seqlens) - 1: "
            "pass one row per sequence."
        )
    return torch.ops.rlft_fast.segment_expand(values_B, cu_seqlens, _num_tokens(cu_seqlens, num_tokens))


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
    weight_T = torch.ones_like(values_T, dtype=torch.bool) if weight_T is None else weight_T
    if values_T.shape != weight_T.shape or values_T.dim() != 1:
        raise ValueError(
            f"values_T has shape {tuple(values_T.shape)} and weight_T {tuple(weight_T.shape)}, expected (T,) for both."
        )
    dtype = torch.promote_types(values_T.dtype, torch.float32)
    weighted_T = torch.where(weight_T != 0, values_T.to(dtype) * weight_T, 0)
    weight_B = segment_sum(weight_T.to(dtype), cu_seqlens)
    # The denominator is replaced before the division: nan * 0 in the backward of the branch not taken would be nan.
    return segment_sum(weighted_T, cu_seqlens) / torch.where(weight_B == 0, torch.inf, weight_B)


# ---- checks ----------------------------------------------------------------------------------------------------


def _check_cu_seqlens(cu_seqlens: Tensor, rows: Tensor | None = None) -> None:
    """Checks everything about cu_seqlens but its contents; the CPU kernels check those."""
    check_device(cu_seqlens.device)
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}, expected torch.int32: convert with .int().")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or not cu_seqlens.is_contiguous():
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and strides {cu_seqlens.stride()}, "
            "expected a contiguous (B + 1,): pass cumulative lengths that start with 0."
        )
    if rows is not None and rows.device != cu_seqlens.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and the data on {rows.device}: move both to one device."
        )
    if rows is not None and rows.dim() == 0:
        raise ValueError("the data is a scalar, expected at least one dimension.")


def _num_tokens(cu_seqlens: Tensor, num_tokens: int | None) -> int:
    return int(cu_seqlens[-1]) if num_tokens is None else num_tokens


def _is_left(padding_side: PaddingSide) -> bool:
    if padding_side not in ("right", "left"):
        raise ValueError(f"padding_side is {padding_side!r}, expected 'right' or 'left'.")
    return padding_side == "left"


# ---- fakes and autograd ----------------------------------------------------------------------------------------


@torch.library.register_fake("rlft_fast::unpad")
def _(padded, cu_seqlens, num_tokens, left):
    return padded.new_empty((num_tokens, *padded.shape[2:]))


@torch.library.register_fake("rlft_fast::pad")
def _(packed, cu_seqlens, max_seqlen, left, value):
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:]))


@torch.library.register_fake("rlft_fast::position_ids")
def _(cu_seqlens, num_tokens):
    return cu_seqlens.new_empty((num_tokens,), dtype=torch.int64)


@torch.library.register_fake("rlft_fast::next_token_targets")
def _(input_ids, cu_seqlens, ignore_index):
    return input_ids.new_empty(input_ids.shape)


@torch.library.register_fake("rlft_fast::segment_sum")
def _(values, cu_seqlens):
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_empty((cu_seqlens.shape[0] - 1, *values.shape[1:]), dtype=dtype)


@torch.library.register_fake("rlft_fast::segment_expand")
def _(values, cu_seqlens, num_tokens):
    return values.new_empty((num_tokens, *values.shape[1:]))


def _setup_unpad(ctx, inputs, output):
    padded, cu_seqlens, _, ctx.left = inputs
    ctx.max_seqlen = padded.shape[1]
    ctx.save_for_backward(cu_seqlens)


def _backward_unpad(ctx, grad_packed):
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.rlft_fast.pad(grad_packed, cu_seqlens, ctx.max_seqlen, ctx.left, 0.0), None, None, None


def _setup_pad(ctx, inputs, output):
    packed, cu_seqlens, _, ctx.left, _ = inputs
    ctx.num_tokens = packed.shape[0]
    ctx.save_for_backward(cu_seqlens)


def _backward_pad(ctx, grad_padded):
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.rlft_fast.unpad(grad_padded, cu_seqlens, ctx.num_tokens, ctx.left), None, None, None, None


def _setup_segment(ctx, inputs, output):
    values, cu_seqlens = inputs[:2]
    ctx.num_rows, ctx.dtype = values.shape[0], values.dtype
    ctx.save_for_backward(cu_seqlens)


def _backward_segment_sum(ctx, grad_B):
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.rlft_fast.segment_expand(grad_B.to(ctx.dtype), cu_seqlens, ctx.num_rows), None


def _backward_segment_expand(ctx, grad_T):
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.rlft_fast.segment_sum(grad_T, cu_seqlens).to(ctx.dtype), None, None


torch.library.register_autograd("rlft_fast::unpad", _backward_unpad, setup_context=_setup_unpad)
torch.library.register_autograd("rlft_fast::pad", _backward_pad, setup_context=_setup_pad)
torch.library.register_autograd("rlft_fast::segment_sum", _backward_segment_sum, setup_context=_setup_segment)
torch.library.register_autograd("rlft_fast::segment_expand", _backward_segment_expand, setup_context=_setup_segment)
