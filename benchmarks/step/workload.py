"""The work of the benchmark of a whole step: a rollout of 64 completions, its rewards, and one GRPO update.

Prompts are sums and products from reasoning-gym in the model's chat template, 37 to 77 tokens long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlft_fast.config import Config
from rlft_fast.trainer.prompts import Prompts

LEARNING_RATE = 1e-6
CLIP = 0.2
MAX_STEPS = 16  # both learning-rate schedules are constant, so the bound does not change the steps


@dataclass(frozen=True)
class Workload:
    """One step, the same for both sides.

    Attributes:
        num_prompts: prompts of a step.
        num_samples: completions of a prompt.
        max_new_tokens: most tokens of a completion.
        temperature: of sampling and of the loss.
        seed: of the order of the prompts and of sampling.
    """

    num_prompts: int = 8
    num_samples: int = 8
    max_new_tokens: int = 32
    temperature: float = 1.0
    seed: int = 0


def config_of(model: str, output_dir: str, work: Workload, options: dict[str, dict[str, Any]]) -> Config:
    """The run of our side.

    Args:
        model: folder.
        output_dir: for logs.
        work: of both sides.
        options: by section, what concerns our side alone.
    """
    rollout = {
        "prompts_per_step": work.num_prompts, "samples_per_prompt": work.num_samples, "max_prompt_tokens": 192,
        "max_new_tokens": work.max_new_tokens, "temperature": work.temperature,
    }  # fmt: skip
    return Config.parse({
        "model": model, "output_dir": output_dir, "steps": MAX_STEPS, "seed": work.seed,
        "data": {"task": "basic_arithmetic", "task_size": work.num_prompts * MAX_STEPS},
        "reward": {"function": "benchmarks.step.workload:distinct_word_share"},
        "rollout": rollout | options.get("rollout", {}),
        "algorithm": {"clip_low": CLIP, "clip_high": CLIP},
        "actor": {"compute_dtype": "float32", "optimizer": {"learning_rate": LEARNING_RATE}} | options.get("actor", {}),
    })  # fmt: skip


def distinct_word_share(completions: list[str], **_: Any) -> list[float | None]:
    """The reward. It differs between completions, so that every group has an advantage."""
    return [len(set(text.split())) / max(len(text.split()), 1) for text in completions]


def prompts_of_step(prompts: Prompts, step: int, work: Workload) -> Prompts:
    """The prompts of a step as our trainer takes them; TRL's dataset has the same order."""
    return prompts.select(prompts.order(step * work.num_prompts, work.num_prompts, work.seed))
