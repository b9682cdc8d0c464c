"""The trainers: the loop of PPO and GRPO, and supervised fine-tuning.

Names are imported on first use. Some of them, such as `read_metrics`, only read files, and torch and transformers would
take seconds to import.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.run import (
        COLORS,
        PANELS,
        Run,
        claim,
        plot_runs,
        read_metrics,
        read_tokens,
        require_unlocked,
        require_usable,
    )
    from rlft_fast.trainer.dtypes import settle_compute_dtype
    from rlft_fast.trainer.evaluation import evaluate
    from rlft_fast.trainer.launch import require_replay, train
    from rlft_fast.trainer.models import without_generator
    from rlft_fast.trainer.ppo import PPOTrainer
    from rlft_fast.trainer.preflight import check_folder, check_inputs
    from rlft_fast.trainer.prompts import Prompts, load_prompts
    from rlft_fast.trainer.showing import ShownSequence, ShownSet, show_data
    from rlft_fast.trainer.supervised import RowsTrainer

__all__ = [
    "COLORS",
    "PANELS",
    "PPOTrainer",
    "Prompts",
    "RowsTrainer",
    "Run",
    "ShownSequence",
    "ShownSet",
    "check_folder",
    "check_inputs",
    "claim",
    "evaluate",
    "load_prompts",
    "plot_runs",
    "read_metrics",
    "read_tokens",
    "require_replay",
    "require_unlocked",
    "require_usable",
    "settle_compute_dtype",
    "show_data",
    "train",
    "without_generator",
]

__getattr__ = names_on_first_use(__name__)
