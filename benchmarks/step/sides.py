"""One side of the benchmark of a whole step, in a process of its own. Each line on its input asks for one step.

    python -m benchmarks.step.sides ours|trl MODEL OUTPUT_DIR JSON_WORK JSON_OPTIONS

Each answer is a line of JSON: seconds in all and by part, generated tokens, a checksum of the prompts, and memory.
``ours`` is `PPOTrainer.train_step`, ``trl`` is a step of ``GRPOTrainer.train()``; no part of either is replaced.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.step.workload import (
    CLIP,
    LEARNING_RATE,
    MAX_STEPS,
    Workload,
    config_of,
    distinct_word_share,
    prompts_of_step,
)
from benchmarks.support.sides import Reporter
from rlft_fast.config import Config
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import load_prompts

PARTS = ("generate", "reward", "logprobs", "update", "sync", "other")


def checksum(prompt_ids: list[list[int]]) -> int:
    return zlib.crc32(json.dumps(prompt_ids).encode())


def run_ours(config: Config, work: Workload, options: dict[str, Any]) -> None:
    from rlft_fast.trainer import PPOTrainer

    reporter = Reporter()
    trainer = PPOTrainer(config)
    trainer.rollout.sync()
    step = 0
    while reporter.start():
        metrics = trainer.train_step(step).metrics
        parts = {part: metrics.get(f"seconds_{part}", 0.0) for part in PARTS}
        parts["other"] = metrics["seconds"] - sum(parts.values())
        num_tokens = round(metrics["completion_length_mean"] * work.num_prompts * work.num_samples)
        prompt_ids = prompts_of_step(trainer.prompts, step, work).token_ids
        peak_gib = max(value for name, value in metrics.items() if name.startswith("memory_gib_"))
        reporter.finish(
            peak_gib * 2**30, parts=parts, num_tokens=num_tokens, prompts=checksum(prompt_ids),
            reward=metrics["reward_mean"],
        )  # fmt: skip
        step += 1
    trainer.close()


def run_trl(config: Config, work: Workload, options: dict[str, Any]) -> None:
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    reporter = Reporter()
    parts: dict[str, float] = defaultdict(float)
    facts: dict[str, Any] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        parts[part] += time.perf_counter() - started

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if not reporter.start():
                os._exit(0)  # the loop looks at the flag only after the update
            parts.clear()
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            before_update = parts.pop("before update")
            parts["update"] = time.perf_counter() - self.started - before_update
            parts["other"] = before_update - parts["generate"] - parts["reward"]
            reporter.finish(parts={part: parts[part] for part in PARTS}, **facts)

    class Trainer(GRPOTrainer):
        """Its own methods, timed."""

        def _generate_and_score_completions(self, inputs):
            with timed("before update"):
                return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            with timed("generate"):
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            facts.update(prompts=checksum(prompt_ids[:: work.num_samples]), num_tokens=sum(map(len, completion_ids)))
            return completion_ids, logprobs

        def _calculate_rewards(self, *args, **kwargs):
            with timed("reward"):
                rewards = super()._calculate_rewards(*args, **kwargs)
            facts.update(reward=rewards.mean().item())
            return rewards

    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
    texts = [text for step in range(MAX_STEPS) for text in prompts_of_step(prompts, step, work).texts]
    batch_size = options.pop("per_device_train_batch_size")
    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
        reward_funcs=distinct_word_share,
        args=GRPOConfig(
            config.output_dir, bf16=False, use_cpu=True, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            loss_type="dapo", epsilon=CLIP, beta=0.0, num_iterations=1, max_steps=MAX_STEPS, seed=work.seed,
            shuffle_dataset=False, num_generations=work.num_samples, max_completion_length=work.max_new_tokens,
            temperature=work.temperature, per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=work.num_prompts * work.num_samples // batch_size, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_steps=MAX_STEPS, **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[Callback()],
    )  # fmt: skip
    trainer.train()


SIDES: dict[str, Callable[[Config, Workload, dict[str, Any]], None]] = {"ours": run_ours, "trl": run_trl}


def main() -> None:
    side, model, output_dir, work, options = sys.argv[1:]
    shared, own = Workload(**json.loads(work)), json.loads(options)
    config = config_of(model, output_dir, shared, own if side == "ours" else {})
    SIDES[side](config, shared, own)


if __name__ == "__main__":
    main()
