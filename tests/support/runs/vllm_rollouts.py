"""What the tests of vLLM's generators share: a policy, prompts, and log-probabilities beside the engine's."""

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlft_fast.config import EngineConfig, OptimizerConfig, RolloutConfig, VLLMConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import Rollout, SamplingParams, build_rollout

OF_VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM: make install-vllm"),
]


def needs_vllm(test: Callable) -> Callable:
    for mark in OF_VLLM:
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


def make_rollout(engine: FSDPEngine, structured: dict | None = None, **vllm) -> Rollout:
    config = RolloutConfig(
        backend="vllm", vllm=VLLMConfig(**SMALL | vllm), batch_size=32, structured=structured or {},
        **({"top_k": 6} if structured else {"stop": ("XY",)}),
    )  # fmt: skip
    return build_rollout(engine, load_tokenizer(engine.path), config, max_sequence_tokens=256)


def kill_generator() -> None:
    """Kills the process of vLLM, as the kernel does when memory is short."""
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    (core,) = (p for p in children if "EngineCore" in " ".join(p.cmdline()))
    os.kill(core.pid, signal.SIGKILL)


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
