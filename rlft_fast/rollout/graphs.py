"""Decode steps as CUDA graphs: the host launches all layers of a step at once."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.engine import power_of_two
from rlft_fast.engine.sharding import Recorder, Replay, warn_of_recording
from rlft_fast.models import PolicyModel, RowCache, padded_implementation, rope_limits

_LEAST_COLUMNS = 64
_ROOM_STEP = 256  # of the tokens of a cache, so that it is seldom made anew


class _Recorded(NamedTuple):
    logits_RV: Tensor
    replay: Replay


class _Rows(NamedTuple):
    """What a step reads, R rows of which the first are in use."""

    token_ids_R: Tensor
    position_R: Tensor
    padding_R: Tensor
    column: Tensor


def can_step(model: PolicyModel) -> bool:
    """Whether `DecodeGraphs` give the model's logits.

    Layers with a window would have other masks. Layers that count the tokens in the cache do so on the host, and so do
    rotary embeddings that may change. Attention written out ("eager") would add the mask to its scores, as numbers.
    """
    if not model.decodes_in_place or model.sees_padding or RowCache(model.model, 1, 1).has_windows:
        return False
    return padded_implementation(model.model) != "eager" and not rope_limits(model.backbone)


class DecodeGraphs:
    """`PolicyModel.next_logits` in graphs, with a cache that stays in its memory from batch to batch.

    There is a recording for each power of two of rows and of columns, and for all rows. Rows and columns beyond those
    in use are computed, too, but not read. A size runs without a graph at first, and is recorded when it comes again.
    Weights that have moved are recorded anew. If a recording fails, this is said once, and all later steps run without
    graphs.

    Args:
        model: `can_step`.
        record: records what a function launches; None: steps are as in a graph, but launched.
    """

    def __init__(self, model: PolicyModel, record: Recorder | None) -> None:
        self._model, self._record = model, record
        self._cache: RowCache | None = None
        self._rows: _Rows | None = None
        self._size = (0, 0)  # rows and tokens that the cache has room for
        self._steps: dict[tuple[int, int], _Recorded | None] = {}  # None: it has run once
        self._weights: list[torch.UntypedStorage] = []  # of the recordings
        self._is_new = True  # the cache has been cleared since the last step

    def cache(self, most_rows: int, most_tokens: int) -> RowCache:
        """An empty cache with room for so many rows and tokens, which replaces the cache before."""
        if self._cache is None or most_rows > self._size[0] or most_tokens > self._size[1]:
            rows, tokens = max(most_rows, self._size[0]), max(most_tokens, self._size[1])
            self.drop()
            self._size = (rows, -(-tokens // _ROOM_STEP) * _ROOM_STEP)
            self._cache = RowCache(self._model.model, *self._size, keeps_all=True, grows=False)
            new = partial(torch.zeros, dtype=torch.int64, device=next(self._model.parameters()).device)
            self._rows = _Rows(new(self._size[0]), new(self._size[0]), new(self._size[0]), new(1))
        self._cache.clear()
        self._is_new = True
        return self._cache

    def drop(self) -> None:
        """Frees the cache, and forgets recordings."""
        self._steps.clear()
        self._weights.clear()
        self._cache = self._rows = None

    def next_logits(self, token_ids_U: Tensor, position_U: Tensor, padding_U: Tensor, cache: RowCache) -> Tensor:
        """As `PolicyModel.next_logits`. The logits are overwritten by the next step of this size."""
        assert self._rows is not None
        if not cache.get_seq_length():  # the buffers are made by the first tokens
            return self._model.next_logits(token_ids_U, position_U, padding_U, cache)
        if self._is_new:
            self._forget_moved_weights()
        num_rows, num_columns = len(token_ids_U), cache.get_seq_length() + 1
        for own, given in zip(self._rows, (token_ids_U, position_U, padding_U), strict=False):
            own[:num_rows] = given
        self._rows.column.fill_(num_columns - 1)
        width = power_of_two(max(num_columns, _LEAST_COLUMNS))
        size = (min(power_of_two(num_rows), self._size[0]), min(width, self._size[1]))
        logits_RV = self._stepped(size, cache)
        cache.advance()
        return logits_RV[:num_rows]

    def _forget_moved_weights(self) -> None:
        weights = [parameter.untyped_storage() for parameter in self._model.parameters()]
        if [x._cdata for x in weights] != [x._cdata for x in self._weights]:
            self._steps.clear()
            self._weights = weights
        self._is_new = False

    def _stepped(self, size: tuple[int, int], cache: RowCache) -> Tensor:
        if self._record is not None and size in self._steps:
            recorded = self._steps[size] or self._recorded(size, cache, self._record)
            if recorded is not None:
                self._steps[size] = recorded
                recorded.replay()
                return recorded.logits_RV
        self._steps.setdefault(size)
        return self._launched(size, cache)

    def _launched(self, size: tuple[int, int], cache: RowCache) -> Tensor:
        assert self._rows is not None
        (rows, width), own = size, self._rows
        with cache.stepping(own.column, width):
            return self._model.next_logits(own.token_ids_R[:rows], own.position_R[:rows], own.padding_R[:rows], cache)

    def _recorded(self, size: tuple[int, int], cache: RowCache, record: Recorder) -> _Recorded | None:
        try:
            return _Recorded(*record(lambda: self._launched(size, cache)))
        except Exception as error:
            self._record = None
            self._steps.clear()
            warn_of_recording("a decode step", error)
            return None
