"""`Images`: the images of a prompt, as the model's image processor returns them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one prompt.

    Args:
        key: equal for equal images, and for these alone.
        inputs: what the image processor of the model returns, by name: ``pixel_values`` and ``image_grid_thw`` of
            Qwen2-VL, for example.
    """

    key: str
    inputs: Mapping[str, Tensor]


def image_table(images: Iterable[Images | None]) -> dict[str, Any]:
    """The fields of a batch that hold the images of its sequences: each set of images once, and numbers of them.

    Args:
        images: of each sequence; None where it has none.

    Returns:
        ``images`` and ``image_B``, see `rlft_fast.data.Batch`; nothing if no sequence has images.
    """
    every = [*images]
    table = {own.key: own for own in every if own is not None}
    if not table:
        return {}
    numbers = {key: number for number, key in enumerate(table)}
    image_B = torch.tensor([-1 if own is None else numbers[own.key] for own in every], dtype=torch.int64)
    return {"images": (*table.values(),), "image_B": image_B}
