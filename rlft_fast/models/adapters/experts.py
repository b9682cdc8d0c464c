"""Low-rank adapters of the experts of a layer: W_e x + (alpha / rank) B_e A_e x for each expert e.

transformers holds a matrix of all experts of a layer in one parameter, which is no linear layer. Its rows of tokens are
sorted by expert, and one grouped matrix product runs them all (``experts_implementation="grouped_mm"``). The adapters
take two further grouped products for each matrix, of the adapters' rank. Weights are not merged for a pass, as peft's
``target_parameters`` does: a merged copy of all experts of all layers would be kept for the backward.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_GRANULE = 8  # rows of a grouped product are multiples of 16 bytes on a GPU


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of experts, one for each layer, that transformers runs grouped and that are not frozen."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and expert_matrices(module):
            yield name, module


def expert_matrices(experts: Any) -> dict[str, nn.Parameter]:
    """The trained matrices of all experts of a layer by their names: (E, out, in), or (E, in, out) where transposed."""
    parameters = dict(experts.named_parameters(recurse=False))
    return {name: parameters[name] for name in _MATRICES if name in parameters and parameters[name].requires_grad}


def adapt_experts(experts: Any, names: list[str], rank: int, scale: float) -> None:
    """Adds adapters, A (E, rank, in) and B (E, out, rank), to matrices of the experts of a layer, in place.

    The adapters are float32, as peft's adapters of linear layers are: FSDP takes one dtype for what a block trains.

    Raises:
        ValueError: the rank is no multiple of 8.
    """
    if rank % _GRANULE:
        raise ValueError(
            f"lora.rank is {rank}, but adapters of experts need a multiple of {_GRANULE}, for grouped products on GPUs"
        )
    for name in names:
        weight = experts.get_parameter(name)
        num_experts, out_size, in_size = weight.shape
        if experts.is_transposed:
            in_size, out_size = out_size, in_size
        options = {"dtype": torch.float32, "device": weight.device}
        experts.register_parameter(f"lora_A_{name}", nn.Parameter(torch.empty(num_experts, rank, in_size, **options)))
        experts.register_parameter(f"lora_B_{name}", nn.Parameter(torch.empty(num_experts, out_size, rank, **options)))
    experts.adapters = _Adapters(names, scale)
    experts.forward = partial(_forward, experts)


class _Adapters:
    def __init__(self, names: list[str], scale: float) -> None:
        self.names, self.scale, self.are_enabled = names, scale, True


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of the experts that have adapters."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "adapters"))


def expert_factors(experts: Any) -> dict[str, tuple[Tensor, Tensor, float]]:
    """For each adapted matrix the two factors and the scale of its update: W + scale * up @ down, in W's own layout."""
    found = {}
    for name in experts.adapters.names:
        up, down = experts.get_parameter(f"lora_B_{name}"), experts.get_parameter(f"lora_A_{name}")
        if experts.is_transposed:
            up, down = down.transpose(1, 2), up.transpose(1, 2)
        found[name] = up, down, experts.adapters.scale
    return found


def _forward(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' ``grouped_mm_experts_forward``, with the adapters' products."""
    num_tokens, top_k = top_k_index.shape
    expert, order = top_k_index.flatten().sort()
    counted = (
        expert.float() if expert.device.type == "cpu" else expert.int()
    )  # histc, unlike bincount, has a static shape
    offsets = torch.histc(counted, experts.num_experts, 0, experts.num_experts - 1).cumsum(0, dtype=torch.int32)

    def product(x: Tensor, name: str) -> Tensor:
        return _product(experts, x, name, expert, offsets)

    inner = product(hidden[order // top_k], "gate_up_proj" if experts.has_gate else "up_proj")
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = product(inner, "down_proj") * top_k_weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].view(num_tokens, top_k, -1).sum(1).to(hidden.dtype)


def _product(experts: Any, x: Tensor, name: str, expert: Tensor, offsets: Tensor) -> Tensor:
    """(rows, out) of rows that are sorted by expert."""
    product = grouped_mm if x.dtype == torch.bfloat16 else _uncompiled
    weight = getattr(experts, name)
    out = product(x, weight if experts.is_transposed else weight.transpose(1, 2), offs=offsets)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[expert]
    adapters = experts.adapters
    if name in adapters.names and adapters.are_enabled:
        down, up = (getattr(experts, f"lora_{factor}_{name}").to(x.dtype).transpose(1, 2) for factor in "AB")
        out = out + adapters.scale * product(product(x, down, offs=offsets), up, offs=offsets)
    return out


@torch.compiler.disable
def _uncompiled(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """`grouped_mm`, of which torch.compile knows bfloat16 alone."""
    return grouped_mm(x, weight, offs=offs)
