"""What differs between families of vision-language models: their images' inputs, tokens and text.

The placeholder of an image is the text of a token, which the model's chat template writes. The tokens of an image are
one run of ``image_token_id``, or several with other tokens between them.

Shapes: P patches, I images. A patch of Qwen's models is a few pixels, and a patch of all other models is a whole
picture for the tower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Inputs = Mapping[str, Tensor]


def _joined(config: Any, given: Sequence[Inputs]) -> Inputs:
    return {name: torch.cat([inputs[name] for inputs in given]) for name in given[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFamily:
    """Functions of a model's configuration and of what its image processor returns.

    Attributes:
        fields: names of all inputs that `read` returns.
        tower_fields: names of the inputs that the model's ``get_image_features`` takes. Their first dimension joins
            images.
        patches: the number of patches that ``pixel_values`` must have.
        runs: the lengths of the runs of image tokens, in the order of the images.
        runs_of_each: the number of runs of each image.
        texts: the text of each image. The last argument is the text of an image token.
        blank: inputs of a blank image.
        options: keywords of the image processor.
        read: the inputs in the output of the image processor.
        join: joins the inputs of the tower for several prompts.
        placeholder: the id of the token that a chat template writes for an image.
        sees_ahead: whether an image token also attends to the later tokens of its run.
    """

    fields: tuple[str, ...]
    tower_fields: tuple[str, ...]
    patches: Callable[[Inputs], int]
    runs: Callable[[Any, Inputs], list[int]]
    texts: Callable[[Any, Inputs, str], list[str]]
    blank: Callable[[Any], Inputs]
    runs_of_each: Callable[[Any, Inputs], list[int]]
    options: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    join: Callable[[Any, Sequence[Inputs]], Inputs] = _joined
    placeholder: Callable[[Any], int] = lambda config: config.image_token_id
    sees_ahead: bool = False


def _one_each(runs: Callable[[Any, Inputs], list[int]]) -> Callable[[Any, Inputs], list[int]]:
    return lambda config, inputs: [1 for _ in runs(config, inputs)]


def _texts_of(
    runs: Callable[[Any, Inputs], list[int]], before: str = "", after: str = ""
) -> Callable[[Any, Inputs, str], list[str]]:
    """The texts of images that are a run of tokens each, between two texts."""
    return lambda config, inputs, token: [f"{before}{token * length}{after}" for length in runs(config, inputs)]


# ---- Qwen: pixel_values (P, channels), image_grid_thw (I, 3) ---------------------------------------------------------


def _qwen_runs(config: Any, inputs: Inputs) -> list[int]:
    return (inputs["image_grid_thw"].prod(-1) // config.vision_config.spatial_merge_size**2).tolist()


def _qwen_blank(config: Any) -> Inputs:
    vision = config.vision_config
    channels, side = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size
    return {"pixel_values": torch.zeros(side**2, channels), "image_grid_thw": torch.tensor([[1, side, side]])}


_QWEN = ImageFamily(
    fields=("pixel_values", "image_grid_thw"),
    tower_fields=("pixel_values", "image_grid_thw"),
    patches=lambda inputs: int(inputs["image_grid_thw"].prod(-1).sum()),
    runs=_qwen_runs,
    runs_of_each=_one_each(_qwen_runs),
    texts=_texts_of(_qwen_runs),
    blank=_qwen_blank,
)


# ---- LLaVA: pixel_values (I, 3, height, width) -----------------------------------------------------------------------


def _llava_runs(config: Any, inputs: Inputs) -> list[int]:
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
    runs=_llava_runs,
    runs_of_each=_one_each(_llava_runs),
    texts=_texts_of(_llava_runs),
    blank=lambda config: {"pixel_values": _square(config)},
)


# ---- InternVL: pixel_values (P, 3, height, width), num_patches (I,) --------------------------------------------------


def _internvl_runs(config: Any, inputs: Inputs) -> list[int]:
    vision = config.vision_config
    sides = [size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True)]
    each = int(sides[0] * sides[1] * config.downsample_ratio**2)
    return (inputs["num_patches"] * each).tolist()


_INTERNVL = ImageFamily(
    fields=("pixel_values", "num_patches"),
    tower_fields=("pixel_values",),
    patches=lambda inputs: int(inputs["num_patches"].sum()),
    runs=_internvl_runs,
    runs_of_each=_one_each(_internvl_runs),
    texts=_texts_of(_internvl_runs, "<img>", "</img>"),
    blank=lambda config: {"pixel_values": _square(config), "num_patches": torch.ones(1, dtype=torch.int64)},
)

# ---- Idefics3 and SmolVLM: pixel_values (P, 1, 3, height, width), rows (I,), cols (I,) -------------------------------


def _idefics_read(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch of pictures, each with one image. All have one size: the mask of their pixels says nothing."""
    read = {name: torch.as_tensor(found[name][0]) for name in found if name != "pixel_attention_mask"}
    return read | {"pixel_values": read["pixel_values"].unsqueeze(1)}


def _idefics_pictures(inputs: Inputs) -> list[int]:
    """Pictures of each image: a cut image has a small picture of all of it, too."""
    return (inputs["rows"] * inputs["cols"] + 1).tolist()


