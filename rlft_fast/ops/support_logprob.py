"""Log-probabilities over the tokens that sampling could have drawn.

A sampler with top-k or top-p draws from the softmax over the tokens it kept. A policy ratio is unbiased only if both of
its log-probabilities are taken over that support: over the whole vocabulary the ratio of an unchanged policy averages
below 1. The support of a row is few tokens, so their logits are dot products with gathered weight rows, and nothing of
the vocabulary's size exists but dweight:

    S_t given,  z_v = softcap * tanh(logit_scale * (h_t . w_v + b_v) / softcap) / temperature  for v in S_t
    logprob = z_target - logsumexp over S_t,   entropy over S_t

Shapes: T packed tokens, K most tokens of a support, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from rlft_fast.ops.reference import LinearLogprob, transform_logits


def support_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    support_TK: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    workspace_mib: int = 64,
) -> LinearLogprob:
    """Log-probability of each target under the softmax over its row's support.

    Costs ``T K D`` multiplications forward and twice that backward, for any vocabulary.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16.
        weight_VD: (V, D) projection, same dtype and device.
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0.
        support_TK: (T, K) int64 vocabulary ids that sampling kept, each once; -1 fills up shorter supports. The ids
            stay those of the policy that sampled, whatever the weights are now.
        bias_V: (V,) projection bias.
        temperature: sampling temperature, one number or a (T,) tensor (not differentiated).
        softcap: logit soft-capping, None for none.
        logit_scale: factor on the raw logits.
        ignore_index: target value of the rows to leave out.
        return_entropy: also return the entropy over the support, in nats.
        workspace_mib: upper bound on the gathered weight rows held at once, in MiB.

    Returns:
        :class:`LinearLogprob` of (T,) float32 tensors, differentiable in hidden, weight and bias. A target outside its
        support gives -inf: it could not have been drawn.

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) ids outside the vocabulary.
        TypeError: target or support are not int64, or hidden and weight differ in dtype.
    """
    _check(hidden_TD, weight_VD, target_T, support_TK)
    kept_TK = support_TK >= 0
    ids_TK = support_TK.where(kept_TK, 0)
    z = torch.ops.rlft_fast.support_logits(hidden_TD, weight_VD, ids_TK, workspace_mib)
    if bias_V is not None:
        z = z + bias_V[ids_TK].float()
    z = transform_logits(z, temperature, softcap, logit_scale)
    active = target_T != ignore_index
    # A row without any token would give nan, and nan gradients to all: it gets a finite one that nothing reads.
    z = z.masked_fill(~kept_TK & (active & kept_TK.any(-1)).unsqueeze(-1), -torch.inf)
    log_p = z.log_softmax(-1)
    is_target = kept_TK & (support_TK == target_T.unsqueeze(-1))
    zero = log_p.new_zeros(())
    logprob = log_p.where(is_target, zero).sum(-1).masked_fill(~is_target.any(-1), -torch.inf)
    entropy = None
    if return_entropy:
        finite = log_p.where(kept_TK, zero)
        entropy = -(finite.exp() * finite).where(kept_TK, zero).sum(-1).where(active, zero)
    return LinearLogprob(logprob.where(active, zero), entropy)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, support: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden_TD (T, D) and weight_VD (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:1] or support.dim() != 2 or support.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"expected target_T ({hidden.shape[0]},) and support_TK ({hidden.shape[0]}, K) to match hidden_TD, "
            f"got {tuple(target.shape)} and {tuple(support.shape)}"
        )
    if target.dtype != torch.int64 or support.dtype != torch.int64:
        raise TypeError(f"target_T and support_TK must be int64 ids, got {target.dtype} and {support.dtype}")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden_TD and weight_VD must share one dtype, got {hidden.dtype} and {weight.dtype}")
    looks = support.device.type == "cpu" and not torch.compiler.is_compiling() and support.numel() > 0
    if looks and not (support.min() >= -1 and support.max() < weight.shape[0]):
        raise ValueError(
            f"support_TK holds ids from {int(support.min())} to {int(support.max())}, outside the vocabulary of "
            f"{weight.shape[0]} tokens; -1 fills up"
        )


# ---- logits of gathered weight rows ---------------------------------------------------------------------------------


def _chunks(hidden: Tensor, ids: Tensor, workspace_mib: int) -> range:
    """First rows of chunks whose gathered float32 weight rows fit the workspace."""
    row_bytes = 4 * ids.shape[1] * hidden.shape[1]
    return range(0, hidden.shape[0], max(workspace_mib * 2**20 // max(row_bytes, 1), 1))


@torch.library.custom_op("rlft_fast::support_logits", mutates_args=())
def _support_logits(hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int) -> Tensor:
    """(T, K) float32 dot products of each hidden state with the weight rows of its ids."""
    logits = hidden.new_empty(ids.shape, dtype=torch.float32)
    chunks = _chunks(hidden, ids, workspace_mib)
    for start in chunks:
        rows = slice(start, start + chunks.step)
        torch.bmm(weight[ids[rows]].float(), hidden[rows].float().unsqueeze(-1), out=logits[rows].unsqueeze(-1))
    return logits


@_support_logits.register_fake
def _(hidden, weight, ids, workspace_mib):
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::support_logits_backward", mutates_args=())
def _support_logits_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int
) -> tuple[Tensor, Tensor]:
    """(dhidden, dweight), added up in float32 and rounded once."""
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.contiguous_format)
    chunks = _chunks(hidden, ids, workspace_mib)
    for start in chunks:
        rows = slice(start, start + chunks.step)
        grad_hidden[rows] = torch.bmm(grad[rows].unsqueeze(1), weight[ids[rows]].float()).squeeze(1).to(hidden.dtype)
        parts = (grad[rows].unsqueeze(-1) * hidden[rows].float().unsqueeze(1)).flatten(0, 1)
        if grad_weight.is_cuda:  # sorts the ids: unlike index_add_ there, always the same bits
            grad_weight.index_put_((ids[rows].flatten(),), parts, accumulate=True)
        else:
            grad_weight.index_add_(0, ids[rows].flatten(), parts)
    return grad_hidden, grad_weight.to(weight.dtype)


@_support_logits_backward.register_fake
def _(grad, hidden, weight, ids, workspace_mib):
    return torch.empty_like(hidden), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.workspace_mib = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *torch.ops.rlft_fast.support_logits_backward(grad, *ctx.saved_tensors, ctx.workspace_mib), None, None


_support_logits.register_autograd(_backward, setup_context=_save)
