"""The algorithms of `linear_logprob`: GEMMs over tiles of the logits, and what happens between them.

The (T, V) logits are by far the largest tensor of a policy update. Here they exist one tile at a time: the GEMMs are
the vendor's, and one kernel per tile does everything between them (``csrc/cpu/logprob_rows.cpp`` holds the equations).
Callers have checked every argument.

    no grad              1 GEMM    logits tile -> online softmax statistics
    with backward        4 GEMMs   backward recomputes the logits per vocabulary tile from the saved normaliser, so
                                   every row of dW is reduced over all tokens at once and written once; rows without
                                   upstream gradient are left out, on a GPU by Triton's GEMMs, which stop at a row
                                   number that they read there
    the same, few tokens  3 GEMMs  where all logits fit the workspace they stay there until backward
    frozen weight        2 GEMMs   U = (onehot - P) W is built while the logits are there; backward scales its rows. Of
                                   logprob alone, and of a whole vocabulary: else as above, without the GEMM of dW
    linear_logprob_loss  3 GEMMs   (loss.py) the loss is known per token, so logits become dlogits in place in
                                   the forward; 2 where the weight is frozen

The forward of all four adds the same blocks of columns in the same order, so log-probabilities of the same rows in one
call are equal bit for bit where the vendor's GEMM gives a row the same bits in chunks and tiles of any size: a policy
ratio between a no-grad pass and the first gradient pass is then exactly 1. GEMMs of CPUs do from 16 rows and two
columns on: with fewer another kernel runs, whose logits were off by one rounding in a third of the calls. GEMMs of GPUs
may split their sums by the width of a tile.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlft_fast.ops.logprob.threshold import THRESHOLD_BYTES_PER_LOGIT, keep_above_
from rlft_fast.ops.logprob.tiles import (
    Gradients,
    Head,
    Rows,
    Stats,
    Sums,
    Tile,
    empty_gradients,
    float_bias,
    in_huge_pages,
    multiply,
    multiply_columns,
    multiply_rows,
    operand,
    padded_columns,
    per_token_results,
    rounded_columns,
    row_chunks,
    scatter_gradients,
    seen_rows,
    tile_shape,
)

# ---- forward only, and forward + recomputing backward ---------------------------------------------------------------


def _forward_chunk(head: Head, rows: Rows, columns: int, kept: Tensor, sums: Sums) -> Stats:
    """Statistics of one chunk, tile by tile: in the memory of the kept logits, or one after the other in the same."""
    if head.backend == "triton_fused" and head.vocab:
        head.kernels.fused_stats(
            rows.hidden_RD, operand(head.weight_VD), rows.target_R, float_bias(head.bias_V), rows.inv_temperature,
            head.softcap, head.scale, *sums,
        )  # fmt: skip
        return sums.finish(head)
    tiles = kept if kept.numel() else kept.new_empty(1, rows.hidden_RD.shape[0], columns)
    num_tiles, num_rows, columns = tiles.shape
    # One GEMM for forward and backward: errors of its rounding cancel in p - 1 only if they are the same ones.
    count = tiles.new_full((), num_rows, dtype=torch.int32) if head.backend == "triton" else None
    for i, (tile, weight, bias) in enumerate(head.tiles(columns)):
        z = tiles[i % num_tiles, :, : weight.shape[0]]
        multiply_rows(rows.hidden_RD, weight.T, z, count)
        transform = (bias, rows.inv_temperature, head.softcap, head.scale)
        if rows.threshold is not None:
            transform, _ = keep_above_(z, rows, tile.start, transform)
        head.kernels.logprob_stats_(z, rows.target_R, tile.start, *transform, *sums)
    return sums.finish(head)


@torch.library.custom_op("rlft_fast::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    threshold: Tensor | None, softcap: float, scale: float, backend: str, group: str, workspace_mib: int,
    keep_logits: bool, return_entropy: bool, return_sum_prob_squared: bool, return_top1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What :class:`LinearLogprob` holds, (T,) or empty, and of the active rows (maximum, log_sum) (2, A) and logits.

    The logits are kept, if they shall be and fit, as the N tiles of C columns that they come in, (N, A, C).
    """
    head = Head(weight, bias, softcap, scale, backend, group)
    results = per_token_results(hidden, return_entropy, return_sum_prob_squared, return_top1)
    num_active = active_index.shape[0]
    normalizer = hidden.new_empty(2, num_active, dtype=torch.float32)
    beside = 0 if threshold is None else THRESHOLD_BYTES_PER_LOGIT
    limit, columns = tile_shape(num_active, hidden, max(workspace_mib * 4 // (4 + beside), 1))
    kept = in_huge_pages(_kept_logits(hidden, weight, active_index, workspace_mib, keep_logits))
    if backend == "triton_fused" or kept.numel():
        limit = max(num_active, 1)
    for chunk in row_chunks(num_active, limit, hidden.device.type):
        index = active_index[chunk]
        rows = Rows.gather(hidden, target, inv_temperature, index, threshold)
        sums = Sums.of_nothing(rows, return_entropy, return_sum_prob_squared)
        stats = _forward_chunk(head, rows, columns, kept, sums)
        normalizer[:, chunk] = torch.stack([stats.maximum, stats.log_sum])
        for result, values in zip(results, stats, strict=False):
            if values is not None and result.shape[0]:
                result[index] = values
    return *results, normalizer, kept


def _kept_logits(hidden: Tensor, weight: Tensor, active_index: Tensor, workspace_mib: int, asked: bool) -> Tensor:
    """(N, A, C) memory for all logits, empty unless asked for and all fit beside the tile that backward works in."""
    num_tokens, vocab = hidden.shape[0], weight.shape[0]
    columns = min(tile_shape(num_tokens, hidden, workspace_mib)[1], padded_columns(vocab))
    num_tiles = -(-vocab // columns)
    row_bytes = columns * (4 * num_tiles + Tile.bytes_per_logit(hidden))
    fits = asked and num_tokens * row_bytes <= workspace_mib * 2**20
    return hidden.new_empty((num_tiles, active_index.shape[0], columns) if fits else (0,), dtype=torch.float32)


@_linear_logprob.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, threshold, softcap, scale, backend, group,
      workspace_mib, keep_logits, *asked_for):  # fmt: skip
    return (
        *per_token_results(hidden, *asked_for), hidden.new_empty(2, *active_index.shape, dtype=torch.float32),
        _kept_logits(hidden, weight, active_index, workspace_mib, keep_logits),
    )  # fmt: skip


@torch.library.custom_op("rlft_fast::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    threshold: Tensor | None, softcap: float, scale: float, backend: str, group: str, workspace_mib: int,
    normalizer: Tensor, kept: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight, dbias), each empty if not needed: three GEMMs, or two, vocabulary tile by vocabulary tile."""
    head = Head(weight, bias, softcap, scale, backend, group)
    grads = Gradients.allocate(hidden, weight, bias, needs_grad)
    upstream = grad_logprob[active_index]
    upstream_entropy = None if grad_entropy is None else grad_entropy[active_index]
    seen = seen_rows(upstream, upstream_entropy)
    taken, count = _seen_first(seen, backend)
    active_index, normalizer, upstream = active_index[taken], normalizer[:, taken], upstream[taken]
    upstream_entropy = None if upstream_entropy is None else upstream_entropy[taken]
    rows = Rows.gather(hidden, target, inv_temperature, active_index, threshold)
    if seen.is_cuda and count is None:  # all rows multiply, and 0 * nan would put a bad one nobody sees into dweight
        rows.hidden_RD.masked_fill_(seen.logical_not().unsqueeze(1), 0)
    row_entropy = None if grad_entropy is None else entropy[active_index]
    maximum, log_sum = normalizer.contiguous()
    num_rows = active_index.shape[0]
    beside = 0 if threshold is None else THRESHOLD_BYTES_PER_LOGIT
    fitting = workspace_mib * 2**20 // ((Tile.bytes_per_logit(hidden) + beside) * max(num_rows, 1))
    columns = kept.shape[-1] if kept.numel() else rounded_columns(fitting, hidden)
    memory = Tile(rows, columns)
    grad_rows = hidden.new_zeros(num_rows, hidden.shape[1], dtype=torch.float32) if needs_grad[0] else None
    for i, (tile, weight_tile, bias_tile) in enumerate(head.tiles(columns)):
        z, dz = memory.views(weight_tile.shape[0])
        if not kept.numel():
            multiply_rows(rows.hidden_RD, weight_tile.T, z, count)
        elif isinstance(taken, slice):
            z = kept[i, :, : weight_tile.shape[0]]
        else:
            torch.index_select(kept[i], 0, taken, out=memory.logits)
        transform, dx, slope = (bias_tile, rows.inv_temperature, softcap, scale), dz, None
        if threshold is not None:
            transform, slope = keep_above_(z, rows, tile.start, transform)
            dx = z  # in float32 until the slope is in it: one rounding, not two
        head.kernels.logprob_grad_(
            z, rows.target_R, tile.start, *transform, maximum, log_sum, row_entropy, upstream, upstream_entropy, dx
        )
        if slope is not None:
            torch.mul(dx, slope, out=dz)
        if grad_rows is not None:
            multiply_rows(dz, weight_tile, grad_rows, count, accumulate=True)
        if needs_grad[1]:
            multiply_columns(dz, rows.hidden_RD, grads.weight[tile], count)
        if needs_grad[2]:
            grads.bias[tile] = dz.sum(0, dtype=torch.float32)
    if grad_rows is not None:
        grads.set_hidden(active_index, grad_rows, head)
    return grads.hidden, grads.weight, grads.bias


def _seen_first(seen: Tensor, backend: str) -> tuple[Tensor | slice, Tensor | None]:
    """Which rows backward takes: those that the loss sees.

    A device is not waited for: there they come first, with their number as a () int32 tensor, and Triton's GEMMs stop
    behind them. The vendor's need sizes from the host and take all rows. Triton's cannot stand in for them in backward
    alone: p - 1 of a certain token would be the difference of two GEMMs' roundings.
    """
    if backend == "triton":
        return seen.logical_not().byte().argsort(stable=True), seen.sum(dtype=torch.int32)
    if seen.is_cuda or seen.all():
        return slice(None), None
    return seen.nonzero().squeeze(-1), None


@_linear_logprob_backward.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, threshold, softcap, scale, backend, group,
      workspace_mib, normalizer, kept, entropy, grad_logprob, grad_entropy, needs_grad):  # fmt: skip
    return empty_gradients(hidden, weight, bias, needs_grad)


def _save_for_recompute(ctx, inputs, output) -> None:
    *tensors, _, _, _, _ = inputs
    tensors, ctx.options = tensors[:7], tensors[7:]
    _, entropy, *constants = output
    ctx.save_for_backward(*tensors, *constants[-2:], entropy)
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)  # or backward is handed zeros of the size of the kept logits


def _recompute_backward(ctx, grad_logprob, grad_entropy, *_):
    if grad_logprob is None and grad_entropy is None:
        return (None,) * 16
    *tensors, normalizer, kept, entropy = ctx.saved_tensors
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(grad_entropy)
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]]
    grads = torch.ops.rlft_fast.linear_logprob_backward(
        *tensors, *ctx.options, normalizer, kept, entropy, grad_logprob, grad_entropy, needs
    )
    return scatter_gradients(grads, needs, num_inputs=16)


_linear_logprob.register_autograd(_recompute_backward, setup_context=_save_for_recompute)

# ---- frozen weight: forward keeps U = d logprob / d hidden ----------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob_frozen", mutates_args=())
def _linear_logprob_frozen(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, backend: str, workspace_mib: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(logprob (T,), U (T, D) with U_t = d logprob_t / d hidden_t).

    U = (onehot - P) W without P: as in flash attention (Dao et al. 2022), unnormalised sums follow the running maximum.
    """
    head = Head(weight, bias, softcap, scale, backend)
    logprob = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    jacobian = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    num_active = active_index.shape[0]
    limit, columns = tile_shape(num_active, hidden, workspace_mib * 4 // Tile.bytes_per_logit(hidden))
    for chunk in row_chunks(num_active, limit, hidden.device.type):
        index = active_index[chunk]
        rows = Rows.gather(hidden, target, inv_temperature, index)
        logprob[index], grad_rows = _frozen_chunk(head, rows, columns)
        jacobian[index] = grad_rows.to(hidden.dtype)
    return logprob, jacobian


def _frozen_chunk(head: Head, rows: Rows, columns: int) -> tuple[Tensor, Tensor]:
    """(logprob (R,), float32 U (R, D)) of a chunk of rows, whose tile is given back before the next one has its own."""
    sums = Sums.of_nothing(rows)
    sum_others, slope = rows.hidden_RD.new_zeros(2, len(rows.hidden_RD), dtype=torch.float32)
    others_RD = torch.zeros_like(rows.hidden_RD, dtype=torch.float32)
    memory = Tile(rows, columns)
    for tile, weight_tile, bias_tile in head.tiles(columns):
        z, exp_z = memory.views(weight_tile.shape[0])
        multiply(rows.hidden_RD, weight_tile.T, out=z)
        head.kernels.logprob_frozen_(
            z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, head.softcap, head.scale,
            sums.maximum, sums.sum_exp, sums.target_logit, sum_others, slope, others_RD, exp_z,
        )  # fmt: skip
        multiply(exp_z, weight_tile, out=others_RD, accumulate=True)
    target_RD = head.weight_VD[rows.target_R.clamp(0, head.vocab - 1)].to(torch.float32)
    grad_rows = target_RD.mul_((slope * sum_others).unsqueeze(1)).sub_(others_RD).div_(sums.sum_exp.unsqueeze(1))
    return sums.finish(head).logprob, grad_rows


@_linear_logprob_frozen.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, backend, workspace_mib):
    jacobian = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), jacobian


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


# An op without a derivative of its own: through the jacobian, a constant to autograd, there would be a wrong one.
@torch.library.custom_op("rlft_fast::linear_logprob_frozen_backward", mutates_args=())
def _linear_logprob_frozen_backward(jacobian: Tensor, grad_logprob: Tensor) -> Tensor:
    """dhidden, the product in float32: half precision does not hold every upstream gradient."""
    upstream = grad_logprob.unsqueeze(-1)
    grad_hidden = torch.empty_like(jacobian)
    torch.mul(jacobian, upstream, out=grad_hidden)
    return grad_hidden.masked_fill_(upstream == 0, 0)


@_linear_logprob_frozen_backward.register_fake
def _(jacobian, grad_logprob):
    return torch.empty_like(jacobian)


def _frozen_backward(ctx, grad_logprob, _grad_jacobian):
    if grad_logprob is None:
        return (None,) * 10
    (jacobian,) = ctx.saved_tensors
    return torch.ops.rlft_fast.linear_logprob_frozen_backward(jacobian, grad_logprob), *[None] * 9


_linear_logprob_frozen.register_autograd(_frozen_backward, setup_context=_save_jacobian)
