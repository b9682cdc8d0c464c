"""TRL's GRPOTrainer with log-probabilities and entropies by rlft_fast, on the sums of the demo.

    make demo ROLLOUT=hf
    .venv/bin/python examples/trl_grpo.py      # minutes on two cores

`FusedGRPOTrainer` replaces `GRPOTrainer`. Everything else is TRL's own, generation and loss included. For TRL 1.16.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from rlft_fast import patch_lm_head
from rlft_fast.rewards import last_number

MODEL = Path.home() / ".cache/rlft_fast/SmolLM2-135M-Instruct"


class FusedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose policy never holds all logits, and runs its head for completion tokens only.

    TRL loads the reference model (`beta` without an adapter), and the reference model keeps TRL's head.

    Raises:
        TypeError: the model is a name; load it first.
        ValueError: a model or an option needs TRL's own head.
    """

    def __init__(self, model: PreTrainedModel, *args: Any, **options: Any) -> None:
        patch_lm_head(model.get_base_model() if hasattr(model, "get_base_model") else model)
        super().__init__(model, *args, **options)
        adapter = getattr(self.model, "active_peft_config", None)
        for unfit, what, advice in (
            (self.aux_loss_enabled, "a router's auxiliary loss", "set router_aux_loss_coef=0.0"),
            (self.args.cast_lm_head_to_fp32, "cast_lm_head_to_fp32", "leave it out, statistics are float32 anyway"),
            (adapter is not None and adapter.is_prompt_learning, "prompt learning, which adds positions", "use LoRA"),
        ):
            if unfit:
                raise ValueError(f"FusedGRPOTrainer does not know {what}: {advice}, or use trl.GRPOTrainer")

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """TRL's method slices the batch, and calls `model(labels=..., fused_lm_head=True)`; `answer` is that model."""

        def answer(*, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> FusedCausalLMOutput:
            scored = {"logprob_targets": pad(labels[:, 1:], (0, 1), value=-100), "temperature": self.temperature}
            result = model(**inputs, **scored, return_entropy=True, use_cache=False)
            return FusedCausalLMOutput(log_probs=result.logprob[:, :-1], entropy=result.entropy[:, :-1])

        asks = model if model is self.ref_model else answer
        return super()._get_per_token_logps_and_entropies(asks, *args, **options)


def main(model: Path, data: Path, steps: int) -> None:
    with TemporaryDirectory() as folder:
        trainer = FusedGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            last_number,
            GRPOConfig(
                folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=16,
                learning_rate=2e-5, bf16=False, logging_steps=1, report_to="none", save_strategy="no",
            ),
            Dataset.from_json(str(data), cache_dir=folder),
            processing_class=AutoTokenizer.from_pretrained(model),
        )  # fmt: skip
        trainer.train()
    for step in trainer.state.log_history:
        if "reward" in step:
            print(f"step {step['step']}  reward {step['reward']:.3f}  entropy {step['entropy']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder")
    parser.add_argument("--data", type=Path, default=Path("runs/demo/data/train.jsonl"), help="prompts and answers")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    main(options.model, options.data, options.steps)
