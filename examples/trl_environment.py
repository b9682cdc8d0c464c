"""An environment for TRL's GRPOTrainer and for rlft_fast, which takes the same class unchanged.

    python examples/trl_environment.py --model FOLDER      # TRL 1.16; FOLDER has a chat model

rlft_fast plays it with these keys; `--rows` prints the rows:

    data: {path: rows.jsonl}
    environment: {name: examples/trl_environment.py:Lift}
    rollout: {max_new_tokens: 256}
"""

import argparse
import json
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

ROWS = [{"prompt": [{"role": "user", "content": "Take me up."}], "floor": floor} for floor in range(2, 10)]


class Lift:
    """A lift of ten floors. The reward is 1 less the distance from the wanted floor, as a share of its height."""

    def reset(self, floor: int, **row: Any) -> str:
        self.wanted, self.floor = floor, 0
        return f" I want to floor {floor}."

    def move(self, floors: int) -> str:
        """Moves the lift.

        Args:
            floors: how far; below 0 it goes down

        Returns:
            Where the lift is.
        """
        self.floor = max(0, min(9, self.floor + int(floors)))
        return f"floor {self.floor}"

    def get_reward(self) -> float:
        return 1.0 - abs(self.wanted - self.floor) / self.wanted


def train_with_trl(model: str, steps: int, callbacks: Sequence[Any] = ()) -> list[dict[str, float]]:
    """What TRL logs of so many steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            args=GRPOConfig(
                folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=256,
                max_tool_calling_iterations=2, learning_rate=1e-5, bf16=False, logging_steps=1, report_to="none",
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list(ROWS),
            environment_factory=Lift,
            callbacks=[*callbacks],
        )  # fmt: skip
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", action="store_true", help="print the rows alone")
    options = parser.parse_args()
    if options.rows:
        print("\n".join(map(json.dumps, ROWS)))
    else:
        for line in train_with_trl(options.model, options.steps):
            if "reward" in line:
                print(f"step {line['step']}  reward {line['reward']:.3f}")
