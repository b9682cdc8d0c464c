"""Prompts: rows of data, conversations as the model reads them, and their tokens."""

from rlft_fast.trainer.prompts.chat import Conversation
from rlft_fast.trainer.prompts.limits import Limits
from rlft_fast.trainer.prompts.loading import Prompts, load_prompts
from rlft_fast.trainer.prompts.rows import read_rows

__all__ = ["Conversation", "Limits", "Prompts", "load_prompts", "read_rows"]
