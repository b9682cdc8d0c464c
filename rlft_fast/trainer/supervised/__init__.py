"""Runs that learn from rows of data, without sampling: supervised fine-tuning, preferences and reward models.

spans       where the assistant's words stand in a conversation, as a chat template renders it
rows        rows of data as tokens, and which of them are taught
pairs       pairs of rows, of which one is preferred
reference   log-probabilities of pairs before training, inferred once and kept in a file
trainer     `RowsTrainer`: an optimizer step on the next rows
"""

from rlft_fast.trainer.supervised.pairs import PairRows, load_pairs
from rlft_fast.trainer.supervised.rows import TaughtRows, load_rows
from rlft_fast.trainer.supervised.spans import AssistantSpans
from rlft_fast.trainer.supervised.trainer import RowsData, RowsTrainer, check_row_tokens

__all__ = [
    "AssistantSpans",
    "PairRows",
    "RowsData",
    "RowsTrainer",
    "TaughtRows",
    "check_row_tokens",
    "load_pairs",
    "load_rows",
]
