"""Advantages of single tokens: from rewards per token, with a critic, a greedy sample or the group as baseline."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_expand
from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.advantages.groups import Groups
from rlft_fast.rl.advantages.whitening import whiten
from rlft_fast.rl.aggregation import response_lengths
from rlft_fast.rl.methods import needs


class AdvantageReturn(NamedTuple):
    """Advantages, and the returns that the critic is trained towards; both (T,), zero outside the loss mask."""

    advantage_T: Tensor
    return_T: Tensor


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
        Advantages and returns in the wider dtype of `reward_T` and `value_T`.

    Raises:
        ValueError: Shapes do not match.
        TypeError: `loss_mask_T` is not bool.
    """
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    check_shapes(loss_mask_T, reward_T=reward_T, value_T=value_T)
    position = loss_mask_T.nonzero().squeeze(1)
    sequence = torch.repeat_interleave(length_B, output_size=len(position))
    # Sequences of all lengths start the backward recursion together. Step s holds the s-th response token from the end
    # of each sequence that is so long, the longest sequence first. Steps lie one behind the other, without gaps: beside
    # one long sequence, a matrix of steps and sequences would be many times the rollout.
    step = length_B.cumsum(0)[sequence] - 1 - torch.arange(len(position), device=position.device)
    width_L = torch.bincount(step)  # sequences of each step
    start_L = width_L.cumsum(0) - width_L
    place = start_L[step] + length_B.argsort(descending=True, stable=True).argsort()[sequence]
    dtype = torch.promote_types(reward_T.dtype, value_T.dtype)

    def by_step(x_T: Tensor) -> Tensor:
        x = x_T[position].to(dtype)
        return torch.empty_like(x).index_copy_(0, place, x)

    value = by_step(value_T)
    advantage = by_step(reward_T).sub_(value)
    next_value, starts = gamma * value, start_L.tolist()
    for later, start, width in zip(starts, starts[1:], width_L.tolist()[1:], strict=False):
        now = advantage.narrow(0, start, width).add_(next_value.narrow(0, later, width))
        now.add_(advantage.narrow(0, later, width), alpha=gamma * lam)

    advantage_T, return_T = (torch.zeros_like(value_T, dtype=dtype) for _ in range(2))
    advantage_T[position] = advantage[place]
    return_T[position] = advantage.add_(value)[place]
    return AdvantageReturn(advantage_T, return_T)


