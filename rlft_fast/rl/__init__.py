"""Reinforcement learning as pure tensor maths: advantages, KL, per-token losses and their weights.

Everything works on packed, position-aligned tensors (see `rlft_fast.data.Batch`) and never communicates.
"""

from rlft_fast.rl.advantages import (
    ADVANTAGES,
    AdvantageError,
    AdvantageFunction,
    AdvantageReturn,
    compute_advantages,
    discounted_returns,
    distillation_advantage,
    gae,
    grpo_advantage,
    whiten,
)
from rlft_fast.rl.aggregation import Aggregation, loss_scale, loss_weights, response_lengths
from rlft_fast.rl.controllers import AdaptiveEntropy, AdaptiveKL, RunningReward
from rlft_fast.rl.correction import (
    CORRECTIONS,
    check_correction,
    correction_weights,
    mismatch_metrics,
)
from rlft_fast.rl.distillation import top_k_divergence
from rlft_fast.rl.kl import KLEstimator, kl_estimate, reward_with_kl
from rlft_fast.rl.losses import PolicyLoss, PolicyLossError, ValueLoss, explained_variance
from rlft_fast.rl.methods import TokenSelection, arguments_of, call_method, needs, needs_of
from rlft_fast.rl.policy_losses import POLICY_LOSSES, PolicyLossFunction, SequenceMean
from rlft_fast.rl.preferences import BradleyTerryLoss, PairLoss, PreferenceLoss
from rlft_fast.rl.supervised import LikelihoodLoss
from rlft_fast.rl.token_choice import clip_cov_tokens, high_entropy_tokens, kl_cov_tokens

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "POLICY_LOSSES",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "AdvantageError",
    "AdvantageFunction",
    "AdvantageReturn",
    "Aggregation",
    "BradleyTerryLoss",
    "KLEstimator",
    "LikelihoodLoss",
    "PairLoss",
    "PolicyLoss",
    "PolicyLossError",
    "PolicyLossFunction",
    "PreferenceLoss",
    "RunningReward",
    "SequenceMean",
    "TokenSelection",
    "ValueLoss",
    "arguments_of",
    "call_method",
    "check_correction",
    "clip_cov_tokens",
    "compute_advantages",
    "correction_weights",
    "discounted_returns",
    "distillation_advantage",
    "explained_variance",
    "gae",
    "grpo_advantage",
    "high_entropy_tokens",
    "kl_cov_tokens",
    "kl_estimate",
    "loss_scale",
    "loss_weights",
    "mismatch_metrics",
    "needs",
    "needs_of",
    "response_lengths",
    "reward_with_kl",
    "top_k_divergence",
    "whiten",
]
