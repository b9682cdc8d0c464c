"""Plain PyTorch definitions of the fused ops: the meaning of each, the ``reference`` backend, and every test's oracle.

Shapes: T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.checks import check_losses


class LinearLogprob(NamedTuple):
    """Per token, (T,) each; a statistic that was not asked for is None. Logprob and entropy are differentiable."""

    logprob: Tensor
    """float32 log-probability of the target."""
    entropy: Tensor | None = None
    """float32 entropy of the distribution, in nats."""
    sum_prob_squared: Tensor | None = None
    """float32 sum of p^2 over the vocabulary: the probability that two samples are equal."""
    top1: Tensor | None = None
    """bool: no token is more probable than the target."""
    mean_logits: Tensor | None = None
    """float32 mean over the vocabulary of the logits that the softmax sees: with bias, scale, soft-cap, temperature."""


class LinearLogprobLoss(NamedTuple):
    """Sum of a per-token loss, with the detached float32 statistics, (T,), that it was computed from."""

    loss: Tensor
    logprob: Tensor
    entropy: Tensor | None
    ids_logprob: Tensor | None = None
    """(T, K) detached float32 log-probabilities of the ids that were asked for."""


LossFunction = Callable[..., Tensor]


class _Rounded(torch.autograd.Function):
    """Values rounded to a dtype, but kept in float32, and so is their gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.to(dtype).to(torch.promote_types(dtype, torch.float32))

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].to(ctx.dtype), None


def rounded_inputs(
    hidden_TD: Tensor, weight_VD: Tensor, adapter_VE: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Hidden states and the whole projection, rounded to a dtype. Their gradients are not rounded to it."""
    if adapter_VE is not None:
        weight_VD = torch.cat([weight_VD, adapter_VE], dim=-1)
    hidden, weight = (x if x.dtype == dtype else _Rounded.apply(x, dtype) for x in (hidden_TD, weight_VD))
    return hidden, weight


def softmax_logits(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """The (T, V) logits z that the softmax sees, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    with torch.autocast(hidden_TD.device.type, enabled=False):  # which would narrow the logits
        z = hidden_TD.to(dtype) @ weight_VD.to(dtype).T
    if bias_V is not None:
        z = z + bias_V.to(dtype)
    return transform_logits(z, temperature, softcap, logit_scale)


def transform_logits(z: Tensor, temperature: float | Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    """What scale, soft-cap and temperature, one number or (T,), make of raw logits (T, *) with their bias."""
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(z.dtype).unsqueeze(-1)
    return z / temperature


def keep_above(z: Tensor, threshold_T: Tensor, target_T: Tensor) -> Tensor:
    """Logits (T, V) with -inf for those below their row's threshold, but for the target's."""
    is_target = torch.arange(z.shape[-1], device=z.device) == target_T.unsqueeze(-1)
    return z.masked_fill((z < threshold_T.unsqueeze(-1)) & ~is_target, -torch.inf)


def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_sum_prob_squared: bool = False,
    return_top1: bool = False,
    return_mean_logits: bool = False,
    threshold_T: Tensor | None = None,
) -> LinearLogprob:
    """:func:`rlft_fast.ops.linear_logprob` with all (T, V) logits in memory, differentiable by autograd."""
    active = target_T != ignore_index
    hidden_TD = hidden_TD.where(active.unsqueeze(-1), 0)  # values of ignored rows must not reach a gradient
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().where(active, 1)
    z = softmax_logits(hidden_TD, weight_VD, bias_V, temperature, softcap, logit_scale)
    if threshold_T is not None:
        z = keep_above(z, threshold_T, target_T)
    result = _of_log_probabilities(torch.log_softmax(z, dim=-1), target_T.where(active, 0), active)
    return LinearLogprob(
        result.logprob,
        result.entropy if return_entropy else None,
        result.sum_prob_squared if return_sum_prob_squared else None,
        result.top1 if return_top1 else None,
        z.detach().mean(-1).where(active, 0) if return_mean_logits else None,
    )


def _of_log_probabilities(log_p: Tensor, target_T: Tensor, active: Tensor) -> LinearLogprob:
    """All statistics that log-probabilities (T, V) give, 0 in rows that are not active."""
    logprob = log_p.gather(-1, target_T.unsqueeze(-1)).squeeze(-1)
    # xlogy's convention 0 log 0 = 0, for logits of -inf
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    zero, detached = logprob.new_zeros(()), log_p.detach()
    return LinearLogprob(
        logprob.where(active, zero),
        entropy.where(active, zero),
        detached.exp().square().sum(-1).where(active, zero),
        (logprob.detach() >= detached.amax(-1)) & active,
    )


def support_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, support_TK: Tensor, *, ignore_index: int = -100, **options
) -> LinearLogprob:
    """:func:`rlft_fast.ops.support_logprob` over ids, with all (T, V) logits in memory and all its statistics.

    ``options`` are those of `softmax_logits`. With a threshold in place of ids, the op is `linear_logprob`.
    """
    active, vocab = target_T != ignore_index, weight_VD.shape[0]
    z = softmax_logits(hidden_TD.where(active.unsqueeze(-1), 0), weight_VD, **options)
    kept = torch.zeros(len(z), vocab + 1, dtype=torch.bool, device=z.device)
    kept = kept.scatter(1, support_TK.where(support_TK >= 0, vocab), True)[:, :vocab] & (z != -torch.inf)
    z = z.masked_fill(~kept, -torch.inf).masked_fill(~kept.any(-1, keepdim=True), 0)  # an empty support is not nan
    log_p = z.log_softmax(-1).masked_fill(~kept, -torch.inf)
    return _of_log_probabilities(log_p, target_T.where(active, 0), active)


