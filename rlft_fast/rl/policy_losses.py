"""Policy losses by name: plain functions of packed per-token tensors that return the loss of each token.

A function's parameters name what it reads: `logprob_T` (with gradient), `entropy_T`, fields of the `Batch`, and
`sequence_mean`, which asks for whole sequences: a function from (T,) to the detached mean over each token's sequence,
(T,) again. Its keyword-only parameters are its options. Weights over tokens and sequences are not its business.

Notation: d = log π - log π_old, r = exp(d), A the advantage, sg stops the gradient. Every loss is proportional to |A|
(`kl_cov` apart from its penalty), so a factor on the advantage is a factor on the loss: corrections and token masks are
applied that way.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlft_fast.rl.kl import MAX_LOG_RATIO, bounded_exp, policy_ratio
from rlft_fast.rl.methods import needs
from rlft_fast.rl.token_choice import clip_cov_tokens, kl_cov_tokens

PolicyLossFunction = Callable[..., Tensor]
SequenceMean = Callable[[Tensor], Tensor]


@needs(advantage=True)
def ppo(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) (PPO, arXiv 1707.06347; apart from each other: 2503.14476)."""
    return _clipped(policy_ratio(logprob_T, old_logprob_T), advantage_T, clip_low, clip_high)


@needs(advantage=True)
def dual_clip(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 3.0,
) -> Tensor:
    """`ppo`, but at most -max_ratio·A where A < 0 (arXiv 1912.09729)."""
    _check(max_ratio > 1.0, "max_ratio", max_ratio, "a number > 1")
    loss_T = ppo(logprob_T, old_logprob_T, advantage_T, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantage_T < 0, torch.minimum(loss_T, -max_ratio * advantage_T), loss_T)


@needs(advantage=True)
def two_sided(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 4.0,
) -> Tensor:
    """-min(min(r, max_ratio)·A, clip(r)·A) (INTELLECT-2, arXiv 2505.07291).

    For max_ratio > 1 + clip_high that is `dual_clip`, by the name and default of its paper.
    """
    _check(max_ratio > 1.0 + clip_high, "max_ratio", max_ratio, "more than 1 + clip_high")
    return dual_clip(logprob_T, old_logprob_T, advantage_T, clip_low=clip_low, clip_high=clip_high, max_ratio=max_ratio)


@needs(advantage=True)
def gspo(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    sequence_mean: SequenceMean,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """`ppo` with the ratio of the sequence, s = exp(mean d) (GSPO, arXiv 2507.18071, in its token form).

    Each token carries s with the gradient of its own log π, which for equal advantages in a sequence is the sequence's
    loss. The paper takes the mean over sequences: `aggregation: sequence-mean`.
    """
    mean_T = sequence_mean(logprob_T - old_logprob_T)
    log_ratio_T = mean_T + (logprob_T - logprob_T.detach())
    return _clipped(bounded_exp(log_ratio_T), advantage_T, clip_low, clip_high)


@needs(advantage=True)
def gmpo(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    sequence_mean: SequenceMean,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """-A·exp(mean e), e = sgn(A)·min(sgn(A)·d, sgn(A)·clamp(d, -clip_low, clip_high)) (GMPO, arXiv 2507.20673).

    The geometric mean of clipped ratios, in token form like `gspo`; the bounds are on the log-ratio. The paper takes
    the mean over sequences: `aggregation: sequence-mean`.
    """
    log_ratio_T = logprob_T - old_logprob_T
    clamped_T = log_ratio_T.clamp(-clip_low, clip_high)
    sign_T = torch.where(advantage_T < 0, -1.0, 1.0)
    clipped_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clamped_T)
    mean_T = sequence_mean(clipped_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return -advantage_T * (mean_T + (clipped_T - clipped_T.detach())).exp()


def cispo_clipped(logprob_T: Tensor, old_logprob_T: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Tensor:
    """(T,) bool, True where `cispo` bounds the ratio."""
    ratio_T = policy_ratio(logprob_T, old_logprob_T)
    return (ratio_T < 1.0 - clip_low) | (ratio_T > 1.0 + clip_high)


@needs(advantage=True, clipped=cispo_clipped)
def cispo(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high))·A·log π (CISPO, arXiv 2506.13585): no token loses its gradient.

    The defaults bound r at 5 from above alone (ScaleRL, arXiv 2510.13786).
    """
    ratio_T = policy_ratio(logprob_T, old_logprob_T).detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -ratio_T * advantage_T * logprob_T


@needs(advantage=True)
def sapo(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """-A·(4/τ)·sigmoid(τ·(r - 1)), τ by the sign of A (SAPO, arXiv 2511.20347): a soft gate instead of a clip."""
    for name, value in (
        ("temperature_positive", temperature_positive), ("temperature_negative", temperature_negative)
    ):  # fmt: skip
        _check(value > 0.0, name, value, "a number > 0")
    temperature_T = torch.where(advantage_T > 0, temperature_positive, temperature_negative)
    gate_T = torch.sigmoid(temperature_T * (policy_ratio(logprob_T, old_logprob_T) - 1.0))
    return -advantage_T * 4.0 / temperature_T * gate_T


@needs(advantage=True)
def dppo_tv(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
) -> Tensor:
    """-A·sg(min(r, max_ratio))·log π·keep, keep = π - π_old <= clip_high (A > 0), >= -clip_low (A < 0).

    The trust region is in total variation: probabilities, not ratios (DPPO, arXiv 2602.04879).
    """
    difference_T = logprob_T.detach().exp() - old_logprob_T.exp()
    keep_T = torch.where(advantage_T > 0, difference_T <= clip_high, difference_T >= -clip_low)
    ratio_T = policy_ratio(logprob_T, old_logprob_T).detach().clamp(max=max_ratio)
    return torch.where(keep_T, -advantage_T * ratio_T * logprob_T, 0.0)


@needs(advantage=True)
def reinforce(logprob_T: Tensor, advantage_T: Tensor) -> Tensor:
    """-A·log π: plain policy gradient, right where each rollout is used for one step (GPG, arXiv 2504.02546)."""
    return -advantage_T * logprob_T


@needs(advantage=True, selection=clip_cov_tokens)
def clip_cov(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    selected_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """`ppo` without the tokens that `clip_cov_tokens` selects (arXiv 2505.22617)."""
    loss_T = ppo(logprob_T, old_logprob_T, advantage_T, clip_low=clip_low, clip_high=clip_high)
    return torch.where(selected_T > 0, 0.0, loss_T)


@needs(selection=kl_cov_tokens)
def kl_cov(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, selected_T: Tensor, *, penalty: float = 1.0
) -> Tensor:
    """-r·A, plus penalty·|d| at the tokens that `kl_cov_tokens` selects (arXiv 2505.22617).

    At d = 0 the penalty has a kink and no gradient. In the first step of an update d is 0 but for rounding, whose sign
    means nothing: `PolicyLoss.on_policy` makes d exactly 0 there.
    """
    _check(penalty >= 0.0, "penalty", penalty, "a number >= 0")
    ratio_T = policy_ratio(logprob_T, old_logprob_T)
    return -ratio_T * advantage_T + penalty * selected_T * (logprob_T - old_logprob_T).abs()


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    loss.__name__.replace("_", "-"): loss
    for loss in (ppo, dual_clip, two_sided, gspo, gmpo, cispo, sapo, dppo_tv, reinforce, clip_cov, kl_cov)
}


def _clipped(ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def _check(condition: bool, name: str, value: float, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}, expected {expected}")
