"""The PPO and GRPO loop."""

from rlft_fast.trainer.ppo import PPOTrainer, train

__all__ = ["PPOTrainer", "train"]
