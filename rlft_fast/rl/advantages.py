"""Advantage estimators: GRPO over groups of sequences, GAE over tokens, and whitening."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.aggregation import response_lengths


class AdvantageReturn(NamedTuple):
    """Advantages, and the returns that the critic is trained towards; both (T,), zero outside the loss mask."""

    advantage_T: Tensor
    return_T: Tensor


@torch.no_grad()
def grpo_advantage(reward_B: Tensor, group_B: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage (GRPO, arXiv 2402.03300): A_i = (R_i - mean_g) / (std_g + eps).

    std_g is the sample standard deviation (n - 1), as `torch.std` and the common trainers compute it. With
    `scale_by_std=False`, A_i = R_i - mean_g (Dr. GRPO, arXiv 2503.20783), which does not favour easy or hard groups.

    A group whose rewards are all equal, and so also a group of one, has no relative signal: its advantages are
    exactly 0, never rounding noise divided by eps, and never the bare reward.

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
    check_shapes(reward_B, group_B=group_B)
    if not reward_B.is_floating_point():
        raise TypeError(f"reward_B has dtype {reward_B.dtype}, expected floating point: convert it with .float()")
    if group_B.dtype.is_floating_point or group_B.dtype == torch.bool:
        raise TypeError(f"group_B has dtype {group_B.dtype}, expected integer ids such as torch.int64")
    if not reward_B.isfinite().all():
        bad = (~reward_B.isfinite()).nonzero().squeeze(1).tolist()
        raise ValueError(f"reward_B is not finite for sequences {bad[:8]}: leave these samples out of the batch")
    unique_G, index_B = group_B.unique(return_inverse=True)
    num_groups = len(unique_G)

    def group_sum(values_B: Tensor) -> Tensor:
        return values_B.new_zeros(num_groups).index_add_(0, index_B, values_B)

    reward64_B = reward_B.double()
    lowest_G = reward64_B.new_full((num_groups,), torch.inf).scatter_reduce_(0, index_B, reward64_B, "amin")
    # Relative to the group's lowest reward, equal rewards are all exactly 0, and so are their mean and deviation.
    shifted_B = reward64_B - lowest_G[index_B]
    size_G = group_sum(torch.ones_like(shifted_B))
    centered_B = shifted_B - (group_sum(shifted_B) / size_G)[index_B]
    if not scale_by_std:
        return centered_B.to(reward_B.dtype)
    std_G = (group_sum(centered_B.square()) / (size_G - 1).clamp(min=1)).sqrt()
    return (centered_B / (std_G + eps)[index_B]).to(reward_B.dtype)


@torch.no_grad()
def gae(
    reward_T: Tensor, value_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> AdvantageReturn:
    """Generalised advantage estimation (arXiv 1506.02438) on packed sequences.

    Over the response tokens of a sequence

        δ_t = r_t + gamma·V_{t+1} - V_t,    A_t = δ_t + gamma·lam·A_{t+1},    return_t = A_t + V_t

    with V = A = 0 after the last one. "t + 1" is the next *response* token: prompts, tool output and other positions
    outside the mask are stepped over, and neither their rewards nor their values are read.

    Args:
        reward_T: (T,) reward of the action taken at each position.
        value_T: (T,) value of the state before that action.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        gamma: Discount.
        lam: The λ of GAE: 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages and returns in the dtype of `value_T`.

    Raises:
        ValueError: Shapes do not match.
        TypeError: `loss_mask_T` is not bool.
    """
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    check_shapes(loss_mask_T, reward_T=reward_T, value_T=value_T)
    position = loss_mask_T.nonzero().squeeze(1)
    sequence = torch.repeat_interleave(length_B, output_size=len(position))
    # Row s of a step matrix holds the s-th response token from the end of every sequence, so that sequences of any
    # length start the backward recursion together in row 0.
    step = length_B.cumsum(0)[sequence] - 1 - torch.arange(len(position), device=position.device)
    num_steps = int(length_B.max()) if len(position) else 0
    reward_SB = value_T.new_zeros(num_steps, len(length_B))
    value_SB = torch.zeros_like(reward_SB)
    reward_SB[step, sequence] = reward_T[position].to(value_T.dtype)
    value_SB[step, sequence] = value_T[position]

    advantage_SB = reward_SB - value_SB
    advantage_SB[1:] += gamma * value_SB[:-1]
    for s in range(1, num_steps):
        advantage_SB[s].add_(advantage_SB[s - 1], alpha=gamma * lam)

    advantage_T, return_T = torch.zeros_like(value_T), torch.zeros_like(value_T)
    advantage_T[position] = advantage_SB[step, sequence]
    return_T[position] = (advantage_SB + value_SB)[step, sequence]
    return AdvantageReturn(advantage_T, return_T)


@torch.no_grad()
def whiten(values_T: Tensor, mask_T: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Shifts and scales the active values to mean 0 and sample standard deviation 1: (v - mean) / (std + eps).

    Args:
        values_T: (T,) values, for example advantages.
        mask_T: (T,) bool, the values that count.
        eps: Added to the standard deviation.

    Returns:
        (T,) in the dtype of `values_T`, zero outside the mask; all zeros where fewer than two values are active or
        all active values are equal, because there is no scale to speak of.

    Raises:
        ValueError: Shapes differ.
        TypeError: `mask_T` is not bool.
    """
    check_shapes(values_T, mask_T=mask_T)
    if mask_T.dtype != torch.bool:
        raise TypeError(f"mask_T has dtype {mask_T.dtype}, expected torch.bool: convert it with .bool()")
    white_T = torch.zeros_like(values_T)
    active = values_T[mask_T].double()
    if len(active) < 2:
        return white_T
    # Relative to the first value, equal values are exactly 0 and stay 0 (no rounding noise divided by eps).
    active -= active[0].clone()
    white_T[mask_T] = ((active - active.mean()) / (active.std() + eps)).to(values_T.dtype)
    return white_T
