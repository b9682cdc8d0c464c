"""Logits of the ids of each row as an operator: what `support_logprob` calls, differentiable and traced.

Shapes: T packed tokens, K ids of each.
"""

import torch
from torch import Tensor

from rlft_fast.ops.logprob.gathered import add_gathered_grad_weight_, gathered_grad_hidden, gathered_logits


@torch.library.custom_op("rlft_fast::support_logits", mutates_args=())
def support_logits(hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> Tensor:
    """(T, K) float32, see `gathered_logits`."""
    return gathered_logits(hidden, weight, ids, workspace_mib, dtype)


@support_logits.register_fake
def _(hidden, weight, ids, workspace_mib, dtype):
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::support_logits_backward", mutates_args=())
def _support_logits_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight), added up in float32 and rounded once; empty where not needed."""
    grad_hidden, grad_weight = _empty_gradients(hidden, weight, needs_grad, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would narrow the sums
        if needs_grad[0]:
            grad_hidden = gathered_grad_hidden(grad, weight, ids, workspace_mib, dtype).to(hidden.dtype)
        if needs_grad[1]:
            add_gathered_grad_weight_(grad_weight.zero_(), grad, hidden, ids, workspace_mib, dtype)
    return grad_hidden, grad_weight.to(weight.dtype)


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


support_logits.register_autograd(_backward, setup_context=_save)
