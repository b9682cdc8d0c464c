"""Rollouts: completions sampled from the policy, with the log-probabilities of the sampler.

types            requests to a generator, its completions, and the methods of every generator
together         `Rollout`: a generator on every rank, with the coordination of the ranks around it
build            the rollout that a configuration names
hf               generates with transformers and the policy itself
vllm             generates with vLLM inside the training process
vllm_separate    generates with vLLM in a process beside the training
vllm_requests    vLLM's form of requests, and completions from its outputs
shared_memory    passes weights to a separate vLLM on a CPU
ends             end tokens and stop texts
"""

from rlft_fast.errors import needing_train

with needing_train():
    from rlft_fast.rollout.build import build_rollout
    from rlft_fast.rollout.hf import HFGenerator
    from rlft_fast.rollout.together import NonFiniteLogitsError, Rollout, RolloutError
    from rlft_fast.rollout.types import (
        Completion,
        Generator,
        RequestError,
        SampledModel,
        SamplingParams,
        Seeds,
        Span,
        sample_seeds,
        with_ties,
    )

__all__ = [
    "Completion",
    "Generator",
    "HFGenerator",
    "NonFiniteLogitsError",
    "RequestError",
    "Rollout",
    "RolloutError",
    "SampledModel",
    "SamplingParams",
    "Seeds",
    "Span",
    "build_rollout",
    "sample_seeds",
    "with_ties",
]
