"""Images in packed sequences: Qwen-VL, LLaVA, InternVL, Idefics3, SmolVLM, Mistral 3 and Gemma 3.

`rlft_fast.data.Images` hold what the model's image processor returns. The vision tower turns it into one feature per
image token, and the feature replaces the embedding of the token. `rlft_fast.models.images.families` has what differs
from family to family.

The samples of a prompt have the same images. The tower runs on these images once, and the samples share the features.

The tower runs once per micro-batch. If the micro-batch has no image, the tower runs on a blank image, whose features
are not used, so that every rank runs the same collectives. The gradients of the tower are then zeros.

Shapes: T tokens of a micro-batch, N of them image tokens, U rows that run on this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlft_fast.data import Batch, Images
from rlft_fast.models.attention import LookAhead
from rlft_fast.models.images.families import FAMILIES, ImageFamily
from rlft_fast.ops.packing import row_index

VISION_MODELS = (*FAMILIES,)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInputs:
    """The inputs of a vision tower, and the rows that take its features.

    Args:
        tower: the tower's inputs by name, of all images.
        source_index_U: (U,) int64, the content of each row u: u for the embedding of its token, U + f for feature f.
    """

    tower: Mapping[str, Tensor]
    source_index_U: Tensor

    def to(self, device: torch.device, move: Any = Tensor.to) -> "ImageInputs":
        """The same on a device."""
        tower = {name: move(x, device) for name, x in self.tower.items()}
        return ImageInputs(tower=tower, source_index_U=move(self.source_index_U, device))


def has_vision(backbone: nn.Module) -> bool:
    """Whether this is the backbone of a vision-language model."""
    return getattr(getattr(backbone, "config", None), "model_type", None) in FAMILIES


def sees_ahead(backbone: nn.Module) -> bool:
    """Whether the tokens of an image attend to later tokens of the image."""
    return has_vision(backbone) and _family(backbone).sees_ahead


def has_three_positions(backbone: nn.Module) -> bool:
    """Whether a token has positions in time, height and width."""
    return has_vision(backbone) and hasattr(backbone, "get_rope_index")


def blank_image(backbone: Any) -> dict[str, Tensor]:
    """The inputs of the tower for a blank image."""
    family = _family(backbone)
    blank = family.blank(backbone.config)
    return {name: blank[name] for name in family.tower_fields}


def embed_with_images(backbone: Any, input_ids_U: Tensor, images: ImageInputs) -> dict[str, Any]:
    """The keywords of the text model: (1, U, D) embeddings, in which image features replace those of image tokens.

    Qwen3-VL also adds features to the hidden states of its first layers (DeepStack).
    """
    tokens_UD, source_index_U = backbone.get_input_embeddings()(input_ids_U), images.source_index_U
    found = backbone.get_image_features(**images.tower)
    # masked_scatter would wait for the device, and index_select does not. Features that no row takes get zero
    # gradients.
    rows = torch.cat([tokens_UD, *(x.to(tokens_UD.dtype) for x in found.pooler_output)])
    keywords: dict[str, Any] = {"inputs_embeds": rows.index_select(0, source_index_U)[None]}
    if deepstack := getattr(found, "deepstack_features", None):
        is_image_U = source_index_U >= len(input_ids_U)
        feature_N = source_index_U[is_image_U] - len(input_ids_U)
        keywords["visual_pos_masks"] = is_image_U[None]
        keywords["deepstack_visual_embeds"] = [torch.cat([*layer]).index_select(0, feature_N) for layer in deepstack]
    return keywords


def check_images(backbone: Any, batch: Batch) -> None:
    """Checks that all inputs are images, and that the image tokens of every sequence fit its images.

    Raises:
        ValueError: an input is no image, or a sequence, which the message names by number, does not fit; or tokens of
            an image are taught that see later tokens of the image.
    """
    family = _family(backbone)
    for own in chain.from_iterable(own.parts for own in batch.images):
        if {*own.inputs} != {*family.fields}:
            raise ValueError(
                f"images have {', '.join(sorted(own.inputs))}: expected {' and '.join(family.fields)} alone"
            )
    masks = _sequences(batch, _is_image(backbone, batch))
    for b, (mask, own) in enumerate(zip(masks, batch.images_B, strict=True)):
        given = [part.inputs["pixel_values"].shape[0] for part in _parts(own)]
        patches, lengths = [family.patches(part.inputs) for part in _parts(own)], _runs(backbone, own)
        if given != patches or _run_lengths(mask) != lengths:
            raise ValueError(
                f"sequence {b} has {sum(given)} patches and runs of {_run_lengths(mask)} image tokens, expected "
                f"{sum(patches)} patches and runs of {lengths} by the {' and '.join(family.fields)} of its images, and "
                "text between images"
            )
    if sees_ahead(backbone):
        _check_whole_runs(backbone, batch, masks)


def _check_whole_runs(backbone: Any, batch: Batch, masks: Sequence[Tensor]) -> None:
    """Raises ValueError for a run whose tokens are taught: tokens behind the last taught one do not run."""
    for b, (mask, active) in enumerate(zip(masks, _sequences(batch, batch.active_T), strict=True)):
        taught = active.nonzero().squeeze(1) + 1
        for begin, end in _bounds(mask):
            if len(inside := taught[(taught > begin) & (taught < end)]):
                raise ValueError(
                    f"sequence {b} teaches token {int(inside[0])}, a token of the image from token {begin} to "
                    f"{end - 1}, but the tokens of an image of {backbone.config.model_type} see the later tokens of "
                    "the image: leave the tokens of images out of loss_mask_T"
                )


def prepare_images(backbone: Any, batch: Batch, row_T: Tensor, num_rows: int) -> ImageInputs | None:
    """Returns the images of a micro-batch, and the rows of this rank that take their features, on the CPU.

    The tower of a rank runs on those images that rows of the rank show.

    Args:
        backbone: the model's backbone. If it has no vision tower, the result is None.
        batch: the micro-batch, checked by `check_images`.
        row_T: (T,) int64, the row of this rank that runs each token; -1 if no row of this rank runs it.
        num_rows: U.
    """
    if not has_vision(backbone):
        return None
    row_N = row_T[_is_image(backbone, batch)]
    parts = [part for own in batch.images_B for part in _parts(own)]
    source_index_U = torch.arange(num_rows)
    shown: dict[str, Images] = {}
    first: dict[str, int] = {}  # by the key of an image, the source of its first feature
    num_sources = num_rows
    for part, rows in zip(parts, row_N.split([sum(_runs_of(backbone, part)) for part in parts]), strict=True):
        runs = rows >= 0
        if not runs.any():
            continue
        if part.key not in shown:
            shown[part.key], first[part.key] = part, num_sources
            num_sources += len(rows)
        source_index_U[rows[runs]] = first[part.key] + runs.nonzero().squeeze(1)
    return ImageInputs(tower=_tower_inputs(backbone, [*shown.values()]), source_index_U=source_index_U)


def prepare_look_ahead(backbone: Any, batch: Batch, row_T: Tensor, num_rows: int) -> LookAhead | None:
    """The rows of images that attend to all rows of their run; None: the attention of all rows is causal.

    A row that sequences share has the same run in each of them: they share it only if they have the same images.

    Args:
        backbone: the model's backbone.
        batch: the micro-batch, checked by `check_images`.
        row_T: (T,) int64, the row of each token among the rows of all ranks; -1 if no row runs it.
        num_rows: of all ranks.
    """
    if not (sees_ahead(backbone) and batch.images):
        return None
    is_image_T, starts = _is_image(backbone, batch), batch.cu_seqlens.tolist()
    runs: dict[int, tuple[Tensor, Tensor]] = {}  # by its first row: its rows, and those of its keys
    for start, is_image in zip(starts, _sequences(batch, is_image_T), strict=False):
        for begin, end in _bounds(is_image):
            rows = row_T[start : start + end]
            if rows[begin] >= 0:
                runs.setdefault(int(rows[begin]), (rows[begin:], rows))
    if not runs:
        return None
    queries, keys = zip(*runs.values(), strict=True)
    return LookAhead(
        torch.cat(queries), row_index(torch.cat(keys), num_rows), _boundaries(queries), _boundaries(keys),
        max(map(len, queries)), max(map(len, keys)),
    )  # fmt: skip


def rotary_positions(backbone: Any, batch: Batch) -> Tensor:
    """(T,) int64 position of each token in its sequence. Qwen's models have (3, T): time, height and width.

    The model's own ``get_rope_index`` computes the three positions.
    """
    if not has_three_positions(backbone):
        return batch.position_ids_T
    ids, types = (_sequences(batch, x) for x in (batch.input_ids_T, _is_image(backbone, batch).long()))
    grids = [_grids(own) for own in batch.images_B]
    parts = [
        backbone.get_rope_index(x[None], mm_token_type_ids=type_[None], image_grid_thw=grid)[0][:, 0]
        for x, type_, grid in zip(ids, types, grids, strict=True)
    ]
    return torch.cat([torch.zeros(3, 0, dtype=torch.int64), *parts], dim=1)


def prompts_with_images(
    backbone: Any, ids_GL: Tensor, mask_GL: Tensor, images: Sequence[Images | None], num_begun: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """The embeddings and the positions of prompts, some of which have images, for generation.

    The last token of each prompt is left out: it is no image's, and generation runs it first.

    Args:
        backbone: the model's backbone, with a vision tower.
        ids_GL: (G, L) int64, padded on the left.
        mask_GL: (G, L), 0 at padding.
        images: of each prompt; None where it has none.
        num_begun: tokens of each prompt, padding included, that have run; 0 where tokens of images see later ones. The
            tower does not run on their images.

    Returns:
        The keywords of the text model for (G, L - 1 - num_begun) tokens, with a mask of (G, L - 1); and int64
        positions, 0 at padding: (G, L), or (3, G, L) as in `rotary_positions`.
    """
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(ids_GL, mask_GL, strict=True)]
    batch = Batch.from_samples(prompts, [[]] * len(prompts), images=images)
    new_GL = ids_GL[:, num_begun:]
    row_GL = torch.full(ids_GL.shape, -1).index_copy_(
        1, torch.arange(num_begun, ids_GL.shape[1]), torch.arange(new_GL.numel()).view(new_GL.shape)
    )
    inputs = prepare_images(backbone, batch, row_GL[mask_GL.bool().cpu()], new_GL.numel())
    assert inputs is not None
    if (inputs.source_index_U >= new_GL.numel()).any():
        keywords = embed_with_images(backbone, new_GL.flatten(), inputs.to(ids_GL.device))
    else:  # no other rank waits for the tower
        keywords = {"inputs_embeds": backbone.get_input_embeddings()(new_GL.flatten())[None]}
    for name in ("inputs_embeds", "visual_pos_masks"):
        if name in keywords:
            keywords[name] = keywords[name][0].unflatten(0, new_GL.shape)[:, :-1]
    keywords["attention_mask"] = mask_GL[:, :-1]
    if sees_ahead(backbone):
        is_image_U = inputs.source_index_U >= ids_GL.numel()
        keywords["attention_mask"] = _masks_that_see_ahead(backbone, keywords, is_image_U.view(ids_GL.shape)[:, :-1])
    position_T = rotary_positions(backbone, batch).to(ids_GL.device)
    positions = position_T.new_zeros(*position_T.shape[:-1], *ids_GL.shape)
    positions[..., mask_GL.bool()] = position_T
    return keywords, positions


def _masks_that_see_ahead(backbone: Any, keywords: Mapping[str, Any], is_image_GL: Tensor) -> dict[str, Tensor]:
    """The masks of the layers by their type, as Gemma 3's own forward makes them."""
    from transformers.models.gemma3.modeling_gemma3 import (
        create_masks_for_vision_model,
        get_block_sequence_ids_for_mask,
    )

    mask_GL = keywords["attention_mask"]
    return create_masks_for_vision_model(
        backbone.config.get_text_config(), keywords["inputs_embeds"], mask_GL, None, None,
        get_block_sequence_ids_for_mask(is_image_GL.long(), mask_GL.device),
    )  # fmt: skip


