"""The PPO and GRPO loop."""

from rlft_fast.trainer.ppo import PPOTrainer
from rlft_fast.trainer.run import Run, train

__all__ = ["PPOTrainer", "Run", "train"]
