"""Logits of a few tokens of the vocabulary: dot products of hidden states with gathered rows of the projection.

Nothing of the vocabulary's size exists but dweight.

Shapes: T packed tokens, K ids of each, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from rlft_fast.ops.precision import sums_in_float32


def gathered_bytes(num_ids: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of the weight rows of one token's support: gathered in ``dtype``, then widened to float32."""
    return num_ids * dim * (4 if dtype == torch.float32 else 4 + dtype.itemsize)


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return min(a, b, key=lambda dtype: dtype.itemsize)


def row_groups(weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> list[slice]:
    """Rows whose gathered weight rows fit the workspace."""
    row_bytes = max(gathered_bytes(ids.shape[1], weight.shape[1], narrower(weight.dtype, dtype)), 1)
    count = max(workspace_mib * 2**20 // row_bytes, 1)
    return [slice(start, start + count) for start in range(0, ids.shape[0], count)]


@torch.library.custom_op("rlft_fast::support_logits", mutates_args=())
def _support_logits(hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> Tensor:
    """(T, K) float32 dot products of each hidden state with the weight rows of its ids, both rounded to ``dtype``."""
    logits = hidden.new_empty(ids.shape, dtype=torch.float32)
    for rows in row_groups(weight, ids, workspace_mib, dtype):
        column = hidden[rows].to(dtype).float().unsqueeze(-1)
        with sums_in_float32(logits):
            torch.bmm(weight[ids[rows]].to(dtype).float(), column, out=logits[rows].unsqueeze(-1))
    return logits


@_support_logits.register_fake
def _(hidden, weight, ids, workspace_mib, dtype):
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::support_logits_backward", mutates_args=())
def _support_logits_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight), added up in float32 and rounded once; empty where not needed."""
    grad_hidden, grad_weight = _empty_gradients(hidden, weight, needs_grad, torch.float32)
    grad_weight.zero_()
    seen = (grad != 0).any(-1, keepdim=True)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would narrow the sums
        for rows in row_groups(weight, ids, workspace_mib, dtype):
            if needs_grad[0]:
                with sums_in_float32(grad):
                    grad_rows = torch.bmm(grad[rows].unsqueeze(1), weight[ids[rows]].to(dtype).float())
                grad_hidden[rows] = grad_rows.squeeze(1).to(hidden.dtype)
            if needs_grad[1]:
                hidden_rows = hidden[rows].to(dtype).float().where(seen[rows], 0)  # 0 * nan is nan
                add_outer_(grad_weight, ids[rows], grad[rows], hidden_rows)
    return grad_hidden, grad_weight.to(weight.dtype)


def add_outer_(grad_weight: Tensor, ids: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Adds to the row of each id its gradient times the hidden state. The products are as large as gathered rows."""
    products = (grad.unsqueeze(-1) * hidden.unsqueeze(1)).flatten(0, 1)
    if grad_weight.is_cuda:  # index_put_ sorts the ids and gives the same bits every time; index_add_ does not
        grad_weight.index_put_((ids.flatten(),), products, accumulate=True)
    else:
        grad_weight.index_add_(0, ids.flatten(), products)


@_support_logits_backward.register_fake
def _(grad, hidden, weight, ids, workspace_mib, dtype, needs_grad):
    return _empty_gradients(hidden, weight, needs_grad, weight.dtype)


def _empty_gradients(
    hidden: Tensor, weight: Tensor, needs_grad: list[bool], weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    sizes = [x.shape if needed else (0,) for x, needed in zip((hidden, weight), needs_grad, strict=True)]
    return hidden.new_empty(sizes[0]), weight.new_empty(sizes[1], dtype=weight_dtype)


def _save(ctx, inputs, output) -> None:
    *tensors, workspace_mib, dtype = inputs
    ctx.scalars = workspace_mib, dtype
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    needs_grad = list(ctx.needs_input_grad[:2])
    grads = torch.ops.rlft_fast.support_logits_backward(grad, *ctx.saved_tensors, *ctx.scalars, needs_grad)
    return *(x if needed else None for x, needed in zip(grads, needs_grad, strict=True)), None, None, None


_support_logits.register_autograd(_backward, setup_context=_save)
