"""Images in packed sequences: Qwen2-VL and Qwen2.5-VL.

``Batch.multi_modal_inputs`` holds, for each sequence, what the model's processor returns: ``pixel_values`` (patches,
channels) and ``image_grid_thw`` (images, 3), or None. The vision tower turns them into as many features as the sequence
has image tokens, and these take the tokens' places.

The tower runs once per micro-batch whatever is in it, without images on a blank one that nothing uses: ranks whose data
have none run the same collectives as the others, and their gradients of the tower are zeros.

Shapes: T tokens of a micro-batch, S rows that run on this rank, P patches, I images, F features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlft_fast.data import Batch

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl")
_FIELDS = ("pixel_values", "image_grid_thw")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInputs:
    """What a vision tower needs, and where its features go.

    Args:
        pixel_values: (P, C) float32 patches of all images.
        image_grid_thw: (I, 3) int64 patches of each image along time, height and width.
        source_index: (S,) int64 what each row holds: its own token's embedding s, or feature f as S + f.
    """

    pixel_values: Tensor
    image_grid_thw: Tensor
    source_index: Tensor


def has_vision(backbone: nn.Module) -> bool:
    """Whether this is the backbone of a vision-language model."""
    return isinstance(getattr(backbone, "visual", None), nn.Module)


def embed_with_images(backbone: Any, input_ids: Tensor, images: ImageInputs) -> Tensor:
    """(1, S, D) token embeddings with image features in their places."""
    tokens = backbone.get_input_embeddings()(input_ids)[0]
    features = backbone.get_image_features(images.pixel_values, images.image_grid_thw).pooler_output
    # One index_select does without masked_scatter's wait for the device, and gives features that no row takes zeros.
    return torch.cat([tokens, *(x.to(tokens.dtype) for x in features)]).index_select(0, images.source_index)[None]


def image_positions(backbone: Any, batch: Batch) -> Tensor:
    """(F,) int64 positions of the image tokens, in the order of the features.

    Raises:
        ValueError: a sequence whose image tokens and images do not fit, or inputs other than images.
    """
    if unknown := sorted({*(batch.multi_modal_inputs or {})} - {*_FIELDS}):
        raise ValueError(f"multi_modal_inputs has {', '.join(unknown)}: only {' and '.join(_FIELDS)} are supported")
    # The policy may sample the image token like any other; then no image stands behind it.
    is_image_T = (batch.input_ids_T == backbone.config.image_token_id) & ~batch.loss_mask_T.roll(1)
    merge = backbone.config.vision_config.spatial_merge_size
    grids, pixels = (_entries(batch, name) for name in ("image_grid_thw", "pixel_values"))
    for b, (mask, grid, patches) in enumerate(zip(_sequences(batch, is_image_T), grids, pixels, strict=True)):
        expected = 0 if grid is None else int(grid.prod(-1).sum())
        given = 0 if patches is None else patches.shape[0]
        if given != expected or int(mask.sum()) * merge**2 != expected:
            raise ValueError(
                f"sequence {b} has {int(mask.sum())} image tokens and {given} patches, but its image_grid_thw is "
                f"{None if grid is None else grid.tolist()}: expected {expected} patches and a token for each "
                f"{merge} x {merge} of them"
            )
    return is_image_T.nonzero().squeeze(1)


def rope_positions(backbone: Any, batch: Batch, image_position_F: Tensor) -> Tensor:
    """(3, T) int64 position of each token in time, height and width, from the model's own ``get_rope_index``.

    Args:
        backbone: a vision-language model's.
        batch: on the CPU.
        image_position_F: from `image_positions`.

    Raises:
        ValueError: two images without a token between them.
    """
    type_T = torch.zeros_like(batch.input_ids_T)
    type_T[image_position_F] = 1
    parts = []
    for ids, types, grid in zip(
        _sequences(batch, batch.input_ids_T), _sequences(batch, type_T), _entries(batch, "image_grid_thw"), strict=True
    ):
        try:
            positions, _ = backbone.get_rope_index(ids[None], mm_token_type_ids=types[None], image_grid_thw=grid)
        except RuntimeError as error:
            raise ValueError(f"images need text between them, as in the model's chat template: {error}") from error
        parts.append(positions[:, 0])
    return torch.cat([torch.zeros(3, 0, dtype=torch.int64), *parts], dim=1)


def pixels_and_grids(backbone: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(P, C) float32 and (I, 3) int64 of all images of the batch; of one blank image where it has none."""
    pixels, grids = ([x for x in _entries(batch, name) if x is not None] for name in ("pixel_values", "image_grid_thw"))
    if pixels:
        return torch.cat(pixels).float(), torch.cat(grids)
    vision = backbone.config.vision_config
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, vision.spatial_merge_size, vision.spatial_merge_size]])
    return torch.zeros(int(grid.prod()), channels), grid


def _entries(batch: Batch, name: str) -> list[Tensor | None]:
    return (batch.multi_modal_inputs or {}).get(name) or [None] * batch.num_sequences


def _sequences(batch: Batch, values_T: Tensor) -> tuple[Tensor, ...]:
    return values_T.split(batch.lengths.tolist())