def linear_logprob_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    loss_fn: LossFunction,
    *per_token: Tensor,
    ids_TK: Tensor | None = None,
    **options,
) -> LinearLogprobLoss:
    """:func:`rlft_fast.ops.linear_logprob_loss` by ordinary autograd. ``options`` are those of ``linear_logprob``."""
    ignore_index = options.get("ignore_index", -100)
    result = linear_logprob(hidden_TD, weight_VD, target_T, **options)
    if ids_TK is None:
        return sum_of_losses(result, target_T, loss_fn, per_token, ignore_index)
    ids_logprob = _ids_logprob(hidden_TD, weight_VD, target_T, ids_TK, **options)
    found = sum_of_losses(result, target_T, loss_fn, (ids_logprob, *per_token), ignore_index)
    return found._replace(ids_logprob=ids_logprob.detach())


def _ids_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ids_TK: Tensor, *, ignore_index: int = -100, **options
) -> Tensor:  # fmt: skip
    """(T, K) log-probabilities of ids under the softmax over the whole vocabulary, 0 in rows without a target."""
    active_T1 = (target_T != ignore_index).unsqueeze(-1)
    names = ("bias_V", "temperature", "softcap", "logit_scale")
    transform = {name: options[name] for name in names if name in options}
    if isinstance(temperature := transform.get("temperature"), Tensor):
        transform["temperature"] = temperature.detach().where(active_T1.squeeze(-1), 1)
    z = softmax_logits(hidden_TD.where(active_T1, 0), weight_VD, **transform)
    return z.log_softmax(-1).gather(-1, ids_TK.where(active_T1, 0)).where(active_T1, 0)


def sum_of_losses(
    result: LinearLogprob, target_T: Tensor, loss_fn: LossFunction, per_token: tuple[Tensor, ...], ignore_index: int
) -> LinearLogprobLoss:
    """The loss of statistics that are known for all tokens, differentiable by autograd."""
    logprob, entropy, *_ = result
    loss_T = loss_fn(logprob, entropy, *per_token)
    check_losses(loss_T, logprob)  # `where` would repeat a reduced loss for every token
    loss_T = loss_T.where(target_T != ignore_index, 0)
    return LinearLogprobLoss(loss_T.sum(), logprob.detach(), None if entropy is None else entropy.detach())
