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

_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Types of models whose inputs and weights vLLM knows by the names that transformers has for them."""


def why_no_images(path: str, *, served: bool) -> str:
    """Why vLLM is given no images; empty if it takes them.

    Args:
        path: folder of the policy.
        served: whether vLLM runs in servers.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    if (found := image_family(path)) is None:
        return ""  # the data are refused for the model
    model_type = found[1].model_type
    if served:
        return "vLLM's servers are given no images: set rollout.backend to hf, or leave rollout.servers out"
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
    (family, config), inputs = found, request.images.inputs
    own = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    items = MultiModalKwargsItems.from_hf_inputs(own, _fields(own))
    lengths = family.runs(config, inputs)
    starts = _run_starts(torch.tensor([*request.token_ids]) == config.image_token_id)[: len(lengths)]
    places = [PlaceholderRange(offset=start, length=n) for start, n in zip(starts, lengths, strict=True)]
    names = [f"{request.images.key}-{number}-{version}" for number in range(len(places))]
    return mm_input([*request.token_ids], items, {"image": names}, {"image": places})


def _fields(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """How each input is cut into images."""
    from vllm.multimodal.inputs import MultiModalFieldConfig

    sizes = inputs["image_grid_thw"].prod(-1)
    return {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }


def _run_starts(mask: Tensor) -> list[int]:
    """Where each run of True begins."""
    return (mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])).nonzero().squeeze(1).tolist()
