"""Blocks that a model repeats: two models of a few of them tell what memory a model of many needs."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from rlft_fast.engine.sharding import decoder_blocks
from rlft_fast.models import RLModel, has_vision

_ENDS = 2  # blocks at each end of the repeats, where units are prefetched and given back in another way than between
_LONGEST_PERIOD = 8  # blocks: five with a window and one without are one pattern of six (Gemma 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """A pattern of blocks, one after the other the same, somewhere in a model's list of blocks.

    Attributes:
        name: of the list in the model.
        first: block with which the pattern begins; those before it are others.
        period: blocks of the pattern.
        number: how often it is there.
        num_behind: blocks that follow it.
    """

    name: str
    first: int
    period: int
    number: int
    num_behind: int

    @property
    def counts(self) -> tuple[int, int]:
        """How many of the repeats the two small models have."""
        return 2 * self._kept, 2 * self._kept + 1

    @property
    def _kept(self) -> int:
        """Repeats at each end that a small model has."""
        return -(-_ENDS // self.period)

    def blocks(self, model: RLModel) -> nn.ModuleList:
        blocks = model.get_submodule(self.name)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def shorten(self, model: RLModel, count: int) -> None:
        """Takes all but so many of the repeats out of the model."""
        begin = self.first + self._kept * self.period
        del self.blocks(model)[begin : begin + (self.number - count) * self.period]

    def position(self, index: int, num_blocks: int) -> int | None:
        """The same number for the same block of a short and a long model, counted from its nearer end.

        None for those between: what holds for the ends of a run of equal steps holds within it.
        """
        if index < self.first + self._kept * self.period:
            return index
        from_end = index - num_blocks
        return from_end if from_end >= -(self.num_behind + self._kept * self.period) else None

    def infer(self, few: int, more: int) -> int:
        """Bytes with all repeats, from those with `counts` of them."""
        return few + (self.number - self.counts[0]) * (more - few)


def find_repeats(model: RLModel) -> Repeats | None:
    """The pattern that leaves the fewest blocks, or None where two small models would not be smaller than the whole."""
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
    """The list of the decoder's blocks; a vision tower's stay as they are."""
    units = {id(block) for block in decoder_blocks(model)}
    decoder = model.backbone.get_submodule("language_model") if has_vision(model.backbone) else model.backbone
    inside = {id(module) for module in decoder.modules()}
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and id(module) in inside and all(id(block) in units for block in module)
    }
    return max(lists.items(), key=lambda item: len(item[1]), default=("", []))


def _kinds(model: RLModel, blocks: list[nn.Module]) -> list[Any]:
    """What tells one block from another: modules, parameters, and what the configuration lists for each layer."""
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
    """Where blocks are the same as those a period later, as far as possible."""
    runs, first = [], 0
    for i in range(len(kinds)):
        if i + period >= len(kinds) or kinds[i] != kinds[i + period]:
            number = (i - first) // period + 1
            behind = len(kinds) - first - number * period
            runs.append({"first": first, "period": period, "number": number, "num_behind": behind})
            first = i + 1
    return [run for run in runs if run["num_behind"] >= 0]
