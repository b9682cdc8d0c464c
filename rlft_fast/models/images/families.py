"""What differs between families of vision-language models: their images' inputs, tokens and text.

The placeholder of an image is the text of ``image_token_id``, which the model's chat template writes.

Shapes: P patches, I images. A patch of LLaVA and InternVL is a whole picture for the tower, and a patch of Qwen's
models a few pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFamily:
    """Functions of a model's configuration and of what its image processor returns.

    Attributes:
        fields: names of all inputs that the image processor returns.
        tower_fields: names of those that the model's ``get_image_features`` takes. Their first dimension joins images.
        patches: the number of patches that ``pixel_values`` must have.
        tokens: the number of tokens of each image.
        blank: inputs of a blank image.
        around: texts before and after the tokens of an image.
    """

    fields: tuple[str, ...]
    tower_fields: tuple[str, ...]
    patches: Callable[[Inputs], int]
    tokens: Callable[[Any, Inputs], list[int]]
    blank: Callable[[Any], Inputs]
    around: tuple[str, str] = ("", "")


# ---- Qwen: pixel_values (P, channels), image_grid_thw (I, 3) ---------------------------------------------------------


def _qwen_tokens(config: Any, inputs: Inputs) -> list[int]:
    return (inputs["image_grid_thw"].prod(-1) // config.vision_config.spatial_merge_size**2).tolist()


def _qwen_blank(config: Any) -> Inputs:
    vision = config.vision_config
    channels, side = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size
    return {"pixel_values": torch.zeros(side**2, channels), "image_grid_thw": torch.tensor([[1, side, side]])}


_QWEN = ImageFamily(
    fields=("pixel_values", "image_grid_thw"),
    tower_fields=("pixel_values", "image_grid_thw"),
    patches=lambda inputs: int(inputs["image_grid_thw"].prod(-1).sum()),
    tokens=_qwen_tokens,
    blank=_qwen_blank,
)


# ---- LLaVA: pixel_values (I, 3, height, width) -----------------------------------------------------------------------


def _llava_tokens(config: Any, inputs: Inputs) -> list[int]:
    """CLIP's tower has a class token beside the patches, which the strategy "default" drops. SigLIP's has none."""
    images, _, height, width = inputs["pixel_values"].shape
    size = config.vision_config.patch_size
    extra = config.vision_config.model_type == "clip_vision_model"
    dropped = config.vision_feature_select_strategy == "default"
    return [(height // size) * (width // size) + extra - dropped] * images


def _square(config: Any) -> Tensor:
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(1, config.vision_config.num_channels, height, width)


_LLAVA = ImageFamily(
    fields=("pixel_values",),
    tower_fields=("pixel_values",),
    patches=lambda inputs: len(inputs["pixel_values"]),
    tokens=_llava_tokens,
    blank=lambda config: {"pixel_values": _square(config)},
)


# ---- InternVL: pixel_values (P, 3, height, width), num_patches (I,) --------------------------------------------------


def _internvl_tokens(config: Any, inputs: Inputs) -> list[int]:
    vision = config.vision_config
    sides = [size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True)]
    each = int(sides[0] * sides[1] * config.downsample_ratio**2)
    return (inputs["num_patches"] * each).tolist()


_INTERNVL = ImageFamily(
    fields=("pixel_values", "num_patches"),
    tower_fields=("pixel_values",),
    patches=lambda inputs: int(inputs["num_patches"].sum()),
    tokens=_internvl_tokens,
    blank=lambda config: {"pixel_values": _square(config), "num_patches": torch.ones(1, dtype=torch.int64)},
    around=("<img>", "</img>"),
)

FAMILIES: dict[str, ImageFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    "llava": _LLAVA,
    "internvl": _INTERNVL,
}
"""By ``model_type``."""
