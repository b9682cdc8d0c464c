"""The rows of a run: to learn from, and held-out ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import PairConfig, SFTConfig, TaughtConfig
from rlft_fast.errors import Checks
from rlft_fast.garbage import uncollected
from rlft_fast.models import image_family, load_tokenizer
from rlft_fast.trainer.learn import check_teacher
from rlft_fast.trainer.prompts import ImageReader, RowSet, Stream, named_sets, read_sets
from rlft_fast.trainer.supervised.pairs import PairRows, load_pairs
from rlft_fast.trainer.supervised.rows import TaughtRows, load_rows

Rows = TaughtRows | PairRows


@dataclass(frozen=True, kw_only=True)
class RowsData:
    """The rows of a run.

    Args:
        rows: to learn from.
        held_out: by the name of their set.
        stream: the order in which a run takes the rows.
    """

    rows: Rows
    held_out: dict[str, Rows]
    stream: Stream

    @classmethod
    @uncollected()
    def load(cls, config: TaughtConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> "RowsData":
        """Reads and checks all rows.

        Args:
            config: of the run.
            tokenizer: of the model; None: it is loaded.

        Raises:
            ValueError: rows cannot be used. The message has everything that was found.
        """
        tokenizer, checks = tokenizer or load_tokenizer(config.model), Checks()
        if isinstance(config, SFTConfig):
            checks.run(lambda: check_teacher(config.teacher, tokenizer))
        sets = {} if config.evaluation is None else config.evaluation.sets
        most = None if config.evaluation is None else config.evaluation.max_rows
        given = [checks.run(lambda x=x: read_sets(config.data, x, most)) for x in (None, *sets.values())]
        found = [checks.run(lambda x=x: _load(config, tokenizer, x)) for x in given if x is not None]
        checks.raise_found()
        rows, *held_out = (x for x in found if x is not None)
        held_out = dict(zip(sets, held_out, strict=True))
        return cls(rows=rows, held_out=held_out, stream=Stream.of(config.data, rows.sizes))

    @property
    def named(self) -> dict[str, Rows]:
        """The rows by what they are, for messages."""
        return named_sets(self.rows, self.held_out)

    @property
    def descriptions(self) -> dict[str, Any]:
        """What tells the data from other data, by set."""
        sets = {f"held_out{'_' * bool(name)}{name}": found.description for name, found in self.held_out.items()}
        return {"training": self.rows.description} | sets


def _load(config: TaughtConfig, tokenizer: PreTrainedTokenizerBase, sets: Sequence[RowSet]) -> Rows:
    if isinstance(config, SFTConfig):
        rows = load_rows(config.data, tokenizer, config.model, sets, ImageReader.of_model(config.model, tokenizer))
        _check_images(config, rows)
        return rows
    assert isinstance(config, PairConfig)
    return load_pairs(config.data, tokenizer, config.model, sets, scored=config.head == "score")


def _check_images(config: SFTConfig, rows: TaughtRows) -> None:
    """Raises ValueError for images in a run with a part that would not see them."""
    takes_none = {
        "cluster": config.cluster is not None,
        "the teacher": config.teacher is not None and image_family(config.teacher.model) is None,
    }
    if rows.images and (found := [key for key, holds in takes_none.items() if holds]):
        raise ValueError(
            f"row {min(rows.images)} of the rows that are kept (counted from 0) has images, which do not reach "
            f"{' and '.join(found)}: leave it out, or the rows with images"
        )


def check_row_tokens(num_embeddings: int, data: RowsData) -> None:
    """Raises ValueError for a token without an embedding: on a GPU its look-up ends the process without a reason."""
    highest = max(rows.highest_token for rows in (data.rows, *data.held_out.values()))
    if highest >= num_embeddings:
        raise ValueError(
            f"model has embeddings of {num_embeddings} tokens, but the rows have the token {highest}: the tokenizer in "
            "its folder is of another model, or knows tokens that were added without new embeddings"
        )


def check_row_lengths(key: str, limit: int | None, data: RowsData) -> None:
    """Raises ValueError for rows that are longer than a model's positions.

    Args:
        key: of the model, for the message.
        limit: `rlft_fast.models.position_limit` of the model.
        data: of the run.
    """
    longest = max(rows.longest for rows in (data.rows, *data.held_out.values()))
    if limit is not None and longest > limit:
        raise ValueError(
            f"{key} takes sequences of up to {limit} tokens, beyond which its positions end or its rotary embeddings "
            f"change, and the rows have up to {longest}: lower data.max_sequence_tokens, and see data.overlong"
        )
