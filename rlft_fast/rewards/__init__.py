"""Reward functions: loading by name, scoring a batch, worker processes, and functions for checkable answers."""

from rlft_fast.rewards.functions import (
    exact_match,
    last_number,
    reasoning_gym_reward,
    regex_match,
    response_length,
)
from rlft_fast.rewards.isolated import IsolatedReward
from rlft_fast.rewards.judged import LanguageModelJudge
from rlft_fast.rewards.loading import load_reward
from rlft_fast.rewards.mathematics import math_verify
from rlft_fast.rewards.scoring import (
    RewardError,
    RewardFunction,
    check_columns,
    compute_rewards,
    warn_of_missing_values,
)
from rlft_fast.rewards.served import ServerReward
from rlft_fast.rewards.weighted import Parts, WeightedRewards, overlong_penalty, weighted_sum

__all__ = [
    "IsolatedReward",
    "LanguageModelJudge",
    "Parts",
    "RewardError",
    "RewardFunction",
    "ServerReward",
    "WeightedRewards",
    "check_columns",
    "compute_rewards",
    "exact_match",
    "last_number",
    "load_reward",
    "math_verify",
    "overlong_penalty",
    "reasoning_gym_reward",
    "regex_match",
    "response_length",
    "warn_of_missing_values",
    "weighted_sum",
]
