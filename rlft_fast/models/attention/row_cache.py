"""A key-value cache that takes tokens in place, and whose rows can continue other rows.

transformers' `DynamicCache` copies all keys and values with every token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlft_fast.plugins import parameter_names

_MIN_ROOM = 64  # tokens by which full buffers grow at least
# Models that prepare inputs themselves to drop their cache where rotary embeddings change, by the padded width and also
# where nothing changes. Sequences stay below: `rlft_fast.models.architectures.require_fixed_rope`.
_DROP_CACHE = ("phi3",)


class RowCache(Cache):
    """Keys and values of rows of equal length, in buffers with room for more rows and more tokens.

    Args:
        model: a model that `takes_row_cache`.
        most_rows: rows that the buffers have room for.
        most_tokens: tokens that a row ever has. Buffers grow by half as they fill, but never beyond.
        keeps_all: whether layers with a window also keep what has left the window, which `row` needs.
        grows: False: buffers have room for `most_tokens` from the beginning, and stay where they are.
    """

    def __init__(
        self, model: PreTrainedModel, most_rows: int, most_tokens: int, *, keeps_all: bool = False, grows: bool = True
    ) -> None:  # fmt: skip
        layers = DynamicCache(config=model.config).layers
        self._row_layers = [_RowLayer(_window(layer), most_rows, most_tokens, keeps_all, grows) for layer in layers]
        self._step: _Step | None = None
        super().__init__(layers=[*self._row_layers])

    @property
    def has_windows(self) -> bool:
        return any(layer.window is not None for layer in self._row_layers)

    def clear(self) -> None:
        """Takes all tokens out. Buffers stay; they hold 0, because a step multiplies what it masks by 0."""
        for layer in self._row_layers:
            layer.num_tokens = layer.start = layer.end = 0
        if buffers := [buffer for layer in self._row_layers for buffer in layer.buffers]:
            torch._foreach_zero_(buffers)

    @contextmanager
    def stepping(self, column: Tensor, width: int) -> Iterator[None]:
        """Inside, a pass adds one token to rows at a column that the device knows alone. `advance` counts it.

        So all that the host knows is the same in every pass, as a CUDA graph needs.

        Args:
            column: (1,) int64, the number of columns before.
            width: columns that the pass reads; those from `column` on are masked.
        """
        step = _Step(column, width)
        for holder in (self, *self._row_layers):
            holder._step = step
        try:
            yield
        finally:
            for holder in (self, *self._row_layers):
                holder._step = None

    def advance(self) -> None:
        for layer in self._row_layers:
            layer.end, layer.num_tokens = layer.end + 1, layer.num_tokens + 1

    def mask(self, padding_U: Tensor) -> Tensor:
        """What the next token of each row sees, as the model takes it: (U, L) int64, or (U, 1, 1, L) bool in a step.

        Args:
            padding_U: (U,) int64 padding at the left of each row.
        """
        if self._step is None:
            return (torch.arange(self.get_seq_length() + 1, device=padding_U.device) >= padding_U[:, None]).long()
        column, width = self._step
        columns = torch.arange(width, device=padding_U.device)
        first_U = padding_U.minimum(column)  # also rows that are not in use see a token
        return ((columns >= first_U[:, None]) & (columns <= column))[:, None, None]

    def row(self, row: int, padding: int) -> "RowStates":
        """A copy of the keys and values of a row, without the padding at its left. The cache has to keep all."""
        return [layer.row(row, padding) for layer in self._row_layers]

    def begin(self, rows: Sequence["RowStates | None"], paddings: Sequence[int], num_tokens: int) -> None:
        """Fills the empty cache with the first tokens of rows, so that each row has `num_tokens`, padding included.

        Args:
            rows: of `row`, each with at least as many tokens as are taken from it; None: padding alone. One is not
                None.
            paddings: tokens of padding at the left of each row; `num_tokens` or more: the row has nothing else yet.
            num_tokens: at least 1.
        """
        given = next(row for row in rows if row is not None)
        for number, layer in enumerate(self._row_layers):
            layer.update(
                *(
                    torch.stack([
                        _behind(padding, row[number][i], num_tokens) if row is not None and padding < num_tokens
                        else like.new_zeros(len(like), num_tokens, like.shape[2])
                        for row, padding in zip(rows, paddings, strict=True)
                    ])
                    for i, like in enumerate(given[number])
                )
            )  # fmt: skip

    def copy_rows(self, sources: Tensor, targets: Tensor, most_rows: int) -> None:
        """Makes the (n,) rows `targets` equal to the rows `sources`, none of which is a target.

        Buffers that grow from now on have room for `most_rows`.
        """
        for layer in self._row_layers:
            layer.most_rows = most_rows
            if len(targets):
                layer.copy_rows(sources, targets)


def takes_row_cache(model: PreTrainedModel, *, images_alone: bool = False) -> bool:
    """Whether the next logits of a model depend on tokens, positions, a mask, and keys and values alone.

    Decided by the model's class and configuration: its cache has other layers, it has an encoder or a recurrent state,
    or it prepares its inputs for generation itself, other than Phi-3.

    Args:
        model: the model.
        images_alone: whether the model prepares inputs of images alone, which the caller prepares in its place.
    """
    prepares = getattr(type(model), "prepare_inputs_for_generation", None)
    takes_positions = "position_ids" in parameter_names(type(model).forward)
    is_prepared = images_alone or model.config.model_type in _DROP_CACHE
    prepares_itself = prepares is not GenerationMixin.prepare_inputs_for_generation and not is_prepared
    if prepares_itself or not takes_positions:
        return False
    if model.config.is_encoder_decoder or model._is_stateful:
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def cache_argument(function: Callable[..., object]) -> str:
    """The name by which a forward takes its cache. transformers 5.24 renamed it and warns of the old name."""
    return "cache" if "cache" in parameter_names(function) else "past_key_values"


RowStates = list[tuple[Tensor, Tensor]]
"""The keys and values of one row: in each layer (heads, tokens, dim) each."""


def _behind(padding: int, states: Tensor, num_tokens: int) -> Tensor:
    """(heads, num_tokens, dim) zeros, and behind them the first of the states."""
    return pad(states[:, : num_tokens - padding], (0, 0, padding, 0))


def _window(layer: object) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


class _Step(NamedTuple):
    """See `RowCache.stepping`."""

    column: Tensor
    width: int


class _RowLayer(DynamicLayer):
    """The keys and values of one layer. New tokens see those from `start` to `end`; those from `first` on are kept.

    Args:
        window: positions that a token sees, its own included; None: its own and all before it.
        most_rows: see `RowCache`.
        most_tokens: see `RowCache`.
        keeps_all: see `RowCache`.
        grows: see `RowCache`.
    """

    def __init__(self, window: int | None, most_rows: int, most_tokens: int, keeps_all: bool, grows: bool) -> None:
        super().__init__()
        self.window, self.most_rows, self.most_tokens = window, most_rows, most_tokens
        self.keeps_all, self.grows = keeps_all, grows
        self._step: _Step | None = None
        self.is_sliding = window is not None  # transformers chooses the mask by it
        self.buffers: list[Tensor] = []
        self.num_tokens = self.start = self.end = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Adds (R, heads, new, dim) keys and values of the first R rows, and returns all that the new tokens see."""
        states = (key_states, value_states)
        if self._step is not None:
            return self._put(states, *self._step)
        rows, new = len(key_states), key_states.shape[2]
        if not self.buffers or self.end + new > self.buffers[0].shape[2]:
            self._make_room(states)
        begin, self.end = self.end, self.end + new
        for buffer, state in zip(self.buffers, states, strict=True):
            buffer[:rows, :, begin : self.end] = state
        keys, values = (buffer[:rows, :, self.start : self.end] for buffer in self.buffers)
        self.num_tokens += new
        if self.window is not None:
            self.start = max(self.start, self.end - self.window + 1)
        return keys, values

    def _put(self, states: tuple[Tensor, Tensor], column: Tensor, width: int) -> tuple[Tensor, Tensor]:
        rows = len(states[0])
        for buffer, state in zip(self.buffers, states, strict=True):
            buffer[:rows].index_copy_(2, column, state)
        keys, values = (buffer[:rows, :, :width] for buffer in self.buffers)
        return keys, values

    @property
    def first(self) -> int:
        return 0 if self.keeps_all else self.start

    def row(self, row: int, padding: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[row, :, padding : self.end].clone() for buffer in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that new tokens see, and the position of the first."""
        kept = self.end - self.start
        return kept + query_length, self.num_tokens - kept

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        for buffer in self.buffers:
            kept = buffer[:, :, self.first : self.end]
            kept.index_copy_(0, targets, kept.index_select(0, sources))

    def _make_room(self, states: Sequence[Tensor]) -> None:
        first, kept, new = self.first, self.end - self.first, states[0].shape[2]
        spare = _MIN_ROOM if self.window and not self.keeps_all else max(_MIN_ROOM, kept // 2)
        room = min(kept + new + spare, kept + self.most_tokens - self.num_tokens) if self.grows else self.most_tokens
        full, self.buffers = self.buffers, []
        for i, state in enumerate(states):
            heads, width = state.shape[1], state.shape[3]
            make = state.new_empty if self.grows else state.new_zeros
            self.buffers.append(make(self.most_rows, heads, room, width))
            if full:
                old = full[i][: self.most_rows, :, first : self.end]
                self.buffers[i][: len(old), :, :kept] = old
                full[i] = state  # frees the old buffer before the next is made
        self.start, self.end = self.start - first, kept
