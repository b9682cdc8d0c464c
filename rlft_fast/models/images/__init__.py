"""Images of vision-language models.

inputs    the rows of images in a packed forward, and rollouts of prompts with images
families  what differs between families of models

Names are imported on first use, see `rlft_fast.models`.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.models.images.families import FAMILIES, ImageFamily
    from rlft_fast.models.images.inputs import (
        VISION_MODELS,
        ImageInputs,
        blank_image,
        check_images,
        embed_with_images,
        has_three_positions,
        has_vision,
        prepare_images,
        prepare_look_ahead,
        prompts_with_images,
        rotary_positions,
        sees_ahead,
    )

__all__ = [
    "FAMILIES",
    "VISION_MODELS",
    "ImageFamily",
    "ImageInputs",
    "blank_image",
    "check_images",
    "embed_with_images",
    "has_three_positions",
    "has_vision",
    "prepare_images",
    "prepare_look_ahead",
    "prompts_with_images",
    "rotary_positions",
    "sees_ahead",
]

__getattr__ = names_on_first_use(__name__)
