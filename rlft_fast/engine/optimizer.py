"""The optimizer of an engine, its parameter groups by rule and by name, and its master weights."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from rlft_fast.config import OptimizerConfig
from rlft_fast.engine.torch_optim import TorchOptimizer
from rlft_fast.models import RLModel, checkpoint_tensors, head_parameters, load_weights, name_kinds, stored_head
from rlft_fast.ops import FusedAdamW

NamedParameters = Iterable[tuple[str, nn.Parameter]]
Optimizer = FusedAdamW | TorchOptimizer
"""Has ``param_groups``, ``state``, ``initialize_state``, ``move_state``, ``zero_grad``, and a ``step`` that clips."""


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a model, each once, by the names that `transformers` has for them, or the module itself."""
    if not isinstance(model, RLModel):
        return [*model.named_parameters()]
    own = dict(model.pretrained.named_parameters(remove_duplicate=False)) | head_parameters(model)
    names = {id(parameter): name.replace(".base_layer.", ".") for name, parameter in reversed(own.items())}
    return [(names.get(id(parameter), name), parameter) for name, parameter in model.named_parameters()]


def build_optimizer(parameters: NamedParameters, config: OptimizerConfig, ends: Collection[Tensor] = ()) -> Optimizer:
    """An optimizer that clips while it steps. Only matrices decay: never biases, norms or scalars.

    Args:
        parameters: with their names; frozen ones are left out.
        config: the optimizer's settings, and the settings of groups by pattern.
        ends: the parameters of the embedding and the head, and others that Muon leaves to AdamW.

    Raises:
        ValueError: a pattern fits no parameter, or see `TorchOptimizer`.
    """
    groups = parameter_groups(parameters, config)
    if config.name != "adamw":
        return TorchOptimizer(groups, config, ends)
    return FusedAdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps,
        moment_dtype=getattr(torch, config.moment_dtype), offload_moments=config.cpu_offload,
    )  # fmt: skip


def parameter_groups(parameters: NamedParameters, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of a `torch.optim.Optimizer`, see `build_optimizer`. ``initial_lr`` is the peak of a learning rate."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    # The biases of all experts of a layer are rows of one tensor.
    matrices = {id(parameter) for name, parameter in trained if parameter.dim() >= 2 and not name.endswith("bias")}
    found: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in (None, *config.groups)}
    for name, parameter in trained:
        found[next((pattern for pattern in config.groups if fnmatchcase(name, pattern)), None)].append(parameter)
    if unused := [pattern for pattern in config.groups if not found[pattern]]:
        raise ValueError(
            f"optimizer.groups has the pattern {unused[0]!r}, which no trained parameter is left for; their names are "
            f"{name_kinds(name for name, _ in trained)}"
        )
    groups = []
    for pattern, members in found.items():
        own = config.groups.get(pattern, {}) if pattern is not None else {}
        rate, decay = own.get("learning_rate", config.learning_rate), own.get("weight_decay", config.weight_decay)
        for params, weight_decay in (
            ([p for p in members if id(p) in matrices], decay),
            ([p for p in members if id(p) not in matrices], 0.0),
        ):
            groups.append({"params": params, "lr": rate, "initial_lr": rate, "weight_decay": weight_decay})
    return [group for group in groups if group["params"]]


def load_masters(path: str, model: RLModel, optimizer: Optimizer) -> None:
    """Reads float32 masters of bfloat16 weights from the model's files: made from the weights they would be rounded."""
    optimizer.initialize_state()
    head = stored_head(path, model)
    tensors = checkpoint_tensors(model.pretrained) | head
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in tensors.items()}
    masters = {name: state["master"] for name, state in states.items() if "master" in state}
    if masters:  # adapters alone are in no file
        load_weights(path, model.pretrained, into=masters, beside=head)
