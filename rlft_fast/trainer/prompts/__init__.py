"""Prompts: rows of data, conversations as the model reads them, and their tokens."""

from rlft_fast.trainer.prompts.chat import Conversation
from rlft_fast.trainer.prompts.loading import Prompts, load_prompts

__all__ = ["Conversation", "Prompts", "load_prompts"]
