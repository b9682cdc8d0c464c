"""Rollouts: completions sampled from the policy, with the log-probabilities of the sampler."""

from rlft_fast.rollout.build import build_rollout
from rlft_fast.rollout.failures import NonFiniteLogitsError, RolloutError
from rlft_fast.rollout.hf import HFRollout
from rlft_fast.rollout.types import Completion, Rollout, SamplingParams, with_ties
from rlft_fast.rollout.vllm import VLLMRollout

__all__ = [
    "Completion",
    "HFRollout",
    "NonFiniteLogitsError",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "VLLMRollout",
    "build_rollout",
    "with_ties",
]
