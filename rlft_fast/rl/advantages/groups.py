"""Advantages of whole sequences relative to the other samples of their prompt: one number per sequence.

The group's mean is taken relative to its lowest reward, so that a group of equal rewards, and so also a group of one,
has advantages of exactly 0 (before any whitening): never rounding noise divided by eps, and never the bare reward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_expand
from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.advantages.whitening import whiten
from rlft_fast.rl.aggregation import response_lengths


@torch.no_grad()
def grpo_advantage(reward_B: Tensor, group_B: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage (GRPO, arXiv 2402.03300): A_i = (R_i - mean_g) / (std_g + eps).

    std_g is the sample standard deviation (n - 1), as `torch.std` and the common trainers compute it. With
    `scale_by_std=False`, A_i = R_i - mean_g, see `dr_grpo_advantage`.

    Args:
        reward_B: (B,) floating-point reward of each sequence.
        group_B: (B,) integer id of each sequence's prompt; any values, in any order.
        scale_by_std: Divide by the standard deviation of the group.
        eps: Added to the standard deviation.

    Returns:
        (B,) in the dtype of `reward_B`.

    Raises:
        ValueError: Shapes differ, or a reward is NaN or infinite (it would spread to its whole group).
        TypeError: `reward_B` is not a floating-point tensor, or `group_B` not an integer one.
    """
    groups = Groups.of(reward_B, group_B)
    centered_B = groups.centered(reward_B)
    if not scale_by_std:
        return centered_B.to(reward_B.dtype)
    std_G = (groups.sum(centered_B.square()) / (groups.size_G - 1).clamp(min=1)).sqrt()
    return (centered_B / (std_G + eps)[groups.index_B]).to(reward_B.dtype)


def dr_grpo_advantage(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A_i = R_i - mean_g (Dr. GRPO, arXiv 2503.20783), which does not favour easy or hard groups.

    The paper divides the loss by a constant: `aggregation="constant"`. Arguments and errors as in `grpo_advantage`.
    """
    return grpo_advantage(reward_B, group_B, scale_by_std=False)


@torch.no_grad()
def rloo_advantage(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Leave-one-out baseline (RLOO, arXiv 2402.14740): A_i = R_i - mean of the k - 1 others = k/(k-1)·(R_i - mean_g).

    Arguments and errors as in `grpo_advantage`.
    """
    groups = Groups.of(reward_B, group_B)
    factor_G = groups.size_G / (groups.size_G - 1).clamp(min=1)
    return (groups.centered(reward_B) * factor_G[groups.index_B]).to(reward_B.dtype)


@torch.no_grad()
def opo_advantage(reward_B: Tensor, group_B: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Length-weighted baseline (OPO, arXiv 2505.23585): A_i = R_i - Σ_g n_j·R_j / Σ_g n_j, n response tokens.

    Args:
        reward_B: (B,) floating-point reward of each sequence.
        group_B: (B,) integer id of each sequence's prompt.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.

    Returns:
        (B,) in the dtype of `reward_B`.

    Raises:
        ValueError: As in `grpo_advantage`.
        TypeError: As in `grpo_advantage`, or `loss_mask_T` is not bool.
    """
    groups = Groups.of(reward_B, group_B)
    return groups.centered(reward_B, response_lengths(loss_mask_T, cu_seqlens)).to(reward_B.dtype)


@torch.no_grad()
def gpg_advantage(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A_i = B/B'·(R_i - mean_g), B' the number of sequences in groups with unequal rewards (GPG, arXiv 2504.02546).

    The factor makes up for the groups without a signal, which the mean over the batch counts. The paper's loss is plain
    policy gradient, `policy_loss: reinforce`. (Some trainers count rewards that are not 0 instead, which is not
    invariant to a constant added to all rewards.) Arguments and errors as in `grpo_advantage`.
    """
    groups = Groups.of(reward_B, group_B)
    centered_B = groups.centered(reward_B)
    has_signal_B = (groups.sum(centered_B.abs()) > 0)[groups.index_B]
    factor = len(reward_B) / has_signal_B.sum().clamp(min=1)
    return (factor * centered_B).to(reward_B.dtype)


def reinforce_plus_plus_baseline(reward_B: Tensor, group_B: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """R_i - mean_g at every response token, whitened over the batch (REINFORCE++-baseline, arXiv 2501.03262).

    Arguments and errors as in `opo_advantage`.

    Returns:
        (T,), zero outside the mask.
    """
    centered_B = grpo_advantage(reward_B, group_B, scale_by_std=False)
    return whiten(segment_expand(centered_B, cu_seqlens, num_tokens=len(loss_mask_T)), loss_mask_T)


class Groups(NamedTuple):
    """Groups of sequences, or of tokens, numbered 0 to G - 1."""

    index_B: Tensor
    size_G: Tensor

    @classmethod
    def of(cls, reward_B: Tensor, group_B: Tensor) -> "Groups":
        check_rewards(reward_B, group_B)
        unique_G, index_B = group_B.unique(return_inverse=True)
        return cls(index_B, torch.bincount(index_B, minlength=len(unique_G)).double())

    def sum(self, values_B: Tensor) -> Tensor:
        return values_B.new_zeros(len(self.size_G)).index_add_(0, self.index_B, values_B)

    def centered(self, reward_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """(B,) float64 rewards minus the (weighted) mean of their group."""
        reward64_B = reward_B.double()
        lowest_G = reward64_B.new_full((len(self.size_G),), torch.inf)
        lowest_G.scatter_reduce_(0, self.index_B, reward64_B, "amin")
        shifted_B = reward64_B - lowest_G[self.index_B]
        weight_B = torch.ones_like(shifted_B) if weight_B is None else weight_B.double()
        total_G = self.sum(weight_B)
        mean_G = self.sum(weight_B * shifted_B) / torch.where(total_G > 0, total_G, 1.0)
        return shifted_B - mean_G[self.index_B]


def check_rewards(reward_B: Tensor, group_B: Tensor) -> None:
    """Raises ValueError or TypeError where rewards or groups cannot be used."""
    check_shapes(reward_B, group_B=group_B)
    if not reward_B.is_floating_point():
        raise TypeError(f"reward_B has dtype {reward_B.dtype}, expected floating point: convert it with .float()")
    if group_B.dtype.is_floating_point or group_B.dtype == torch.bool:
        raise TypeError(f"group_B has dtype {group_B.dtype}, expected integer ids such as torch.int64")
    if not reward_B.isfinite().all():
        bad = (~reward_B.isfinite()).nonzero().squeeze(1).tolist()
        raise ValueError(f"reward_B is not finite for sequences {bad[:8]}: leave these samples out of the batch")
