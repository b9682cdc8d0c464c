"""TRL's GRPOTrainer with log-probabilities and entropies by rlft_fast, on the sums of the demo.

    make demo ROLLOUT=hf
    .venv/bin/python examples/trl_grpo.py      # minutes on two cores

`enable()` is all that it takes. Everything else is TRL's own, generation and loss included. For TRL 1.16.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rlft_fast.integrations.trl import enable
from rlft_fast.rewards import last_number

MODEL = Path.home() / ".cache/rlft_fast/SmolLM2-135M-Instruct"


def main(model: Path, data: Path, steps: int) -> None:
    enable()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            str(model),
            last_number,
            GRPOConfig(
                folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=16,
                learning_rate=2e-5, bf16=False, logging_steps=1, report_to="none", save_strategy="no",
            ),
            Dataset.from_json(str(data), cache_dir=folder),
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
