"""The PPO and GRPO loop."""

from rlft_fast.errors import needing_train

with needing_train():
    from rlft_fast.trainer.evaluation import evaluate
    from rlft_fast.trainer.folder import claim, require_usable
    from rlft_fast.trainer.lock import require_unlocked
    from rlft_fast.trainer.plot import COLORS, PANELS, plot_runs, read_metrics
    from rlft_fast.trainer.ppo import PPOTrainer
    from rlft_fast.trainer.preflight import check_folder, check_inputs
    from rlft_fast.trainer.prompts import Prompts, load_prompts
    from rlft_fast.trainer.run import Run, train
    from rlft_fast.trainer.tokens import read_tokens

__all__ = [
    "COLORS",
    "PANELS",
    "PPOTrainer",
    "Prompts",
    "Run",
    "check_folder",
    "check_inputs",
    "claim",
    "evaluate",
    "load_prompts",
    "plot_runs",
    "read_metrics",
    "read_tokens",
    "require_unlocked",
    "require_usable",
    "train",
]