def whitened_gae(
    reward_T: Tensor, value_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> AdvantageReturn:
    """`gae` with its advantages whitened over the batch, as PPO uses it; the returns stay as they are."""
    advantage_T, return_T = gae(reward_T, value_T, loss_mask_T, cu_seqlens, gamma=gamma, lam=lam)
    return AdvantageReturn(whiten(advantage_T, loss_mask_T), return_T)


def discounted_returns(reward_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{s >= t} gamma^(s - t)·r_s over the response tokens of a sequence; (T,), zero outside the mask.

    Arguments and errors as in `gae`.
    """
    return gae(reward_T, torch.zeros_like(reward_T), loss_mask_T, cu_seqlens, gamma=gamma, lam=1.0).advantage_T


def reinforce_plus_plus(reward_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Discounted returns, whitened over the batch (REINFORCE++, arXiv 2501.03262).

    The paper has the divergence from the reference in the reward (k1). Arguments and errors as in `gae`.

    Returns:
        (T,), zero outside the mask.
    """
    return whiten(discounted_returns(reward_T, loss_mask_T, cu_seqlens, gamma=gamma), loss_mask_T)


@needs(greedy=True)
def remax_advantage(reward_T: Tensor, baseline_B: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A_t = Σ_{s >= t} r_s - R(greedy answer to the same prompt) (ReMax, arXiv 2310.10505).

    Args:
        reward_T: (T,) reward of the action taken at each position.
        baseline_B: (B,) reward of the greedy answer to each sequence's prompt.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.

    Returns:
        (T,), zero outside the mask.

    Raises:
        ValueError: Shapes do not match.
        TypeError: `loss_mask_T` is not bool.
    """
    check_shapes(response_lengths(loss_mask_T, cu_seqlens), baseline_B=baseline_B)
    baseline_T = segment_expand(baseline_B, cu_seqlens, num_tokens=len(loss_mask_T))
    return (discounted_returns(reward_T, loss_mask_T, cu_seqlens) - baseline_T) * loss_mask_T


def no_advantage(reward_B: Tensor) -> Tensor:
    """0 for every sequence: rewards are measured, and teach nothing; (B,) as `reward_B`."""
    return torch.zeros_like(reward_B)


@torch.no_grad()
def distillation_advantage(old_logprob_T: Tensor, teacher_logprob_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Sampled reverse KL divergence from a teacher, as an advantage: A_t = log π_teacher(t) - log π_old(t).

    The mean over tokens sampled by π_old is -KL(π_old ‖ π_teacher), and the policy gradient with A_t is the gradient of
    the divergence of each token's distribution: the later tokens of a sequence do not count for a token (the
    single-step term of MiniLLM, arXiv 2306.08543; on-policy distillation, arXiv 2306.13649).

    Args:
        old_logprob_T: (T,) log-probability of the sampled token under the policy that starts the update.
        teacher_logprob_T: (T,) the same under the teacher.
        loss_mask_T: (T,) bool, True at response tokens.

    Returns:
        (T,), zero outside the mask.

    Raises:
        ValueError: Shapes do not match.
    """
    check_shapes(loss_mask_T, old_logprob_T=old_logprob_T, teacher_logprob_T=teacher_logprob_T)
    return (teacher_logprob_T - old_logprob_T).where(loss_mask_T, 0.0)


@torch.no_grad()
def optimal_token_advantage(
    reward_T: Tensor,
    old_logprob_T: Tensor,
    sum_prob_squared_T: Tensor,
    group_B: Tensor,
    loss_mask_T: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Token-wise baseline of least variance: each return weighs by the squared gradient of its prefix.

        A_t = G_t - Σ_g G_t·W_t / Σ_g W_t,    W_t = Σ_{j <= t} (1 - 2·π_j + Σ_v π_v²)

    t counts response tokens, the sums run over the samples of the prompt that are at least that long, and π_j is the
    probability of the sampled token: 1 - 2·π_j + Σ_v π_v² is the squared norm of the gradient of log π_j in the logits.
    A token that no other sample of its prompt reaches has advantage 0.

    Args:
        reward_T: (T,) reward of the action taken at each position.
        old_logprob_T: (T,) log-probability of the sampled token.
        sum_prob_squared_T: (T,) Σ_v π_v² of the distribution that it was sampled from.
        group_B: (B,) integer id of each sequence's prompt.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.

    Returns:
        (T,), zero outside the mask.

    Raises:
        ValueError: Shapes do not match.
        TypeError: `loss_mask_T` is not bool.
    """
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    check_shapes(loss_mask_T, reward_T=reward_T, old_logprob_T=old_logprob_T, sum_prob_squared_T=sum_prob_squared_T)
    check_shapes(length_B, group_B=group_B)
    position = loss_mask_T.nonzero().squeeze(1)
    sequence = torch.repeat_interleave(length_B, output_size=len(position))
    start_B = length_B.cumsum(0) - length_B
    step = torch.arange(len(position), device=position.device) - start_B[sequence]

    probability = old_logprob_T[position].double().exp()
    squared_norm = 1.0 - 2.0 * probability + sum_prob_squared_T[position].double()
    total = squared_norm.cumsum(0)
    # The sums run on through all sequences: what came before a sequence is taken off again.
    weight = (total - (total - squared_norm)[start_B[sequence]]).clamp(min=0.0)
    returns = discounted_returns(reward_T.double(), loss_mask_T, cu_seqlens)[position]

    _, group_index_B = group_B.unique(return_inverse=True)
    num_steps = int(length_B.max()) if len(position) else 0
    cell = group_index_B[sequence] * num_steps + step  # tokens with the same baseline
    advantage_T = torch.zeros_like(reward_T)
    advantage_T[position] = Groups(cell, cell.bincount()).centered(returns, weight).to(reward_T.dtype)
    return advantage_T
