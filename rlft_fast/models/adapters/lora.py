"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = W x + (alpha / rank) B A x, W frozen and B = 0 at first.

peft adds the adapters of the blocks. The head has its own adapter (`LogprobHead.add_lora`), because the head never
forms its logits whole. The head of a critic or a reward model is trained itself, because it may be new. There is no
dropout: with dropout the policy of an update would differ from the policy that sampled.
"""

import contextlib
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlft_fast.models.adapters.experts import (
    adapt_experts,
    adapted_experts,
    expert_factors,
    expert_matrices,
    find_experts,
)
from rlft_fast.models.heads import LogprobHead, PolicyModel, RewardModel, RLModel
from rlft_fast.models.weights import local_part

_ADAPTER = "default"
_HEAD = "lm_head"
_SCORE = "score"


def add_lora(model: RLModel, rank: int, alpha: int, target_modules: Sequence[str]) -> None:
    """Adds adapters to the named linear layers and experts, in place, and freezes all but these and a scalar head.

    `initialize_lora` gives the adapters their values.

    Args:
        model: a model that is not sharded yet.
        rank: rank of the update of each matrix.
        alpha: the update is scaled by alpha / rank.
        target_modules: names as peft takes them; "lm_head" is the head.

    Raises:
        ImportError: peft is missing.
        ValueError: a name fits no linear layer, or one that is never called, all-linear is given for experts of another
            kind, the rank does not fit experts, the named head is a reward model's, or a weight is that of two layers.
            An adapter of a head that is tied to the embedding would have to change the embedding, too.
    """
    if _HEAD in target_modules and not isinstance(model, PolicyModel):
        raise ValueError(f"lora.target_modules has {_HEAD}, which only a policy has: leave it out")
    if _HEAD in target_modules and _is_tied(model):
        raise ValueError(
            f"lora.target_modules has {_HEAD}, which in {type(model.pretrained).__name__} is tied to the embedding: "
            "a merged model could not hold both; leave it out"
        )
    if _SCORE in target_modules and isinstance(model, RewardModel):
        raise ValueError(
            f"lora.target_modules has {_SCORE}, the head of a reward model, which is trained in full beside adapters: "
            "leave it out"
        )
    trains_head = isinstance(model, PolicyModel) or not _is_frozen(model.head)
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install peft") from error
    targets = [name for name in target_modules if name != _HEAD]
    experts = _expert_targets(model, targets)
    if targets == ["all-linear"] and not experts:
        _check_no_experts(model)
    of_experts = {name for _, names in experts for name in names}
    targets = [name for name in targets if name not in of_experts or _has_linear(model, name)]
    if targets:
        layers = ((name, x) for name, x in model.pretrained.named_modules() if not _is_router(x))
        unread = _layers_read_past_adapters(model.pretrained)
        if asked := [x for x in targets if any(f".{name}".endswith(f".{x}") for name in unread)]:
            raise ValueError(
                f"lora.target_modules has {asked[0]}, whose weight is read by the layer around it, past an adapter, "
                "which would learn nothing: leave it out"
            )
        linear = {name: x for name, x in layers if isinstance(x, (nn.Linear, Conv1D)) and name not in unread}
        # A layer that is frozen already never runs.
        frozen = [name for name, x in linear.items() if _is_frozen(x)]
        is_all = targets == ["all-linear"]
        options = peft.LoraConfig(
            r=rank, lora_alpha=alpha, exclude_modules=frozen or None, target_modules=[*linear] if is_all else targets
        )
        # In a model with a configuration, peft takes names such as up_proj for experts, as transformers 4 had them, and
        # refuses layers of Mamba, for kernels that run in train mode alone.
        hidden_from_peft = nn.Sequential(model.pretrained)
        try:
            peft.inject_adapter_in_model(options, hidden_from_peft, _ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(
                f"lora.target_modules {targets} do not fit {type(model.pretrained).__name__}: {error}"
            ) from error
        _check_adapted(model, [] if is_all else targets)
    for layer, names in experts:
        adapt_experts(layer, names, rank, alpha / rank)
    if _HEAD in target_modules and isinstance(model, PolicyModel):
        model.head.add_lora(rank, alpha)
    if not isinstance(model, PolicyModel):  # as peft's adapters: FSDP takes one dtype of all that a unit trains
        model.head.float()
    trained = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and (trains_head or "lora_" in name))


def _expert_targets(model: RLModel, targets: list[str]) -> list[tuple[nn.Module, list[str]]]:
    """The experts of layers, and the names of their matrices that are to have adapters. peft freezes all weights."""
    everything = targets == ["all-linear"]
    found = [
        (layer, [name for name in expert_matrices(layer) if everything or name in targets])
        for _, layer in find_experts(model.pretrained)
    ]
    return [(layer, names) for layer, names in found if names]


def _has_linear(model: RLModel, name: str) -> bool:
    """Whether a linear layer has this name, too."""
    return name == "all-linear" or any(
        f".{key}".endswith(f".{name}")
        for key, layer in model.pretrained.named_modules()
        if isinstance(layer, nn.Linear)
    )


def _layers_read_past_adapters(model: nn.Module) -> set[str]:
    """Names of the linear layers that are never called: those of Mamba's time steps, whose weight its scan takes."""
    return {
        f"{name}.dt_proj".removeprefix(".")
        for name, layer in model.named_modules()
        if hasattr(layer, "dt_proj") and hasattr(layer, "conv1d")
    }


