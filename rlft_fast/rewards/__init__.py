"""Reward functions: loading them by name, calling them for a batch, and a few with checkable answers."""

from rlft_fast.rewards.functions import exact_match, last_number, reasoning_gym_reward
from rlft_fast.rewards.loading import load_reward
from rlft_fast.rewards.scoring import RewardError, RewardFunction, compute_rewards

__all__ = [
    "RewardError",
    "RewardFunction",
    "compute_rewards",
    "exact_match",
    "last_number",
    "load_reward",
    "reasoning_gym_reward",
]
