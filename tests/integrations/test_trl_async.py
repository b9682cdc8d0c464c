"""rlft_fast.integrations.trl inside TRL's asynchronous GRPO, whose head is the reference.

The trainer's steps are real. A worker with random completions takes the place of vLLM's server, and PyTorch's attention
the place of FlashAttention 3, which needs a GPU.
"""

import itertools
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.support.runs.trl_trainers import compare, only_fused

NUM_STEPS, NUM_SAMPLES = 5, 4


class Server:
    """Has samples for all steps and more, since the trainer reads ahead; forgets the weights."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()

    def start(self) -> None:
        draw = np.random.default_rng(0)
        for group in range(3 * NUM_STEPS):
            prompt = draw.integers(256, size=6)
            for length in draw.integers(2, 9, size=NUM_SAMPLES):
                self.rollout_buffer.put(sample(draw, prompt, length, group))

    def ignore(self, *_: Any) -> None:
        pass

    stop = update_model_version = check_health = init_weight_transfer = pause = send_weights = resume = destroy = ignore


def sample(draw: np.random.Generator, prompt: np.ndarray, length: int, group: int) -> RolloutSample:
    """A completion of random tokens, whose log-probabilities were near those of a random model of 256 tokens."""
    ids = np.concatenate([prompt, draw.integers(256, size=length)])
    in_completion = np.arange(len(ids)) >= len(prompt)
    logprob = -np.log(256) + 0.2 * draw.standard_normal(len(ids))
    return RolloutSample(
        [], [], ids, in_completion.astype(int), logprob, float(draw.standard_normal()), 0, group, {"reward": 1.0}
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, q_starts: Tensor, k_starts: Tensor, *_: int, softmax_scale: float,
    **options: Any,
) -> Tensor:  # fmt: skip
    """FlashAttention's `flash_attn_varlen_func`: the last query of a segment sees all of its keys."""
    assert options == {"causal": True, "window_size": (-1, -1)}
    pieces = []
    segments = zip(*(itertools.pairwise(starts.tolist()) for starts in (q_starts, k_starts)), strict=True)
    for q_range, k_range in segments:
        q = query[slice(*q_range)].transpose(0, 1)
        k, v = (x[slice(*k_range)].transpose(0, 1) for x in (key, value))
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        output = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale, enable_gqa=True)
        pieces.append(output.transpose(0, 1))
    return torch.cat(pieces)


def train(folder, output) -> tuple[list[dict[str, float]], list[Tensor]]:
    """The log without what depends on the time, and the trained parameters."""
    server = Server()
    trainer = AsyncGRPOTrainer(
        str(folder),
        args=AsyncGRPOConfig(
            str(output), use_cpu=True, bf16=False, optim="sgd", learning_rate=0.02, max_steps=NUM_STEPS,
            per_device_train_batch_size=2 * NUM_SAMPLES, temperature=0.8, token_budget=0, max_staleness=NUM_STEPS,
            report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["the server has its own"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_worker=server,
        weight_transfer=server,
    )  # fmt: skip
    trainer.train()
    log = trainer.state.log_history
    log = [{key: step[key] for key in step if not key.startswith(("perf/", "sample/time"))} for step in log]
    return log, [parameter.detach() for parameter in trainer.model.parameters()]


def test_training_is_that_of_trl(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "CPU")  # the trainer looks up the FLOPs of its GPU
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))
    theirs, expected = train(tiny_model("llama-tied"), tmp_path)
    with only_fused(monkeypatch):
        ours, actual = train(tiny_model("llama-tied"), tmp_path)
    compare(theirs, ours)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
