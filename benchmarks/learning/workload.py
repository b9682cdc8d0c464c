"""The race to accuracy: tasks, and the settings that both trainers share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft_fast.config import Config
from rlft_fast.demo import write_problems
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import last_number

NUM_HELD_OUT = 512
WORDINGS = ("{} + {} = ?", "What is {} + {}?", "{} plus {} is", "Add {} and {}.")
SEEDS = (5, 6, 7, 8, 9)  # of every side; fixed before the race, like the levels of TASKS
NUM_STEPS = 28
EVALUATE_EVERY = 4
NUM_PROMPTS, NUM_SAMPLES = 16, 8  # of a step
MINI_BATCHES = 2  # optimizer steps per step
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 80, 16
LEARNING_RATE = 2e-5  # falls linearly to 0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TRUNCATION_PENALTY = 0.5
# TRL's settings, which are timed before its legs: the legs take the fastest. bf16 is autocast, TRL's default.
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "static cache": {"cache_implementation": "static"},
    "continuous batching": {"use_transformers_continuous_batching": True},
    "compiled": {"torch_compile": True},
}
for _name in ("static cache", "continuous batching", "compiled"):
    TRL_SETTINGS[f"bfloat16, {_name}"] = TRL_SETTINGS["bfloat16"] | TRL_SETTINGS[_name]
SETTINGS = {
    "seeds": [*SEEDS], "steps": NUM_STEPS, "prompts per step": NUM_PROMPTS, "answers per prompt": NUM_SAMPLES,
    "optimizer steps per step": MINI_BATCHES, "new tokens": MAX_NEW_TOKENS, "learning rate": LEARNING_RATE,
    "clip": [CLIP_LOW, CLIP_HIGH], "truncation penalty": TRUNCATION_PENALTY, "held out": NUM_HELD_OUT,
}  # fmt: skip


def write_sums(folder: Path, model: str) -> tuple[Path, Path]:
    """The demo's sums in four wordings: 512 problems are held out. No held-out sum is trained on in any form."""
    paths = write_problems(folder)
    for path in paths:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"prompt": reworded(row["prompt"], wording)} for row in rows for wording in WORDINGS]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def reworded(prompt: str, wording: str) -> str:
    """The demo's prompt with the sum in other words."""
    return re.sub(r"(\d+) \+ (\d+) = \?", lambda found: wording.format(*found.groups()), prompt)


def write_chain_sums(folder: Path, model: str) -> tuple[Path, Path]:
    """reasoning-gym's ``chain_sum``: two numbers of one or two digits, added or subtracted, in the chat template."""
    import reasoning_gym

    tokenizer = load_tokenizer(model)
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    # Without a seed, each leg would get problems of its own.
    dataset = reasoning_gym.create_dataset("chain_sum", size=2500, seed=0, **options)
    found = {row["question"]: row["answer"] for row in dataset}
    rows = [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            ),
            "answer": answer,
        }
        for question, answer in found.items()
    ]  # no question twice
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, chosen in zip(paths, (rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return paths


@dataclass(frozen=True)
class Task:
    """A task of the race.

    Attributes:
        title: in the report.
        level: of held-out accuracy, which the minutes are counted to.
        write: writes the problems to a folder, for a model; returns the paths of training and held-out problems.
    """

    title: str
    level: float
    write: Callable[[Path, str], tuple[Path, Path]]


TASKS = {
    "sums": Task("the demo's task: sums of two numbers from 1 to 20, in four wordings", 0.80, write_sums),
    "chain_sum": Task("reasoning-gym's chain_sum: two numbers below 100, added or subtracted", 0.45, write_chain_sums),
}


def config_of(model: str, task: str, seed: int, folder: Path, backend: str, steps: int) -> Config:
    """Our run. The problems are written to its folder's neighbour."""
    train, held_out = TASKS[task].write(folder.with_name(f"{folder.name}-data"), model)
    return Config.parse({
        "model": model, "output_dir": str(folder), "steps": steps, "seed": seed,
        "data": {"path": str(train), "chat": False},
        "reward": {"function": "rlft_fast.rewards:last_number", "truncation_penalty": TRUNCATION_PENALTY},
        "rollout": {
            "backend": backend, "prompts_per_step": NUM_PROMPTS, "samples_per_prompt": NUM_SAMPLES,
            "max_prompt_tokens": MAX_PROMPT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS, "batch_size": 128,
        },
        "algorithm": {"mini_batches": MINI_BATCHES, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
        "actor": {
            "max_tokens": 4096,
            "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "linear"},
        },
        "evaluation": {"path": str(held_out), "every": EVALUATE_EVERY, "max_new_tokens": MAX_NEW_TOKENS},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def reward(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], answer: Sequence[str],
    *, end_token_id: int, **columns: Any,
) -> list[float]:  # fmt: skip
    """Our run's reward as one function, for TRL."""
    right = last_number(prompts, completions, completion_ids, answer)
    is_cut = [not ids or ids[-1] != end_token_id for ids in completion_ids]
    return [float(value or 0.0) - TRUNCATION_PENALTY * cut for value, cut in zip(right, is_cut, strict=True)]
