"""Rollouts: completions sampled from the policy, with the log-probabilities of the sampler.

types            requests, completions, and the methods that every rollout has
build            the rollout that a configuration names
hf               transformers' ``generate`` with the policy itself
vllm             vLLM with a copy of the weights: requests, restarts, completions
vllm_engine      starts vLLM inside the training process, and passes it weights
vllm_separate    vLLM in a process beside the training
shared_memory    passes weights to a separate vLLM on a CPU
ends             end tokens and stop texts
failures         errors of a generator, raised on all ranks together
"""

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
