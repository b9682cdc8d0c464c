"""Rollouts: completions sampled from the policy, with the log-probabilities of the sampler."""

from rlft_fast.rollout.hf import HFRollout
from rlft_fast.rollout.types import Completion, SamplingParams

__all__ = ["Completion", "HFRollout", "SamplingParams"]