def _idefics_length(config: Any, inputs: Inputs) -> int:
    height, width = inputs["pixel_values"].shape[-2:]
    size = config.vision_config.patch_size
    return (height // size) * (width // size) // config.scale_factor**2


def _idefics_texts(config: Any, inputs: Inputs, token: str) -> list[str]:
    fake, tokens, texts = "<fake_token_around_image>", token * _idefics_length(config, inputs), []
    for rows, cols in zip(inputs["rows"].tolist(), inputs["cols"].tolist(), strict=True):
        lines = ["".join(f"{fake}<row_{y + 1}_col_{x + 1}>{tokens}" for x in range(cols)) + "\n" for y in range(rows)]
        texts.append("".join(lines) + "\n" * (rows > 0) + f"{fake}<global-img>{tokens}{fake}")
    return texts


def _idefics_blank(config: Any) -> Inputs:
    """The model takes a picture of zeros for padding, and drops it."""
    one = torch.ones(1, dtype=torch.int64)
    picture = torch.ones_like(_square(config)).unsqueeze(1)
    return {"pixel_values": picture, "rows": 0 * one, "cols": 0 * one}


_IDEFICS = ImageFamily(
    fields=("pixel_values", "rows", "cols"),
    tower_fields=("pixel_values",),
    patches=lambda inputs: sum(_idefics_pictures(inputs)),
    runs=lambda config, inputs: [_idefics_length(config, inputs)] * sum(_idefics_pictures(inputs)),
    runs_of_each=lambda config, inputs: _idefics_pictures(inputs),
    texts=_idefics_texts,
    blank=_idefics_blank,
    options=lambda config: {"return_row_col_info": True},
    read=_idefics_read,
)


# ---- Mistral 3: pixel_values (I, 3, height, width) with padding below and on the right, image_sizes (I, 2) -----------


def _mistral_side(config: Any) -> int:
    """Pixels of the square that a token stands for."""
    return config.vision_config.patch_size * config.spatial_merge_size


def _mistral_grids(config: Any, inputs: Inputs) -> list[list[int]]:
    """Rows and columns of the tokens of each image."""
    return (inputs["image_sizes"] // _mistral_side(config)).tolist()


def _mistral_runs(config: Any, inputs: Inputs) -> list[int]:
    """One for each row of an image."""
    return [width for height, width in _mistral_grids(config, inputs) for _ in range(height)]


def _mistral_texts(config: Any, inputs: Inputs, token: str) -> list[str]:
    grids = _mistral_grids(config, inputs)
    return ["[IMG_BREAK]".join([token * width] * height) + "[IMG_END]" for height, width in grids]


def _mistral_blank(config: Any) -> Inputs:
    """An image of two tokens: transformers fails at an image of one token alone."""
    height, width = _mistral_side(config), 2 * _mistral_side(config)
    pixels = torch.zeros(1, config.vision_config.num_channels, height, width)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def _mistral_join(config: Any, given: Sequence[Inputs]) -> Inputs:
    """Pads the pictures of all prompts to one size. A blank image stands beside an image of one token."""
    if sum(sum(_mistral_runs(config, inputs)) for inputs in given) == 1:
        given = [*given, _mistral_blank(config)]
    pixels = [inputs["pixel_values"] for inputs in given]
    height, width = (max(x.shape[side] for x in pixels) for side in (-2, -1))
    padded = [pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in pixels]
    return _joined(config, [{**inputs, "pixel_values": x} for inputs, x in zip(given, padded, strict=True)])


_MISTRAL = ImageFamily(
    fields=("pixel_values", "image_sizes"),
    tower_fields=("pixel_values", "image_sizes"),
    patches=lambda inputs: len(inputs["image_sizes"]),
    runs=_mistral_runs,
    runs_of_each=lambda config, inputs: [height for height, _ in _mistral_grids(config, inputs)],
    texts=_mistral_texts,
    blank=_mistral_blank,
    options=lambda config: {"patch_size": _mistral_side(config)},
    join=_mistral_join,
)


# ---- Gemma 3: pixel_values (I, 3, height, width) ---------------------------------------------------------------------


def _gemma_runs(config: Any, inputs: Inputs) -> list[int]:
    return [config.mm_tokens_per_image] * len(inputs["pixel_values"])


_GEMMA = ImageFamily(
    fields=("pixel_values",),
    tower_fields=("pixel_values",),
    patches=lambda inputs: len(inputs["pixel_values"]),
    runs=_gemma_runs,
    runs_of_each=_one_each(_gemma_runs),
    texts=_texts_of(_gemma_runs, "\n\n<start_of_image>", "<end_of_image>\n\n"),
    blank=lambda config: {"pixel_values": _square(config)},
    options=lambda config: {"do_pan_and_scan": False},  # as transformers' processor of texts and images has it
    read=lambda found: {"pixel_values": found["pixel_values"]},
    placeholder=lambda config: config.boi_token_id,
    sees_ahead=True,
)

FAMILIES: dict[str, ImageFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    "llava": _LLAVA,
    "internvl": _INTERNVL,
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "mistral3": _MISTRAL,
    "gemma3": _GEMMA,
}
"""By ``model_type``."""
