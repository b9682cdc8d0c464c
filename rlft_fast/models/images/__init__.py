"""Images of vision-language models.

inputs    the rows of images in a packed forward, and rollouts of prompts with images
families  what differs between families of models
"""

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
