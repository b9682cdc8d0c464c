"""Log-probabilities over the tokens that sampling could have drawn.

A sampler with top-k or top-p draws from the softmax over the tokens it kept. A policy ratio is unbiased only if both of
its log-probabilities are taken over that support: over the whole vocabulary the ratio of an unchanged policy averages
below 1. The support S_t of a row is given by its ids, or by the smallest logit in it:

    z_v     = softcap * tanh(logit_scale * (h_t . w_v + b_v) / softcap) / temperature
    S_t     = support_TK[t], or {v: z_v >= threshold_T[t]} and the target
    logprob = z_target - logsumexp over S_t,   entropy over S_t

Ids are few, so their logits are dot products with gathered weight rows, and nothing of the vocabulary's size exists but
dweight. A threshold has to look at every logit, tile by tile, as `linear_logprob` does.

Shapes: T packed tokens, K most tokens of a support, D hidden, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlft_fast.ops.logprob.checks import check_per_token, check_targets, looks_at
from rlft_fast.ops.logprob.gathered import gathered_bytes, narrower
from rlft_fast.ops.logprob.ids.operator import support_logits
from rlft_fast.ops.logprob.linear import checked_problem, linear_logprob
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.reference import (
    LinearLogprob,
    LinearLogprobLoss,
    LossFunction,
    sum_of_losses,
    transform_logits,
)


def support_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    support_TK: Tensor | None = None,
    *,
    threshold_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_sum_prob_squared: bool = False,
    adapter_VE: Tensor | None = None,
    workspace_mib: int | None = None,
) -> LinearLogprob:
    """Log-probability of each target under the softmax over its row's support, given in one of two ways.

    Ids cost ``T K D`` multiplications forward and twice as many backward, for any vocabulary. Ids are exact: the
    support stays the support of the policy that sampled. A threshold costs the four GEMMs of :func:`linear_logprob`,
    and its support is the set of tokens that reach the threshold now. Where weights have changed since sampling, tokens
    have crossed the threshold, and the policy ratio is unbiased only if these tokens carry little probability.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16.
        weight_VD: (V, D) projection on the same device, of which the gathered rows are rounded as in
            :func:`linear_logprob`. With ``adapter_VE`` it is (V, D - E).
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0.
        support_TK: (T, K) int64 vocabulary ids that sampling kept, each once; -1 fills up shorter supports.
        threshold_T: (T,) smallest logit that sampling kept, after soft-capping, scale, bias and temperature: the z
            above. Tokens that equal it are kept; so is the target, which was sampled, and whose logit is not the
            sampler's to the last bit. -inf keeps all, inf the target alone. Not differentiated.
        bias_V: (V,) projection bias.
        temperature: sampling temperature, one number or a (T,) tensor (not differentiated).
        softcap: logit soft-capping, None for none.
        logit_scale: factor on the raw logits.
        ignore_index: target value of the rows to leave out.
        return_entropy: also return the entropy over the support, in nats.
        return_sum_prob_squared: also return the sum of squared probabilities over the support (not differentiated).
        adapter_VE: (V, E) trained columns beside a ``weight_VD`` that needs no gradient, as in :func:`linear_logprob`.
        workspace_mib: upper bound on the gathered weight rows, or the logits, held at once, in MiB; None for 64, and
            256 for a threshold on a GPU.

    Returns:
        :class:`LinearLogprob` of (T,) float32 tensors, differentiable in hidden, weight, bias and adapter. A target
        that is not among its row's ids gives -inf: it could not have been drawn.

    Raises:
        ValueError: not one of support and threshold; shapes, devices or option values that do not fit; (on the CPU) ids
            outside the vocabulary or twice in a row; or a workspace too small for one row's support.
        TypeError: unsupported dtypes, or no tensors.
    """
    if (support_TK is None) == (threshold_T is None):
        got = "neither" if support_TK is None else "both"
        raise ValueError(f"expected one of support_TK and threshold_T, got {got}: the ids or the smallest logit kept")
    if support_TK is None:
        return linear_logprob(
            hidden_TD, weight_VD, target_T, threshold_T=threshold_T, bias_V=bias_V, temperature=temperature,
            softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index, return_entropy=return_entropy,
            return_sum_prob_squared=return_sum_prob_squared, adapter_VE=adapter_VE, workspace_mib=workspace_mib,
        )  # fmt: skip
    problem = checked_problem(
        hidden_TD, weight_VD, target_T, temperature, softcap, support_TK=support_TK, adapter_VE=adapter_VE,
        active_index=None, bias_V=bias_V, scale=logit_scale, backend="native", workspace_mib=workspace_mib,
        ignore_index=ignore_index,
    )  # fmt: skip
    if workspace_mib is None:
        problem = replace(problem, workspace_mib=64)
    _check_support(support_TK, problem)
    check_targets(target_T, problem.vocab, ignore_index)
    return _over_ids(problem, temperature, support_TK, return_entropy, return_sum_prob_squared)


def support_logprob_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    loss_fn: LossFunction,
    *per_token: Tensor,
    ignore_index: int = -100,
    **options: Any,
) -> LinearLogprobLoss:
    """Sum of any per-token loss of :func:`support_logprob`'s statistics.

    Args:
        hidden_TD: (T, D) final hidden states.
        weight_VD: (V, D) projection.
        target_T: (T,) int64 vocabulary ids; rows equal to ``ignore_index`` add nothing to the loss.
        loss_fn: ``loss_fn(logprob, entropy, *per_token) -> (T,)``, called once. Entropies are None unless
            ``return_entropy`` is given.
        *per_token: (T,) tensors for ``loss_fn``.
        ignore_index: target value of the rows to leave out.
        **options: those of :func:`support_logprob`, one of ``support_TK`` and ``threshold_T`` among them.

    Returns:
        ``LinearLogprobLoss(loss, logprob, entropy)``: the 0-d float32 sum over tokens, and detached (T,) statistics.

    Raises:
        ValueError: as :func:`support_logprob`, or a ``loss_fn`` of the wrong output shape.
        TypeError: unsupported dtypes, or no tensors.
    """
    result = support_logprob(hidden_TD, weight_VD, target_T, ignore_index=ignore_index, **options)
    check_per_token(per_token, target_T)
    return sum_of_losses(result, target_T, loss_fn, per_token, ignore_index)


def _over_ids(
    problem: Problem, temperature: float | Tensor, support_TK: Tensor, return_entropy: bool,
    return_sum_prob_squared: bool,
) -> LinearLogprob:  # fmt: skip
    target_T = problem.target_T
    active = target_T != problem.ignore_index
    ids_TK = support_TK.clamp(min=0)
    columns = problem.hidden_TD.split([part.shape[1] for part in problem.parts], dim=1)
    z, *of_adapter = (
        support_logits(x, part, ids_TK, problem.workspace_mib, problem.dtype)
        for x, part in zip(columns, problem.parts, strict=True)
    )
    for others in of_adapter:
        z = z + others
    if problem.bias_V is not None:
        z = z + problem.bias_V.float()[ids_TK]  # in this order its gradient is added up in float32, too
    z, zeros_T2 = _SeenRows.apply(z)
    temperature = temperature.detach() if isinstance(temperature, Tensor) else temperature
    z = transform_logits(z, temperature, problem.softcap or None, problem.scale)
    kept_TK = (support_TK >= 0) & (z != -torch.inf)
    # A row without any token would give nan, so it gets finite logits. Nothing reads them.
    z = z.masked_fill(~kept_TK, -torch.inf).masked_fill(~kept_TK.any(-1, keepdim=True), 0)
    log_p = z.log_softmax(-1)
    is_target = kept_TK & (support_TK == target_T.unsqueeze(-1))
    zero = log_p.new_zeros(())
    logprob = log_p.where(is_target, zero).sum(-1).masked_fill(~is_target.any(-1), -torch.inf) + zeros_T2[:, 0]
    entropy = sum_prob_squared = None
    if return_entropy:
        finite = log_p.where(kept_TK, zero)
        entropy = (zeros_T2[:, 1] - (finite.exp() * finite).sum(-1)).where(active, zero)
    if return_sum_prob_squared:
        sum_prob_squared = log_p.detach().exp().square().where(kept_TK, zero).sum(-1).where(active, zero)
    return LinearLogprob(logprob.where(active, zero), entropy, sum_prob_squared)


class _SeenRows(torch.autograd.Function):
    """The logits, with zero gradients in rows that the loss does not see.

    0 * nan is nan, and one such row would reach every gradient. The op also returns zeros (T, 2), which are added to
    logprob and entropy. The gradients of the zeros are the gradients of logprob and entropy, and tell which rows the
    loss sees.
    """

    @staticmethod
    def forward(ctx, z_TK):
        return z_TK.view_as(z_TK), z_TK.new_zeros(z_TK.shape[0], 2)

    @staticmethod
    def backward(ctx, *grads):
        grad_TK, grad_T2 = grads
        return grad_TK.masked_fill((grad_T2 == 0).all(-1, keepdim=True), 0)


def _check_support(support: Tensor, problem: Problem) -> None:
    hidden, weight, workspace_mib = problem.hidden_TD, problem.weight_VD, problem.workspace_mib
    assert workspace_mib is not None
    if support.dim() != 2 or support.shape[0] != hidden.shape[0]:
        raise ValueError(f"expected support_TK ({hidden.shape[0]}, K) to match hidden_TD, got {tuple(support.shape)}")
    if support.dtype != torch.int64:
        raise TypeError(f"support_TK must hold int64 ids, got {support.dtype}")
    row_bytes = gathered_bytes(support.shape[1], hidden.shape[1], narrower(weight.dtype, problem.dtype))
    if row_bytes > workspace_mib * 2**20:
        raise ValueError(
            f"workspace_mib={workspace_mib} cannot hold the weight rows of one support ({support.shape[1]} x "
            f"{hidden.shape[1]} in float32, {row_bytes} bytes): pass at least {-(-row_bytes // 2**20)}"
        )
    if support.numel() > 0 and looks_at(support) and not (support.min() >= -1 and support.max() < weight.shape[0]):
        raise ValueError(
            f"support_TK holds ids from {int(support.min())} to {int(support.max())}, outside the vocabulary of "
            f"{weight.shape[0]} tokens; -1 fills up"
        )
    if looks_at(support):
        ids = support.sort(dim=1).values
        twice = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).nonzero()
        if len(twice):
            row, column = twice[0].tolist()
            raise ValueError(
                f"support_TK holds the id {int(ids[row, column])} twice in row {row}: its probability would count twice"
            )
