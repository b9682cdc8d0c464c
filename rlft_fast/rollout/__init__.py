"""Rollouts: completions sampled from the policy, with the log-probabilities of the sampler.

types            requests to a generator, its completions, and the methods of every generator
together         `Rollout`: a generator on every rank, with the coordination of the ranks around it
columns          completions as columns of samples
factory          the rollout that a configuration names
hf               generates with transformers and the policy itself
decoding         decodes models whose cache is keys and values
graphs           CUDA graphs of decode steps
by_transformers  decodes any other model, by `generate`
sampling         chooses tokens from logits
vllm             generates with vLLM: in this process, in one beside it, or on servers
"""

from rlft_fast.errors import needing_train

with needing_train():
    from rlft_fast.rollout.columns import to_samples
    from rlft_fast.rollout.factory import build_rollout
    from rlft_fast.rollout.hf import HFGenerator
    from rlft_fast.rollout.together import NonFiniteLogitsError, Rollout, RolloutError
    from rlft_fast.rollout.types import (
        Answers,
        Completion,
        Generator,
        Request,
        RequestError,
        SampledModel,
        SamplingParams,
        Seeds,
        Span,
        draw_seeds,
        make_requests,
        sample_seeds,
        seed_of,
        with_ties,
        without_refusals,
    )
    from rlft_fast.rollout.vllm import (
        ServedVLLM,
        ServerError,
        VLLMServer,
        server_command,
        server_environment,
        token_from_environment,
        why_no_images,
    )

__all__ = [
    "Answers",
    "Completion",
    "Generator",
    "HFGenerator",
    "NonFiniteLogitsError",
    "Request",
    "RequestError",
    "Rollout",
    "RolloutError",
    "SampledModel",
    "SamplingParams",
    "Seeds",
    "ServedVLLM",
    "ServerError",
    "Span",
    "VLLMServer",
    "build_rollout",
    "draw_seeds",
    "make_requests",
    "sample_seeds",
    "seed_of",
    "server_command",
    "server_environment",
    "to_samples",
    "token_from_environment",
    "why_no_images",
    "with_ties",
    "without_refusals",
]