def _is_router(layer: Any) -> bool:
    """Whether a layer chooses experts. In PhiMoE and Llama 4 it is a linear layer that returns more than W x."""
    return type(layer).__name__.endswith("Router")


def _is_frozen(layer: Any) -> bool:
    return not layer.weight.requires_grad


def _check_no_experts(model: RLModel) -> None:
    """Refuses all-linear for experts, whose matrices are no linear layers. peft before 0.19 would leave them out."""
    layers = [*model.pretrained.named_modules()]
    # A tower may have the vectors of all its positions in one tensor (1, positions, width).
    experts = [f"{name}.{key}" for name, layer in layers for key, x in layer.named_parameters(recurse=False)
               if x.dim() == 3 and len(x) > 1 and x.requires_grad and not isinstance(layer, nn.Conv1d)]  # fmt: skip
    if experts:
        linear = {name.rpartition(".")[2]: None for name, layer in layers if isinstance(layer, nn.Linear)}
        raise ValueError(
            f"lora.target_modules all-linear cannot adapt the experts of {type(model.pretrained).__name__} "
            f"({experts[0]}), which are no linear layers: train the whole model, or name some of its linear layers: "
            f"{', '.join(linear)}"
        )


def _check_adapted(model: RLModel, targets: list[str]) -> None:
    """Refuses layers for which peft's adapter is not W x + s B A x, and names that peft silently leaves out.

    It refuses weights that several layers have, too, as in Zamba: each layer would have an adapter of its own.
    """
    adapted = {name: layer for name, layer in model.pretrained.named_modules() if hasattr(layer, "base_layer")}
    kind = type(model.pretrained).__name__
    if unused := [x for x in targets if not any(f".{name}".endswith(f".{x}") for name in adapted)]:
        raise ValueError(f"lora.target_modules has {', '.join(unused)}, but {kind} has no such layer: leave it out")
    bases: dict[str, Any] = {name: layer.base_layer for name, layer in adapted.items()}
    if other := [name for name, base in bases.items() if _is_router(base) or not isinstance(base, nn.Linear)]:
        raise ValueError(
            f"lora.target_modules {targets or 'all-linear'} would adapt {other[0]}, which in {kind} is no plain "
            "torch.nn.Linear, and such adapters cannot be merged: name linear layers, or train the whole model"
        )
    owners = Counter(id(x) for _, x in model.pretrained.named_parameters(remove_duplicate=False))
    if tied := [name for name, base in bases.items() if owners[id(base.weight)] > 1]:
        last = {name.rpartition(".")[2] for name in tied}
        others = sorted({name.rpartition(".")[2] for name in bases} - last)
        raise ValueError(
            f"lora.target_modules {targets or 'all-linear'} would adapt {tied[0]}, whose weight in {kind} is that of "
            "another layer, too: a merged model could not hold the adapters of both; name others "
            f"({', '.join(others) or 'there are none'}), or train the whole model"
        )


def adapter_parameters(model: RLModel) -> dict[str, nn.Parameter]:
    """The parameters that are trained: all adapters, and the head of a critic or a reward model."""
    head = set() if isinstance(model, PolicyModel) else {id(parameter) for parameter in model.head.parameters()}
    return {name: x for name, x in model.named_parameters() if "lora_" in name or id(x) in head}


def _is_tied(model: RLModel) -> bool:
    embedding = model.pretrained.get_input_embeddings()
    return isinstance(model.head, LogprobHead) and getattr(embedding, "weight", None) is model.head.weight


@torch.no_grad()
def initialize_lora(model: nn.Module) -> None:
    """Sets A to random numbers seeded by its name, so that every sharding starts alike, and B to 0."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
        elif "lora_A" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(parameter.shape[-1])  # kaiming_uniform_ with a = sqrt(5), as in peft
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            local, region = local_part(parameter)
            local.copy_(whole[region])


@contextlib.contextmanager
def disabled_lora(model: PolicyModel) -> Iterator[None]:
    """Inside the context, the model computes without its adapters."""
    layers, experts = [*_layers(model), model.head], [layer for _, layer in adapted_experts(model.pretrained)]

    def enable(flag: bool) -> None:
        for layer in layers:
            layer.enable_adapters(flag)
        for layer in experts:
            layer.adapters.are_enabled = flag

    enable(False)
    try:
        yield
    finally:
        enable(True)


def low_rank_factors(model: RLModel) -> dict[str, tuple[Tensor, Tensor, float]]:
    """B, A and alpha / rank for every adapted weight, by its name in the checkpoint of the model without adapters.

    Of experts both have three dimensions, and B A has the weight's own layout.
    """
    names = {id(module): name for name, module in model.pretrained.named_modules()}
    factors = {
        f"{names[id(layer)]}.weight": (
            layer.lora_B[_ADAPTER].weight, layer.lora_A[_ADAPTER].weight, layer.scaling[_ADAPTER],
        )
        for layer in _layers(model)
    }  # fmt: skip
    for name, layer in adapted_experts(model.pretrained):
        factors |= {f"{name}.{key}": own for key, own in expert_factors(layer).items()}
    if isinstance(model, PolicyModel) and model.head.lora_A is not None and model.head.lora_B is not None:
        factors[f"{names[id(model.head)]}.weight"] = model.head.lora_B, model.head.lora_A, model.head.lora_scale
    return factors


def _layers(model: nn.Module) -> list[Any]:
    """The layers that peft has adapted."""
    return [module for module in model.modules() if hasattr(module, "lora_A") and not isinstance(module, LogprobHead)]