def _tower_inputs(backbone: Any, images: Sequence[Images]) -> dict[str, Tensor]:
    """The inputs of the tower for these images, or for a blank image if there is none."""
    family = _family(backbone)
    given = [{name: own.inputs[name] for name in family.tower_fields} for own in images]
    joined = family.join(backbone.config, given or [blank_image(backbone)])
    return {**joined, "pixel_values": joined["pixel_values"].float()}


def _family(backbone: Any) -> ImageFamily:
    return FAMILIES[backbone.config.model_type]


def _is_image(backbone: Any, batch: Batch) -> Tensor:
    """(T,) bool: the tokens of images, which are the first runs of image tokens of a sequence.

    A later image token stands for no image: the policy has sampled it. The loss mask may leave sampled tokens out.
    """
    is_token_T, lengths_B = batch.input_ids_T == backbone.config.image_token_id, batch.cu_seqlens.diff()
    begins_T = is_token_T & ~is_token_T.roll(1)
    starts_B = batch.cu_seqlens[:-1].long()
    begins_T[starts_B] = is_token_T[starts_B]
    run_T = begins_T.cumsum(0)
    before_B = (run_T - begins_T.long())[starts_B]
    num_runs_B = torch.tensor([len(_runs(backbone, own)) for own in batch.images_B], dtype=torch.int64)
    return is_token_T & (run_T <= (before_B + num_runs_B).repeat_interleave(lengths_B))


def _parts(own: Images | None) -> tuple[Images, ...]:
    return () if own is None else own.parts


def _runs(backbone: Any, own: Images | None) -> list[int]:
    return [length for part in _parts(own) for length in _runs_of(backbone, part)]


def _runs_of(backbone: Any, part: Images) -> list[int]:
    return _family(backbone).runs(backbone.config, part.inputs)


def _grids(own: Images | None) -> Tensor | None:
    return torch.cat([part.inputs["image_grid_thw"] for part in own.parts]) if own is not None else None


def _run_lengths(mask: Tensor) -> list[int]:
    """Lengths of the runs of True."""
    return [end - begin for begin, end in _bounds(mask)]


def _bounds(mask: Tensor) -> list[tuple[int, int]]:
    """Where each run of True begins and ends."""
    steps = pad(mask.long(), (1, 1)).diff()
    begins, ends = ((steps == step).nonzero().squeeze(1).tolist() for step in (1, -1))
    return [*zip(begins, ends, strict=True)]


def _boundaries(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _sequences(batch: Batch, values_T: Tensor) -> tuple[Tensor, ...]:
    return values_T.split(batch.lengths.tolist())
