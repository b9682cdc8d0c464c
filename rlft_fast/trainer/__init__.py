"""The PPO and GRPO loop.

Names are imported on first use. Some of them, such as `read_metrics`, only read files, and torch and transformers would
take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlft_fast.errors import needing_train

with needing_train():
    pass  # an install without the extra is told so at the import of the package

if TYPE_CHECKING:
    from rlft_fast.run import (
        COLORS,
        PANELS,
        Run,
        claim,
        drawable,
        is_exact_integer,
        parse_json,
        plot_runs,
        read_metrics,
        read_tokens,
        require_unlocked,
        require_usable,
    )
    from rlft_fast.trainer.evaluation import evaluate
    from rlft_fast.trainer.launch import train
    from rlft_fast.trainer.ppo import PPOTrainer
    from rlft_fast.trainer.preflight import check_folder, check_inputs
    from rlft_fast.trainer.prompts import Prompts, load_prompts

__all__ = [
    "COLORS",
    "PANELS",
    "PPOTrainer",
    "Prompts",
    "Run",
    "check_folder",
    "check_inputs",
    "claim",
    "drawable",
    "evaluate",
    "is_exact_integer",
    "load_prompts",
    "parse_json",
    "plot_runs",
    "read_metrics",
    "read_tokens",
    "require_unlocked",
    "require_usable",
    "train",
]

_MODULES = {
    "run": (
        "claim",
        "require_usable",
        "require_unlocked",
        "COLORS",
        "PANELS",
        "drawable",
        "is_exact_integer",
        "parse_json",
        "plot_runs",
        "read_metrics",
        "Run",
        "read_tokens",
    ),
    "trainer.evaluation": ("evaluate",),
    "trainer.launch": ("train",),
    "trainer.ppo": ("PPOTrainer",),
    "trainer.preflight": ("check_folder", "check_inputs"),
    "trainer.prompts": ("Prompts", "load_prompts"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            with needing_train():
                return getattr(import_module(f"rlft_fast.{module}"), name)
    raise AttributeError(f"module 'rlft_fast.trainer' has no attribute {name!r}")
