"""KL divergence between the policy and its reference: estimators, and the KL penalty as a reward."""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_sum
from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.aggregation import response_lengths

KLEstimator = Literal["k1", "k2", "k3", "k3+", "unbiased"]

# exp(20) = 4.9e8 is far beyond any ratio worth learning from, and its square still fits in fp32: one token whose
# log-probabilities are damaged then cannot turn the whole sum into inf or NaN.
MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprob_T: Tensor, ref_logprob_T: Tensor, kind: KLEstimator, old_logprob_T: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from tokens sampled by the policy.

    With x = log π_ref - log π (Schulman, http://joschu.net/blog/kl-approx.html):

    - k1 = -x: unbiased, high variance; its gradient has zero mean, so it suits a reward and not a loss.
    - k2 = x²/2: biased, low variance.
    - k3 = eˣ - 1 - x: unbiased, non-negative, low variance; its gradient is not that of the divergence.
    - k3+: the value of k3 with the gradient of k2, whose mean is the gradient of the divergence where the tokens were
      sampled by the policy itself.
    - unbiased: π/π_old·k3 (arXiv 2512.02556), whose value and gradient are unbiased also where the tokens were sampled
      by π_old.

    In k3, x is clamped at +20 in both terms: clamping the exponent alone would leave -x to push the policy further
    away. Negative x needs no clamp (eˣ → 0), so its gradient stays exact.

    Args:
        logprob_T: (T,) log-probability under the policy.
        ref_logprob_T: (T,) log-probability under the reference.
        kind: one of `KLEstimator`.
        old_logprob_T: (T,) log-probability under the policy that sampled the tokens, read by "unbiased" alone; None:
            the policy itself has sampled them.

    Returns:
        (T,) estimate, differentiable in both log-probabilities.

    Raises:
        ValueError: Unknown estimator, or the shapes differ.
    """
    check_kl_estimator(kind)
    check_shapes(logprob_T, ref_logprob_T=ref_logprob_T)
    if kind == "k1":
        return logprob_T - ref_logprob_T
    if kind == "k2":
        return _k2(logprob_T, ref_logprob_T)
    x_T = (ref_logprob_T - logprob_T).clamp(max=MAX_LOG_RATIO)
    k3_T = torch.expm1(x_T) - x_T
    if kind == "k3+":
        k2_T = _k2(logprob_T, ref_logprob_T)
        return k3_T.detach() + (k2_T - k2_T.detach())
    if kind == "unbiased":
        old_logprob_T = logprob_T.detach() if old_logprob_T is None else old_logprob_T
        check_shapes(logprob_T, old_logprob_T=old_logprob_T)
        return policy_ratio(logprob_T, old_logprob_T) * k3_T
    return k3_T


def _k2(logprob_T: Tensor, ref_logprob_T: Tensor) -> Tensor:
    return 0.5 * (logprob_T - ref_logprob_T).square()


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """The ratio of a log-ratio that is clamped at ±20."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_ratio(logprob_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    """π/π_old, exactly 1 where the two are the same number; see `bounded_exp`."""
    return bounded_exp(logprob_T - old_logprob_T)


@torch.no_grad()
def reward_with_kl(
    reward_B: Tensor, kl_T: Tensor | None, loss_mask_T: Tensor, cu_seqlens: Tensor, kl_coef: float,
    turn_reward_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Per-token reward with the KL penalty in it (arXiv 1909.08593, 2203.02155).

    r_t = -kl_coef·kl_t at every response token, plus the reward of each turn at its last token, plus what is left of
    the reward of the sequence at its last response token.

    Args:
        reward_B: (B,) reward of each sequence.
        kl_T: (T,) KL estimate at each position; ignored outside the mask. None: there is no penalty.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        kl_coef: Weight of the penalty.
        turn_reward_T: (T,) the parts of `reward_B` that single turns have earned, each at its turn's last token;
            ignored outside the mask. None: the whole of it stands at the end.

    Returns:
        (T,) in the wider dtype of `reward_B` and `kl_T`, zero outside the mask. A sequence without response tokens has
        no action to reward: its `reward_B` appears nowhere.

    Raises:
        ValueError: Shapes do not match.
        TypeError: `loss_mask_T` is not bool.
    """
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    check_shapes(length_B, reward_B=reward_B)
    if kl_T is None:
        reward_T = torch.zeros(len(loss_mask_T), dtype=reward_B.dtype, device=reward_B.device)
    else:
        check_shapes(loss_mask_T, kl_T=kl_T)
        reward_T = (-kl_coef * kl_T).masked_fill_(~loss_mask_T, 0.0)
        reward_T = reward_T.to(torch.promote_types(reward_B.dtype, kl_T.dtype))
    has_response_B = length_B > 0
    end_B = cu_seqlens[1:].long()
    goes_on_T = loss_mask_T.roll(-1).index_fill_(0, end_B[has_response_B] - 1, False)
    run_ends = (loss_mask_T & ~goes_on_T).nonzero().squeeze(1)  # far fewer than response tokens
    last_index = run_ends[torch.searchsorted(run_ends, end_B[has_response_B]) - 1]
    if turn_reward_T is not None:
        check_shapes(loss_mask_T, turn_reward_T=turn_reward_T)
        earlier_T = turn_reward_T.masked_fill(~loss_mask_T, 0.0).index_fill_(0, last_index, 0.0)
        reward_T += earlier_T
        reward_B = reward_B - segment_sum(earlier_T, cu_seqlens)
    reward_T[last_index] += reward_B[has_response_B].to(reward_T.dtype)
    return reward_T


def check_kl_estimator(kind: str) -> None:
    """Raises ValueError when `kind` is not a KL estimator."""
    if kind not in get_args(KLEstimator):
        raise ValueError(f"KL estimator is {kind!r}, expected one of {', '.join(get_args(KLEstimator))}")
