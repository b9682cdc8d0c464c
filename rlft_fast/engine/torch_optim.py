"""Optimizers of `torch.optim` in the place of `FusedAdamW`: with its clipping, skipped steps, masters and state.

A step takes the gradients times the coefficient. A bfloat16 parameter has a float32 master, which the optimizer steps
in its place. Muon takes matrices; `torch.optim.AdamW` with its defaults trains all else: embeddings, the head, vectors,
and experts that are stacked into one tensor.
"""

import inspect
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlft_fast.config import OptimizerConfig
from rlft_fast.errors import brief
from rlft_fast.models import RLModel
from rlft_fast.ops import FusedAdamW
from rlft_fast.plugins import suggestion

_OURS = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "groups"}
# torch's first step has no dampening. Here the state exists before that step, and every step would have it.
_OTHER_FORMULAS = ("maximize", "differentiable", "dampening")
# ASGD's state has the learning rate of the step before, and Rprop's the rate of the first step.
_KEEP_RATE = ("ASGD", "Rprop")
Group = dict[str, Any]


class TorchOptimizer:
    """An optimizer of `torch.optim`, which clips, skips steps and keeps masters as `FusedAdamW` does.

    Args:
        groups: parameter groups, with ``lr`` and ``weight_decay``.
        config: ``name`` and ``options``.
        ends: the parameters of the embedding and the head, and biases.

    Raises:
        ValueError: there is no such class, it does not take an option or a schedule, or it cannot train the parameters.
    """

    def __init__(self, groups: Sequence[Group], config: OptimizerConfig, ends: Collection[Tensor] = ()) -> None:
        kind = torch_class(config)
        self._inner = {p: _inner(p) for group in groups for p in group["params"]}
        self._owner: dict[Tensor, torch.optim.Optimizer] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        taken = [p for p in self._inner if _takes(kind, p, any(p is end for end in ends))]
        for made, options, parameters in (
            (kind, config.options, taken),
            (torch.optim.AdamW, {}, [p for p in self._inner if not any(p is other for other in taken)]),
        ):
            if own := _narrowed(groups, parameters, self._inner):
                self._optimizers.append(_made(config, made, own, options))
                self._owner |= dict.fromkeys(parameters, self._optimizers[-1])
        self.initialize_state()

    @property
    def param_groups(self) -> list[Group]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """The tensors of each parameter's state, ``master`` included."""
        return _States(self._inner, self._owner)

    @torch.no_grad()
    def initialize_state(self) -> None:
        """Creates missing state, so that a checkpoint can be loaded into it."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not optimizer.state[parameter]:
                        _initialize(optimizer, group, parameter)

    @torch.no_grad()
    def move_state(self, device: torch.device | str) -> None:
        """Moves the state, as the parameters are moved. Numbers such as step counts stay where torch has put them."""
        for parameter, inner in self._inner.items():
            state = self._owner[parameter].state[inner]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(device)
            if inner is not parameter:
                # Assigned data would leave the shard of a DTensor where it is.
                torch.utils.swap_tensors(inner, inner.detach().to(device))

    @torch.no_grad()
    def step(self, *, coefficient: Tensor, found_inf: Tensor) -> None:
        """One step of every parameter that has a gradient, unless ``found_inf`` is not 0. Waits for the device.

        Args:
            coefficient: 0-d factor of every gradient, which is scaled in place.
            found_inf: 0-d.
        """
        if found_inf.item():
            return
        factor = coefficient.item()
        for parameter, inner in self._inner.items():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
            if inner is not parameter:
                inner.grad = None if parameter.grad is None else parameter.grad.float()
        for optimizer in self._optimizers:
            optimizer.step()
        for parameter, inner in self._inner.items():
            if inner is not parameter and inner.grad is not None:
                parameter.copy_(inner)
                inner.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for parameter in self._inner:
            parameter.grad = None


class _States(Mapping[Tensor, dict[str, Tensor]]):
    """A view of the states of several optimizers."""

    def __init__(self, inner: Mapping[Tensor, Tensor], owner: Mapping[Tensor, torch.optim.Optimizer]) -> None:
        self._inner, self._owner = inner, owner

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        inner = self._inner[parameter]
        state = self._owner[parameter].state[inner]
        master = {} if inner is parameter else {"master": inner}
        return {key: value for key, value in state.items() if isinstance(value, Tensor)} | master

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


def torch_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class of ``name``, whose options are checked.

    Raises:
        ValueError: `torch.optim` has no optimizer of this name, which takes these options and this schedule, and needs
            no closure.
    """
    name = config.name.rpartition(".")[2]
    kind = getattr(torch.optim, name, None)
    known = [own for own, kind in vars(torch.optim).items() if isinstance(kind, type) and hasattr(kind, "_init_group")]
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name}{suggestion(name, known)}")
    if name not in known:
        raise ValueError(f"optimizer.name {config.name} needs more than a gradient: take one of {', '.join(known)}")
    offered = inspect.signature(kind).parameters
    for option in config.options:
        if option in _OURS:
            raise ValueError(f"optimizer.options has {option}: set optimizer.{_OURS[option]}")
        if option not in offered or option in _OTHER_FORMULAS:
            raise ValueError(f"{config.name} takes no option {option}{suggestion(option, list(offered))}")
    decays = config.weight_decay or any(own.get("weight_decay") for own in config.groups.values())
    if decays and "weight_decay" not in offered:
        raise ValueError(f"{config.name} has no weight_decay: leave it out")
    if name in _KEEP_RATE and (config.schedule != "constant" or config.warmup_steps or config.warmup_ratio):
        raise ValueError(
            f"{config.name} keeps the learning rate in its state, and follows no schedule: set schedule: constant, "
            "without warmup_steps and warmup_ratio"
        )
    return kind


