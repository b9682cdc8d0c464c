"""Reinforcement learning as pure tensor maths: advantages, KL, per-token losses and their weights.

Everything works on packed, position-aligned tensors (see `rlft_fast.data.Batch`) and never communicates.
"""

from rlft_fast.rl.advantages import AdvantageReturn, gae, grpo_advantage, whiten
from rlft_fast.rl.aggregation import Aggregation, loss_weights, response_lengths
from rlft_fast.rl.kl import KLEstimator, kl_estimate, reward_with_kl
from rlft_fast.rl.losses import PolicyLoss, ValueLoss, explained_variance

__all__ = [
    "AdvantageReturn",
    "Aggregation",
    "KLEstimator",
    "PolicyLoss",
    "ValueLoss",
    "explained_variance",
    "gae",
    "grpo_advantage",
    "kl_estimate",
    "loss_weights",
    "response_lengths",
    "reward_with_kl",
    "whiten",
]
