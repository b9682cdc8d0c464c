"""A key-value cache that takes tokens in place, and whose rows can continue other rows.

transformers' `DynamicCache` copies all keys and values with every token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlft_fast.plugins import parameter_names

_MIN_ROOM = 64  # tokens by which full buffers grow at least


class RowCache(Cache):
    """Keys and values of rows of equal length, in buffers with room for more rows and more tokens.

    Args:
        model: a model that `takes_row_cache`.
        most_rows: rows that the buffers have room for.
        most_tokens: tokens that a row ever has. Buffers grow by half as they fill, but never beyond.
        keeps_all: whether layers with a window also keep what has left the window, which `row` needs.
    """

    def __init__(
        self, model: PreTrainedModel, most_rows: int, most_tokens: int, *, keeps_all: bool = False
    ) -> None:  # fmt: skip
        layers = DynamicCache(config=model.config).layers
        self._row_layers = [_RowLayer(_window(layer), most_rows, most_tokens, keeps_all) for layer in layers]
        super().__init__(layers=[*self._row_layers])

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
    or it prepares its inputs for generation itself.

    Args:
        model: the model.
        images_alone: whether the model prepares inputs of images alone, which the caller prepares in its place.
    """
    prepares = getattr(type(model), "prepare_inputs_for_generation", None)
    takes_positions = "position_ids" in parameter_names(type(model).forward)
    prepares_itself = prepares is not GenerationMixin.prepare_inputs_for_generation and not images_alone
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


class _RowLayer(DynamicLayer):
    """The keys and values of one layer. New tokens see those from `start` to `end`; those from `first` on are kept.

    Args:
        window: positions that a token sees, its own included; None: its own and all before it.
        most_rows: see `RowCache`.
        most_tokens: see `RowCache`.
        keeps_all: see `RowCache`.
    """

    def __init__(self, window: int | None, most_rows: int, most_tokens: int, keeps_all: bool) -> None:
        super().__init__()
        self.window, self.most_rows, self.most_tokens = window, most_rows, most_tokens
        self.keeps_all = keeps_all
        self.is_sliding = window is not None  # transformers chooses the mask by it
        self.buffers: list[Tensor] = []
        self.num_tokens = self.start = self.end = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Adds (R, heads, new, dim) keys and values of the first R rows, and returns all that the new tokens see."""
        states = (key_states, value_states)
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
        room = min(kept + new + spare, kept + self.most_tokens - self.num_tokens)
        full, self.buffers = self.buffers, []
        for i, state in enumerate(states):
            heads, width = state.shape[1], state.shape[3]
            self.buffers.append(state.new_empty(self.most_rows, heads, room, width))
            if full:
                old = full[i][: self.most_rows, :, first : self.end]
                self.buffers[i][: len(old), :, :kept] = old
                full[i] = state  # frees the old buffer before the next is made
        self.start, self.end = self.start - first, kept