def require_trainable(config: OptimizerConfig, like: Tensor | None = None, device: torch.device | str = "cpu") -> None:
    """Steps a small parameter: an optimizer that cannot do it is refused before anything runs. All ranks must call it.

    Args:
        config: of another optimizer than ``adamw``.
        like: a parameter whose dtype and sharding the small one has; None: whole, in float32.
        device: of the parameters.

    Raises:
        ValueError: see `torch_class`; or the step fails.
    """
    torch_class(config)
    local = torch.zeros(4, 4, dtype=None if like is None else like.dtype, device=device)
    small: Tensor = local
    if isinstance(like, DTensor):
        small = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
    parameter = nn.Parameter(small)
    one, zero = torch.ones((), device=local.device), torch.zeros((), device=local.device)
    try:
        optimizer = TorchOptimizer([{"params": [parameter], "lr": 1e-3, "weight_decay": 0.0}], config)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step(coefficient=one, found_inf=zero)
    except ValueError:
        raise
    except Exception as error:
        what = "sharded parameters" if isinstance(like, DTensor) else "a parameter"
        raise ValueError(f"optimizer.name {config.name} cannot train {what}: {brief(error)}") from error


def end_parameters(model: nn.Module) -> list[Tensor]:
    """The weights of embeddings, and of the head of a model that has one; and biases, of experts in one tensor, too."""
    ends: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if isinstance(model, RLModel):
        ends.append(model.head)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    return [*(parameter for module in ends for parameter in module.parameters()), *biases]


def moment_bytes(model: nn.Module, config: OptimizerConfig, shape: Callable[[nn.Parameter], Sequence[int]]) -> int:
    """Bytes of the optimizer's state without masters. A step's float32 gradients of bfloat16 weights count, too.

    Args:
        model: with all its weights.
        config: of the optimizer.
        shape: of the part of a parameter that counts.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name == "adamw":
        dtype = getattr(torch, config.moment_dtype)
        return sum(FusedAdamW.moment_bytes(shape(parameter), dtype) for parameter in trained)
    kind, ends = torch_class(config), {id(end) for end in end_parameters(model)}
    total = 0.0
    for parameter in trained:
        own = _takes(kind, parameter, id(parameter) in ends)
        width = _state_width(kind if own else torch.optim.AdamW, json.dumps(config.options if own else {}))
        total += math.prod(shape(parameter)) * (width + 4 * (parameter.dtype == torch.bfloat16))
    return round(total)


def _takes(kind: type[torch.optim.Optimizer], parameter: Tensor, is_end: bool) -> bool:
    return kind is not getattr(torch.optim, "Muon", None) or (parameter.dim() == 2 and not is_end)


def _inner(parameter: Tensor) -> Tensor:
    """What the optimizer steps: the parameter, or its master."""
    return parameter.detach().float() if parameter.dtype in (torch.bfloat16, torch.float16) else parameter


def _narrowed(groups: Sequence[Group], parameters: list[Tensor], inner: Mapping[Tensor, Tensor]) -> list[Group]:
    """The groups with these parameters alone, in place of which the optimizer has what it steps."""
    kept = {id(parameter) for parameter in parameters}
    narrowed = [group | {"params": [inner[p] for p in group["params"] if id(p) in kept]} for group in groups]
    return [group for group in narrowed if group["params"]]


def _made(
    config: OptimizerConfig, kind: type[torch.optim.Optimizer], groups: list[Group], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    make: Callable[..., torch.optim.Optimizer] = kind
    try:
        return make(groups, **given)
    except Exception as error:
        raise ValueError(f"optimizer.options of {config.name} cannot be used: {brief(error)}") from error


def _initialize(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> None:
    """The state before the first step, as torch makes it in the first step."""
    make: Any = getattr(optimizer, "_init_group")  # noqa: B009 (torch has no public way)
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(make).parameters) - 1)]
    kept, parameter.grad = parameter.grad, torch.zeros_like(parameter)
    try:
        make(group | {"params": [parameter]}, *lists)
    finally:
        parameter.grad = kept
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:  # torch begins with the first gradient
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@cache
def _state_width(kind: type[torch.optim.Optimizer], options: str) -> float:
    """Bytes of state for each element of a large matrix. The options are JSON."""
    parameter = torch.zeros(4096, 4096, device="meta")
    config = OptimizerConfig(name=f"torch.optim.{kind.__name__}", options=json.loads(options))
    optimizer = _made(config, kind, [{"params": [parameter]}], config.options)
    _initialize(optimizer, optimizer.param_groups[0], parameter)
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.dim()) / parameter.numel()
