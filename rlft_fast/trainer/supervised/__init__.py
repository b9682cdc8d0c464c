"""Runs that learn from rows of data, without sampling.

spans       where the assistant's words stand in a conversation, as a chat template renders it
rows        rows of data as tokens, and which of them are taught
sft         `SFTTrainer`: supervised fine-tuning
"""

from rlft_fast.trainer.supervised.rows import TaughtRows, load_rows
from rlft_fast.trainer.supervised.sft import SFTData, SFTTrainer, check_row_tokens
from rlft_fast.trainer.supervised.spans import AssistantSpans

__all__ = ["AssistantSpans", "SFTData", "SFTTrainer", "TaughtRows", "check_row_tokens", "load_rows"]
