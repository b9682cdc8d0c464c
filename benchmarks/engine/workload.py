"""The work of the engine's benchmark: one GRPO update on 32 sequences, the same for all sides.

Eight prompts have four completions each. Lengths are log-normal, as in reinforcement learning on short reasoning tasks:
prompts around 64 tokens (sigma 0.4, 16 to 160), completions around 96 (sigma 0.7, 8 to 512). The longest completion is
several times the median. Tokens are random: they do not change the time of either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlft_fast.data import Batch
from rlft_fast.ops.packing.pack import segment_expand
from rlft_fast.rl import grpo_advantage

NUM_PROMPTS, NUM_SAMPLES = 8, 4
LEARNING_RATE = 1e-6
CLIP = 0.2
# A few optimizer steps on one rollout move log-probabilities this far: some tokens are clipped, most are not.
_OLD_LOGPROB_NOISE = 0.1


@dataclass(frozen=True)
class Workload:
    """Token ids, rewards, and the old log-probabilities of the ratio.

    Attributes:
        prompts: B lists of token ids; samples of a prompt follow one another.
        completions: B lists of token ids.
        reward_B: (B,) float32.
        old_logprob_T: (T,) float32 in the order of `batch()`; None before `make_old_logprobs`.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    reward_B: Tensor
    old_logprob_T: Tensor | None = None

    @property
    def group_B(self) -> Tensor:
        return torch.arange(NUM_PROMPTS).repeat_interleave(NUM_SAMPLES)

    @property
    def advantage_B(self) -> Tensor:
        return grpo_advantage(self.reward_B, self.group_B)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding and repetition: the numerator of tokens per second on every side."""
        return sum(map(len, (*self.prompts, *self.completions)))

    def batch(self) -> Batch:
        """Packed, for our engine."""
        batch = Batch.from_samples(self.prompts, self.completions, groups=self.group_B.tolist())
        advantage_T = segment_expand(self.advantage_B, batch.cu_seqlens, num_tokens=batch.num_tokens)
        return batch.replace(advantage_T=advantage_T * batch.loss_mask_T, old_logprob_T=self.old_logprob_T)

    def padded(self, pad_token_id: int) -> dict[str, Tensor]:
        """What TRL's `_generate_and_score_completions` returns: prompts padded left, completions right."""
        prompt_ids, prompt_mask = _pad(self.prompts, pad_token_id, left=True)
        completion_ids, completion_mask = _pad(self.completions, pad_token_id, left=False)
        batch = self.batch()
        assert self.old_logprob_T is not None
        old_logprob = torch.zeros(completion_ids.shape)
        old_logprob[completion_mask.bool()] = self.old_logprob_T[batch.loss_mask_T]
        return {
            "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
            "completion_mask": completion_mask, "advantages": self.advantage_B, "old_per_token_logps": old_logprob,
            "num_items_in_batch": completion_mask.sum(),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        assert self.old_logprob_T is not None
        save_file({"old_logprob_T": self.old_logprob_T}, path)

    def with_old_logprobs(self, path: Path) -> Workload:
        return Workload(self.prompts, self.completions, self.reward_B, load_file(path)["old_logprob_T"])

    def with_noise_around(self, logprob_T: Tensor) -> Workload:
        noise_T = _OLD_LOGPROB_NOISE * torch.randn(logprob_T.shape, generator=torch.Generator().manual_seed(1))
        old_logprob_T = (logprob_T + noise_T) * self.batch().loss_mask_T
        return Workload(self.prompts, self.completions, self.reward_B, old_logprob_T)


def make_workload(vocab_size: int, scale: float = 1.0) -> Workload:
    """The workload of the report; the same tokens every time.

    Args:
        vocab_size: ids are drawn below it.
        scale: factor on all lengths, for a quick look.
    """
    random = np.random.default_rng(0)
    prompt_lengths = _lengths(random, NUM_PROMPTS, scale * 64, 0.4, scale * 16, scale * 160)
    completion_lengths = _lengths(random, NUM_PROMPTS * NUM_SAMPLES, scale * 96, 0.7, scale * 8, scale * 512)
    prompts = [random.integers(vocab_size, size=n).tolist() for n in prompt_lengths]
    completions = [random.integers(vocab_size, size=n).tolist() for n in completion_lengths]
    reward_B = torch.from_numpy(random.normal(size=len(completions)).astype(np.float32))
    return Workload([p for p in prompts for _ in range(NUM_SAMPLES)], completions, reward_B)


def _lengths(random: np.random.Generator, n: int, median: float, sigma: float, low: float, high: float) -> np.ndarray:
    return np.clip(random.lognormal(np.log(median), sigma, n), max(low, 1), high).astype(int)


def _pad(rows: list[list[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), value), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), None) if left else slice(len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return ids, mask
