"""Runs that learn from rows of data, without sampling: supervised fine-tuning, preferences and reward models.

spans       where the assistant's words stand in a conversation, as a chat template renders it
rows        rows of data as tokens, and which of them are taught
pairs       pairs of rows, of which one is preferred
reference   log-probabilities of pairs before training, inferred once and kept in a file
data        the rows of a run: to learn from, and held-out ones
trainer     `RowsTrainer`: an optimizer step on the next rows

Names are imported on first use: rows need no models.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.trainer.supervised.data import RowsData, check_row_lengths, check_row_tokens
    from rlft_fast.trainer.supervised.pairs import PairRows, load_pairs
    from rlft_fast.trainer.supervised.rows import TaughtRows, load_rows
    from rlft_fast.trainer.supervised.spans import AssistantSpans
    from rlft_fast.trainer.supervised.trainer import RowsTrainer, rows_identity

__all__ = [
    "AssistantSpans",
    "PairRows",
    "RowsData",
    "RowsTrainer",
    "TaughtRows",
    "check_row_lengths",
    "check_row_tokens",
    "load_pairs",
    "load_rows",
    "rows_identity",
]

__getattr__ = names_on_first_use(__name__)
