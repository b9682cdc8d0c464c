"""Equal blocks of a model. The memory of a model with many follows from two small models with a few of them."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlft_fast.engine.sharding import decoder_blocks
from rlft_fast.models import RLModel

_ENDS = 2  # blocks at each end of the repeats: FSDP prefetches and frees these differently from the blocks between
_LONGEST_PERIOD = 8  # blocks of a pattern: Gemma 3 repeats five blocks with a window and one without, so six


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """A pattern of blocks that repeats somewhere in a model's list of blocks.

    Attributes:
        name: name of the list in the model.
        first: index of the pattern's first block. Blocks before it are not part of the pattern.
        period: number of blocks in the pattern.
        number: number of repeats of the pattern.
        num_behind: number of blocks after the last repeat.
    """

    name: str
    first: int
    period: int
    number: int
    num_behind: int

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of repeats in the two small models."""
        return 2 * self._kept, 2 * self._kept + 1

    @property
    def _kept(self) -> int:
        """Number of repeats at each end that a small model keeps."""
        return -(-_ENDS // self.period)

    def blocks(self, model: RLModel) -> nn.ModuleList:
        blocks = model.get_submodule(self.name)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def shortened(self, model: RLModel, count: int) -> RLModel:
        """A copy of the model with only `count` repeats. The other blocks are not even copied, which takes seconds."""
        blocks = self.blocks(model)
        whole, begin = list(blocks), self.first + self._kept * self.period
        del blocks[begin : begin + (self.number - count) * self.period]
        try:
            return deepcopy(model)
        finally:
            del blocks[:]
            blocks.extend(whole)

    def position(self, index: int, num_blocks: int) -> int | None:
        """An index that is the same for the same block of a short and a long model, counted from the nearer end.

        None for blocks between the ends: bytes grow by equal steps there, so the largest value is at an end.
        """
        if index < self.first + self._kept * self.period:
            return index
        from_end = index - num_blocks
        return from_end if from_end >= -(self.num_behind + self._kept * self.period) else None

    def infer(self, few: int, more: int) -> int:
        """Bytes of the whole model, from the bytes of the two models with `counts` repeats."""
        return few + (self.number - self.counts[0]) * (more - few)


def find_repeats(model: RLModel) -> Repeats | None:
    """The pattern with the smallest small models; None if both together have as many blocks as the whole model."""
    name, blocks = _longest_list(model)
    kinds = _kinds(model, blocks)
    found = [
        Repeats(name=name, **pattern) for period in range(1, _LONGEST_PERIOD + 1) for pattern in _runs(kinds, period)
    ]

    def left(repeats: Repeats) -> int:
        return sum(len(kinds) - (repeats.number - count) * repeats.period for count in repeats.counts)

    best = min(found, key=left, default=None)
    return best if best is not None and best.number > best.counts[1] and left(best) < len(kinds) else None


def _longest_list(model: RLModel) -> tuple[str, list[nn.Module]]:
    """Name and blocks of the decoder's longest list. Blocks of a vision tower are not shortened."""
    units = {id(block) for block in decoder_blocks(model)}
    decoder = model.backbone.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and id(module) in inside and all(id(block) in units for block in module)
    }
    return max(lists.items(), key=lambda item: len(item[1]), default=("", []))


def _kinds(model: RLModel, blocks: list[nn.Module]) -> list[Any]:
    """A description of each block, by which equal blocks are found: modules, parameters, settings of its layer."""
    config = model.backbone.config.get_text_config().to_dict()
    per_layer = [values for values in config.values() if isinstance(values, list) and len(values) == len(blocks)]
    return [
        (
            [(name, type(module)) for name, module in block.named_modules()],
            [(name, x.shape, x.dtype, x.requires_grad) for name, x in block.named_parameters()],
            [values[i] for values in per_layer],
        )
        for i, block in enumerate(blocks)
    ]


def _runs(kinds: list[Any], period: int) -> list[dict[str, int]]:
    """Maximal runs of blocks that equal the block one period later, as arguments of `Repeats`."""
    runs, first = [], 0
    for i in range(len(kinds)):
        if i + period >= len(kinds) or kinds[i] != kinds[i + period]:
            number = (i - first) // period + 1
            behind = len(kinds) - first - number * period
            runs.append({"first": first, "period": period, "number": number, "num_behind": behind})
            first = i + 1
    return [run for run in runs if run["num_behind"] >= 0]
