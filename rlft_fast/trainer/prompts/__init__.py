"""Prompts: rows of data, conversations as the model reads them, and their tokens."""

from rlft_fast.trainer.prompts.loading import Prompts, load_prompts

__all__ = ["Prompts", "load_prompts"]
