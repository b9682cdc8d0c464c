"""One side of the objectives' benchmark, in a process of its own. Each line on its input asks for one step.

    python -m benchmarks.objectives.sides ours|trl OBJECTIVE MODEL FOLDER JSON_OPTIONS

Each answer is a line of JSON: seconds, loss, gradient norm, parameters, and memory. ``ours`` is `RowsTrainer`, as
``rlft-fast sft``, ``dpo`` and ``reward`` run it. ``trl`` is the inner loop of the trainer's ``train()``. No part of
either is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.objectives.workload import model_of, rows_of
from benchmarks.support.sides import Reporter

# An upper bound. Both learning-rate schedules are constant, so the bound does not change the steps.
MAX_STEPS = 1000
LEARNING_RATE = 1e-6
MAX_LENGTH = 320  # of a row, and no row of the workload is longer
BETA = 0.1


def run_ours(objective: str, model: str, folder: Path, options: dict[str, Any]) -> None:
    from rlft_fast.config import DPOConfig, RewardModelConfig, SFTConfig
    from rlft_fast.trainer import RowsTrainer

    data = rows_of(folder, objective)
    kind = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardModelConfig}[objective]
    config = kind.parse({
        "objective": objective, "model": model_of(folder, objective, model), "output_dir": str(folder / "ours"),
        "steps": MAX_STEPS, "batch_size": len(data.read_text().splitlines()),
        "data": {"path": str(data), "chat": False, "max_sequence_tokens": MAX_LENGTH},
        "actor": {"compute_dtype": "float32", "optimizer": {"learning_rate": LEARNING_RATE}, **options},
        **({"loss": {"beta": BETA}} if objective == "dpo" else {}),
    })  # fmt: skip
    reporter = Reporter()
    trainer = RowsTrainer(config)
    actor, batch = trainer.models.actor, trainer.data.rows.batch(range(config.batch_size))
    step = 0
    while reporter.start():
        if objective == "dpo" and step:  # the first step itself infers the reference, once for all steps
            actor.infer(batch, ("logprob",))
        metrics = trainer.train_step(step).metrics
        reporter.finish(
            loss=metrics["train_loss"], grad_norm=metrics["grad_norm"], num_tokens=batch.num_tokens,
            num_parameters=sum(parameter.numel() for parameter in actor.model.parameters()),
        )  # fmt: skip
        step += 1
    trainer.close()


def run_trl(objective: str, model: str, folder: Path, options: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    transformers.logging.set_verbosity_error()
    classes: dict[str, tuple[Any, Any]] = {
        "sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig),
    }  # fmt: skip
    trainer_class, config_class = classes[objective]
    model_class: Any = (
        transformers.AutoModelForSequenceClassification if objective == "reward" else transformers.AutoModelForCausalLM
    )
    reporter = Reporter()

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if not reporter.start():
                os._exit(0)  # the loop looks at its flag only after the step
            trainer.losses = []

        def on_step_end(self, args, state, control, **kwargs):
            reporter.finish(
                loss=float(sum(trainer.losses)), grad_norm=trainer.grad_norm,
                num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
            )  # fmt: skip

    class Trainer(trainer_class):
        losses: list[torch.Tensor]
        grad_norm: float

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

        def _get_grad_norm(self, *args, **kwargs):
            self.grad_norm = float(super()._get_grad_norm(*args, **kwargs))
            return self.grad_norm

    rows = [json.loads(line) for line in rows_of(folder, objective).read_text().splitlines()]
    size = min(8, len(rows))  # transformers' default batch size
    own: dict[str, Any] = {"sft": {"max_length": None}, "dpo": {"beta": BETA}, "reward": {}}[objective]
    loaded, tokenizer = model_of(folder, objective, model), transformers.AutoTokenizer.from_pretrained(model)
    if objective == "reward" and tokenizer.pad_token == tokenizer.eos_token:
        # The score is read at the last token that is not padding, which has to be the end token, as ours is.
        tokenizer.pad_token = "<|endoftext|>"
    trainer: Any = Trainer(
        model_class.from_pretrained(loaded, dtype=torch.float32),
        args=config_class(
            str(folder / "trl"), bf16=False, use_cpu=True, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            max_steps=MAX_STEPS, per_device_train_batch_size=size, gradient_accumulation_steps=len(rows) // size,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=MAX_STEPS, **own, **options,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Callback()],
    )  # fmt: skip
    trainer.train()


SIDES: dict[str, Callable[[str, str, Path, dict[str, Any]], None]] = {"ours": run_ours, "trl": run_trl}


def main() -> None:
    side, objective, model, folder, options = sys.argv[1:]
    SIDES[side](objective, model, Path(folder), json.loads(options))


if __name__ == "__main__":
    main()
