"""Choosing tokens by figures of the whole batch: high entropy, and high covariance of log-probability and advantage.

The figures are those of the policy that starts the update, so that the choice does not depend on micro-batches.
"""

import torch
from torch import Tensor

from rlft_fast.rl._checks import check_shapes


def high_entropy_tokens(entropy_T: Tensor, loss_mask_T: Tensor, share: float) -> Tensor:
    """The response tokens where the policy is least certain (arXiv 2506.01939 keeps a share of 0.2).

    Args:
        entropy_T: (T,) entropy of the policy.
        loss_mask_T: (T,) bool, True at response tokens.
        share: of the response tokens to choose, in (0, 1]; ties are all chosen.

    Returns:
        (T,) bool.

    Raises:
        ValueError: Shapes differ, or the share is out of range.
    """
    check_shapes(loss_mask_T, entropy_T=entropy_T)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"the share of high-entropy tokens is {share}, expected a number in (0, 1]")
    active = entropy_T[loss_mask_T]
    if not len(active):
        return loss_mask_T.clone()
    count = max(round(share * len(active)), 1)
    return loss_mask_T & (entropy_T >= active.topk(count).values[-1])


def kl_cov_tokens(old_logprob_T: Tensor, advantage_T: Tensor, loss_mask_T: Tensor, *, share: float = 2e-4) -> Tensor:
    """The response tokens with the highest covariance, for `kl_cov`: at least one (arXiv 2505.22617).

    Args:
        old_logprob_T: (T,) log-probability of the sampled tokens.
        advantage_T: (T,) advantages.
        loss_mask_T: (T,) bool, True at response tokens.
        share: of the response tokens to choose.

    Returns:
        (T,) float32, 1 at the chosen tokens, else 0.

    Raises:
        ValueError: Shapes differ.
    """
    covariance = _covariance(old_logprob_T, advantage_T, loss_mask_T)
    chosen = covariance.topk(min(max(round(share * len(covariance)), 1), len(covariance))).indices
    return _at(chosen, loss_mask_T)


def clip_cov_tokens(
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    loss_mask_T: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """A random choice of the response tokens with a covariance in [low, high], for `clip_cov` (arXiv 2505.22617).

    Args:
        old_logprob_T: (T,) log-probability of the sampled tokens.
        advantage_T: (T,) advantages.
        loss_mask_T: (T,) bool, True at response tokens.
        share: of the response tokens to choose, as far as there are so many; at least one.
        low: lowest covariance.
        high: highest covariance.
        seed: of the choice.

    Returns:
        (T,) float32, 1 at the chosen tokens, else 0.

    Raises:
        ValueError: Shapes differ.
    """
    covariance = _covariance(old_logprob_T, advantage_T, loss_mask_T)
    candidates = ((covariance >= low) & (covariance <= high)).nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _at(candidates[order[: max(round(share * len(covariance)), 1)]], loss_mask_T)


def _covariance(old_logprob_T: Tensor, advantage_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """(A - mean A)·(log π - mean log π) of each response token, without the others."""
    check_shapes(loss_mask_T, old_logprob_T=old_logprob_T, advantage_T=advantage_T)
    logprob, advantage = old_logprob_T[loss_mask_T].double(), advantage_T[loss_mask_T].double()
    return advantage.sub_(advantage.mean()).mul_(logprob.sub_(logprob.mean()))


def _at(chosen: Tensor, loss_mask_T: Tensor) -> Tensor:
    """1 at the chosen of the response tokens, 0 elsewhere."""
    selected_T = torch.zeros(len(loss_mask_T))
    selected_T[loss_mask_T.nonzero().squeeze(1)[chosen]] = 1.0
    return selected_T
