"""`Images`: the images of a sequence, as the model's image processor returns them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images that were processed together, and the images that stand before them in the sequence.

    Args:
        key: equal for equal images of `inputs`, and for these alone.
        inputs: what the image processor of the model returns, by name: ``pixel_values`` and ``image_grid_thw`` of
            Qwen2-VL, for example.
        before: of earlier turns of an episode; None: there are none.
    """

    key: str
    inputs: Mapping[str, Tensor]
    before: "Images | None" = None

    @property
    def parts(self) -> "tuple[Images, ...]":
        """These images and all before them, in the order of the sequence."""
        return (*(() if self.before is None else self.before.parts), self)

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the parts: equal for sequences with equal images, and for these alone."""
        return tuple(part.key for part in self.parts)


def image_table(images: Iterable[Images | None]) -> dict[str, Any]:
    """The fields of a batch that hold the images of its sequences: each set of images once, and numbers of them.

    Args:
        images: of each sequence; None where it has none.

    Returns:
        ``images`` and ``image_B``, see `rlft_fast.data.Batch`; nothing if no sequence has images.
    """
    every = [*images]
    table = {own.keys: own for own in every if own is not None}
    if not table:
        return {}
    numbers = {keys: number for number, keys in enumerate(table)}
    image_B = torch.tensor([-1 if own is None else numbers[own.keys] for own in every], dtype=torch.int64)
    return {"images": (*table.values(),), "image_B": image_B}
