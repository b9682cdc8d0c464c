"""What the tests of vLLM's generators share: a policy, prompts, and log-probabilities beside the engine's."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import Rollout, SamplingParams


def needs_vllm(test: Callable) -> Callable:
    missing = importlib.util.find_spec("vllm") is None
    marks = (pytest.mark.vllm, pytest.mark.slow, pytest.mark.skipif(missing, reason="no vLLM: make install-vllm"))
    for mark in marks:
        test = mark(test)
    return test


# One longer than a block of the prefix cache, which holds 32 tokens on a CPU.
PROMPTS = [[5], [7, 8], [1, 2], [i % 256 for i in range(3, 200)], [99, 3, 4]]
SAMPLED = SamplingParams(n=3, max_new_tokens=7, temperature=0.7)
SMALL = {"cpu_cache_gib": 0.1}
# vLLM's attention for CPUs takes heads of 32 numbers and more.
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def make_engine(path: Path, **options) -> FSDPEngine:
    config = EngineConfig(max_tokens=1024, optimizer=OptimizerConfig(learning_rate=2e-2), **options)
    return FSDPEngine(str(path), config, num_training_steps=10, temperature=0.7).initialize()


def update(engine: FSDPEngine, seed: int) -> None:
    torch.manual_seed(seed)
    batch = Batch.from_samples([[1, 2, 3]], [[4 + seed, 5, 6]])
    batch = batch.replace(advantage_T=torch.randn(6), old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    engine.train_step(batch, PolicyLoss())


def sample(rollout: Rollout, prompts: list[list[int]], seed: int = 0) -> list:
    torch.manual_seed(seed)
    return rollout.generate(prompts, SAMPLED)


def check_logprobs(engine: FSDPEngine, prompts: list[list[int]], groups: list) -> list[Batch]:
    """Compares the samples of each rank in turn, because infer takes the same batch on all ranks."""
    samples = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    own = Batch.from_samples(
        [prompt for prompt, _ in samples], [sample.token_ids for _, sample in samples],
        rollout_logprobs=[sample.logprobs for _, sample in samples],
        supports=[sample.support for _, sample in samples],
    )  # fmt: skip
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for batch in every:
        inferred = engine.infer(batch, ("logprob",))["logprob"]
        torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=2e-4)
    return every
