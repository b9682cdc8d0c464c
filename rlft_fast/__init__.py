"""Fast, small-memory reinforcement fine-tuning of language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlft_fast.models import patch_lm_head, unpatch_lm_head

__all__ = ["patch_lm_head", "unpatch_lm_head"]

__version__ = "0.1.0"  # the one place; setup.py and the command line read it


def __getattr__(name: str) -> Any:
    """Imports on first use: `rlft_fast.ops` must not need transformers."""
    if name not in __all__:
        raise AttributeError(f"module 'rlft_fast' has no attribute {name!r}")
    from rlft_fast import models

    return getattr(models, name)
