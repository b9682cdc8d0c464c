"""Advantages.

estimators  the methods by name
groups      from the returns of a prompt's samples
tokens      from the rewards of tokens
whitening   zero mean and unit variance
"""

from rlft_fast.rl.advantages.estimators import ADVANTAGES, AdvantageError, AdvantageFunction, compute_advantages
from rlft_fast.rl.advantages.groups import grpo_advantage
from rlft_fast.rl.advantages.tokens import AdvantageReturn, discounted_returns, distillation_advantage, gae
from rlft_fast.rl.advantages.whitening import whiten

__all__ = [
    "ADVANTAGES",
    "AdvantageError",
    "AdvantageFunction",
    "AdvantageReturn",
    "compute_advantages",
    "discounted_returns",
    "distillation_advantage",
    "gae",
    "grpo_advantage",
    "whiten",
]
