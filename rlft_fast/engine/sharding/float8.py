"""Linear layers that multiply in float8, by torchao. Micikevicius et al. 2022, arXiv:2209.05433.

Weights keep their names, dtypes and shards: each matrix product casts its operands as it runs. Inputs and weights
become e4m3. Gradients of outputs become e5m2 with "tensorwise", and e4m3 otherwise.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rlft_fast.config import EngineConfig
from rlft_fast.engine.sharding.wrap import decoder_blocks
from rlft_fast.models import RLModel, name_some

_OLDEST_GPU = (8, 9)  # compute capability of Ada Lovelace
_MULTIPLE = 16  # of both sizes of a weight, for the GEMMs of a GPU


def require_float8(config: EngineConfig, device: torch.device) -> None:
    """Refuses ``float8`` where it cannot run, before there is a model. A CPU emulates it, with a warning.

    Raises:
        ValueError: torchao is missing, or the GPU does not multiply in float8.
    """
    if config.float8 is None:
        return
    if find_spec("torchao") is None:
        raise ValueError(f"float8 is {config.float8}, which needs torchao: pip install torchao, or leave float8 out")
    if device.type == "cuda":
        _check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    else:
        warnings.warn(
            "float8 is emulated on a CPU: operands are rounded as on a GPU and multiplied in float32, which takes "
            "longer than without float8",
            stacklevel=2,
        )


def _check_capability(capability: tuple[int, int], name: str) -> None:
    if capability < _OLDEST_GPU:
        found, oldest = (".".join(map(str, x)) for x in (capability, _OLDEST_GPU))
        raise ValueError(
            f"float8 needs a GPU of compute capability {oldest} or newer (Ada, Hopper, Blackwell), and {name} has "
            f"{found}: leave float8 out"
        )


def multiply_in_float8(model: RLModel, config: EngineConfig, device: torch.device) -> None:
    """Has the linear layers of the text model's blocks multiply as ``config.float8`` says, in place.

    Routers and gates of experts, adapters, the embedding, the head, and towers of images stay as they are. So do
    experts that are matrices of one tensor, which are no linear layers.

    Args:
        model: not sharded yet. Its weights may be on the meta device.
        config: of the engine.
        device: on which the model runs; a CPU emulates float8.

    Raises:
        ValueError: the blocks have no linear layer, or a layer has a size that float8 GEMMs do not take.
    """
    if config.float8 is None:
        return
    layers = dict(float8_layers(model))
    _check_sizes(layers, type(model.pretrained).__name__)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.float8)
    # The gradient of a weight sums over tokens, whose number need not be a multiple of 16.
    options = replace(recipe, pad_inner_dim=True, emulate=device.type == "cpu")
    chosen = {id(layer) for layer in layers.values()}
    convert_to_float8_training(model, config=options, module_filter_fn=lambda layer, _: id(layer) in chosen)


def float8_layers(model: RLModel) -> Iterator[tuple[str, nn.Linear]]:
    """Names and modules of the layers that `multiply_in_float8` changes."""
    decoder = cast(PreTrainedModel, model.pretrained.base_model).get_decoder()
    of_text = {id(module) for module in decoder.modules()}
    inside = {id(module) for block in decoder_blocks(model) for module in block.modules()} & of_text
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module) in inside and not any(map(_stays, name.split("."))):
            yield name, module


def _stays(part: str) -> bool:
    """Of a layer's name: a router or a gate of experts, whose choices a rounding would change, or an adapter."""
    return part in ("gate", "router", "wg") or part.endswith(("_gate", "_router")) or part.startswith("lora_")


def _check_sizes(layers: dict[str, nn.Linear], kind: str) -> None:
    if not layers:
        raise ValueError(f"float8 is for linear layers, and the blocks of {kind} have none: leave float8 out")
    wrong = [
        f"{name} ({layer.in_features} to {layer.out_features})"
        for name, layer in layers.items()
        if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE
    ]
    if wrong:
        raise ValueError(
            f"float8 multiplies matrices whose sizes are multiples of {_MULTIPLE}, and {kind} has {name_some(wrong)}: "
            "leave float8 out"
        )
