"""Prompts with images for vLLM: the tokens and the tower's inputs that the policy is trained with.

vLLM would otherwise read the images, and write their tokens, by a processor of its own. It takes prompts that are
processed already, and so samples from the same tokens and pixels by which the policy's log-probabilities are computed.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlft_fast.models import image_family
from rlft_fast.rollout.types import Request, SampledModel

_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "idefics3", "smolvlm", "mistral3", "llava")
"""Types of models that were compared on CPUs, where vLLM 0.32 lets no token of Gemma 3's images see later ones."""


def why_no_images(path: str, *, served: bool, shared: bool = False) -> str:
    """Why vLLM is given no images; empty if it takes them.

    Args:
        path: folder of the policy.
        served: whether vLLM runs in servers.
        shared: whether several ranks share one vLLM, see `gather_requests`.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    if (found := image_family(path)) is None:
        return ""  # the data are refused for the model
    model_type = found[1].model_type
    if served:
        return "vLLM's servers are given no images: set rollout.backend to hf, or leave rollout.servers out"
    if shared:
        return (
            "processes that share a vLLM do not exchange images: set rollout.vllm.tensor_parallel to 1, or "
            "rollout.backend to hf"
        )
    if model_type not in _MODELS:
        return f"vLLM is given images of {', '.join(_MODELS)} alone, not of {model_type}: set rollout.backend to hf"
    if find_spec("torchvision") is None:
        return "vLLM needs torchvision for images: pip install torchvision, or set rollout.backend to hf"
    return ""


def prompt_with_images(request: Request, model: SampledModel, version: int) -> Any:
    """The prompt as vLLM's engine takes it after its own processing.

    Args:
        request: with images of a model of `why_no_images`.
        model: that is sampled from.
        version: of the weights. vLLM keeps what the tower makes of an image, by its name.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    found = image_family(model.path)
    assert found is not None
    assert request.images is not None
    (family, config), parts = found, request.images.parts
    given = [_items(config, part.inputs) for part in parts]
    cast = [{name: _cast(x, model.dtype) for name, x in own.items()} for own, _ in given]
    every = [MultiModalKwargsItems.from_hf_inputs(own, cut) for own, (_, cut) in zip(cast, given, strict=True)]
    items = MultiModalKwargsItems({"image": [item for own in every for item in own["image"]]})
    is_image = torch.tensor([*request.token_ids]) == config.image_token_id
    starts, lengths = _run_starts(is_image), [n for part in parts for n in family.runs(config, part.inputs)]
    places: list[Any] = []
    names, first = [], 0
    for part in parts:
        for number, runs in enumerate(family.runs_of_each(config, part.inputs)):
            last = first + runs - 1
            begin, end = starts[first], starts[last] + lengths[last]
            is_embed = is_image[begin:end] if runs > 1 else None  # text stands between its runs
            places.append(PlaceholderRange(offset=begin, length=end - begin, is_embed=is_embed))
            names.append(f"{part.key}-{number}-{version}")
            first += runs
    return mm_input([*request.token_ids], items, {"image": names}, {"image": places})


def _cast(x: Tensor | list[Tensor], dtype: torch.dtype) -> Any:
    if isinstance(x, list):
        return [_cast(own, dtype) for own in x]
    return x.to(dtype) if x.is_floating_point() else x


def _items(config: Any, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs by vLLM's names, and how each is cut into images."""
    from vllm.multimodal.inputs import MultiModalFieldConfig

    each, cut = MultiModalFieldConfig.batched, MultiModalFieldConfig.flat_from_sizes
    pixels, kind = inputs["pixel_values"], config.model_type
    if kind == "llava":
        return {"pixel_values": pixels}, {"pixel_values": each("image")}
    if kind == "mistral3":  # without the padding to one size
        sizes = inputs["image_sizes"].tolist()
        own = [x[:, :height, :width] for x, (height, width) in zip(pixels, sizes, strict=True)]
        return {"pixel_values": own}, {"pixel_values": each("image")}
    if kind == "internvl":
        sizes = inputs["num_patches"]
        return (
            {"pixel_values": pixels, "image_num_patches": sizes, "image_token_id": torch.tensor(config.image_token_id)},
            {
                "pixel_values": cut("image", sizes), "image_num_patches": each("image", keep_on_cpu=True),
                "image_token_id": MultiModalFieldConfig.shared("image", len(sizes), keep_on_cpu=True),
            },
        )  # fmt: skip
    if kind in ("idefics3", "smolvlm"):
        sizes, pictures = inputs["rows"] * inputs["cols"] + 1, pixels.squeeze(1)
        mask = torch.ones(len(pictures), *pictures.shape[-2:], dtype=torch.bool)
        return (
            {"pixel_values": pictures, "pixel_attention_mask": mask, "num_patches": sizes},
            {
                "pixel_values": cut("image", sizes), "pixel_attention_mask": cut("image", sizes),
                "num_patches": each("image", keep_on_cpu=True),
            },
        )  # fmt: skip
    sizes = inputs["image_grid_thw"].prod(-1)
    return {**inputs}, {"pixel_values": cut("image", sizes), "image_grid_thw": each("image", keep_on_cpu=True)}


def _run_starts(mask: Tensor) -> list[int]:
    """Where each run of True begins."""
    return (mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])).nonzero().squeeze(1).tolist()
