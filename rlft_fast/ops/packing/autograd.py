"""Shapes of what the packing ops return, and their backward passes.

The pairs `pad` and `unpad`, `segment_sum` and `segment_expand`, `take_rows` and `sum_rows` are each other's backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlft_fast.ops import library as library  # registers torch.ops.rlft_fast


@torch.library.register_fake("rlft_fast::unpad")
def _(padded, cu_seqlens, columns, num_tokens, left):
    return [tensor.new_empty((num_tokens, *tensor.shape[2:])) for tensor in padded]


@torch.library.register_fake("rlft_fast::pad")
def _(packed, cu_seqlens, columns, max_seqlen, left, values):
    return [tensor.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *tensor.shape[1:])) for tensor in packed]


@torch.library.register_fake("rlft_fast::mask_columns")
def _(mask, cu_seqlens, num_tokens):
    return mask.new_empty((num_tokens,), dtype=torch.int32)


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


@torch.library.register_fake("rlft_fast::take_rows")
def _(values, index, order, cu_uses):
    return values.new_empty((index.shape[0], *values.shape[1:]))


@torch.library.register_fake("rlft_fast::sum_rows")
def _(values, index, order, cu_uses):
    return values.new_empty((cu_uses.shape[0] - 1, *values.shape[1:]))


def _setup_unpad(ctx, inputs, output):
    padded, cu_seqlens, columns, _, ctx.left = inputs
    ctx.max_seqlen = padded[0].shape[1]
    ctx.save_for_backward(cu_seqlens, columns)
    ctx.mark_non_differentiable(*_constant(padded, output))


def _backward_unpad(ctx, grads):
    cu_seqlens, columns = ctx.saved_tensors

    def pad_zeros(needed: list[Tensor]) -> list[Tensor]:
        zeros = [0.0] * len(needed)
        return torch.ops.rlft_fast.pad(needed, cu_seqlens, columns, ctx.max_seqlen, ctx.left, zeros)

    return _where_needed(pad_zeros, grads, ctx.needs_input_grad[0]), None, None, None, None


def _setup_pad(ctx, inputs, output):
    packed, cu_seqlens, columns, _, ctx.left, _ = inputs
    ctx.num_tokens = packed[0].shape[0]
    ctx.save_for_backward(cu_seqlens, columns)
    ctx.mark_non_differentiable(*_constant(packed, output))


def _backward_pad(ctx, grads):
    cu_seqlens, columns = ctx.saved_tensors

    def remove(needed: list[Tensor]) -> list[Tensor]:
        return torch.ops.rlft_fast.unpad(needed, cu_seqlens, columns, ctx.num_tokens, ctx.left)

    return _where_needed(remove, grads, ctx.needs_input_grad[0]), None, None, None, None, None


def _constant(inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Outputs that need no gradient, although others of the same call do."""
    return [output for input, output in zip(inputs, outputs, strict=True) if not input.requires_grad]


def _where_needed(
    function: Callable[[list[Tensor]], list[Tensor]], grads: list[Tensor], needed: list[bool]
) -> list[Tensor | None]:
    """One call for all gradients that are needed; None for the others, integers among them."""
    results = iter(function([grad for grad, need in zip(grads, needed, strict=True) if need]))
    return [next(results) if need else None for need in needed]


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


def _setup_rows(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward_take_rows(ctx, grad_M):
    return torch.ops.rlft_fast.sum_rows(grad_M, *ctx.saved_tensors), None, None, None


def _backward_sum_rows(ctx, grad_T):
    return torch.ops.rlft_fast.take_rows(grad_T, *ctx.saved_tensors), None, None, None


torch.library.register_autograd("rlft_fast::unpad", _backward_unpad, setup_context=_setup_unpad)
torch.library.register_autograd("rlft_fast::pad", _backward_pad, setup_context=_setup_pad)
torch.library.register_autograd("rlft_fast::segment_sum", _backward_segment_sum, setup_context=_setup_segment)
torch.library.register_autograd("rlft_fast::segment_expand", _backward_segment_expand, setup_context=_setup_segment)
torch.library.register_autograd("rlft_fast::take_rows", _backward_take_rows, setup_context=_setup_rows)
torch.library.register_autograd("rlft_fast::sum_rows", _backward_sum_rows, setup_context=_setup_rows)
