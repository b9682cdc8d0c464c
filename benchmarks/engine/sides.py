"""One side of the engine's benchmark, in a process of its own. Each line on its input asks for one update.

    python -m benchmarks.engine.sides ours|trl|profile|prepare MODEL SCALE OLD_LOGPROBS_FILE JSON_OPTIONS

Each answer is a line of JSON: seconds, loss, gradient norm, and memory. ``ours`` is ``FSDPEngine.train_step``. ``trl``
is the inner loop of ``GRPOTrainer.train()``: the workload's sequences replace generation and scoring, and nothing else
is replaced.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.workload import CLIP, LEARNING_RATE, Workload, make_workload
from benchmarks.support.sides import Reporter

# An upper bound. Both learning-rate schedules are constant, so the bound does not change the updates.
MAX_UPDATES = 1000


def run_ours(model: str, workload: Workload, options: dict[str, Any]) -> None:
    from rlft_fast.engine import FSDPEngine
    from rlft_fast.rl import PolicyLoss

    reporter = Reporter()
    infers = options.pop("infers", False)  # infer old log-probabilities first; they are not used here
    engine = FSDPEngine(model, engine_config(**options), num_training_steps=MAX_UPDATES).initialize()
    loss = PolicyLoss(clip_low=CLIP, clip_high=CLIP)
    batch = workload.batch()
    while reporter.start():
        if infers:
            engine.infer(batch, ("logprob",))
        metrics = engine.train_step(batch, loss)
        reporter.finish(loss=metrics["loss"], grad_norm=metrics["grad_norm"])


def engine_config(**options: Any):
    from rlft_fast.config import EngineConfig, OptimizerConfig

    return EngineConfig(compute_dtype="float32", optimizer=OptimizerConfig(learning_rate=LEARNING_RATE), **options)


def run_trl(model: str, workload: Workload, options: dict[str, Any]) -> None:
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    reporter = Reporter()

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            control.should_training_stop = not reporter.start()
            if control.should_training_stop:
                os._exit(0)  # the loop looks at the flag only after the update
            trainer.losses = []

        def on_step_end(self, args, state, control, **kwargs):
            reporter.finish(loss=float(sum(trainer.losses)), grad_norm=trainer.grad_norm)

    class Trainer(GRPOTrainer):
        losses: list[torch.Tensor]
        grad_norm: float

        def _generate_and_score_completions(self, inputs):
            return workload.padded(self._tokenizer.pad_token_id)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

        def _get_grad_norm(self, *args, **kwargs):
            self.grad_norm = float(super()._get_grad_norm(*args, **kwargs))
            return self.grad_norm

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                folder, bf16=False, use_cpu=True, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
                loss_type="dapo", epsilon=CLIP, beta=0.0, max_steps=MAX_UPDATES, report_to="none", save_strategy="no",
                disable_tqdm=True, num_generations=4, logging_steps=MAX_UPDATES, **options,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(workload.prompts)}),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
            callbacks=[Callback()],
        )  # fmt: skip
        trainer.train()


def run_profile(model: str, workload: Workload, options: dict[str, Any]) -> None:
    """Seconds by part of each update, instead of loss and memory."""
    from benchmarks.engine.profile import profile_step
    from rlft_fast.engine import FSDPEngine
    from rlft_fast.rl import PolicyLoss

    reporter = Reporter()
    engine = FSDPEngine(model, engine_config(**options), num_training_steps=MAX_UPDATES).initialize()
    while reporter.start():
        reporter.say(profile_step(engine, workload.batch(), PolicyLoss(clip_low=CLIP, clip_high=CLIP)))


def prepare(model: str, workload: Workload, path: Path) -> None:
    """Writes the old log-probabilities: the model's own, with noise."""
    from rlft_fast.engine import FSDPEngine

    engine = FSDPEngine(model, engine_config(max_tokens=1024)).initialize()
    logprob_T = engine.infer(workload.batch(), ("logprob",))["logprob"]
    workload.with_noise_around(logprob_T).save(path)


SIDES: dict[str, Callable[[str, Workload, dict[str, Any]], None]] = {
    "ours": run_ours, "trl": run_trl, "profile": run_profile,
}  # fmt: skip


def main() -> None:
    side, model, scale, path, options = sys.argv[1:]
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    workload = make_workload(vocab_size, float(scale))
    if side == "prepare":
        prepare(model, workload, Path(path))
    else:
        SIDES[side](model, workload.with_old_logprobs(Path(path)), json.loads(options))


if __name__ == "__main__":
    main()
