"""Mixed precision of one process, without FSDP: there is nothing to shard, to gather or to reduce.

The parameters keep their own dtype, float32 as a rule, wherever something reads or changes them. While the model runs,
the data of each parameter is a copy in the compute dtype, made once per step or inference and not once per unit and
pass. Gradients arrive in the compute dtype and are added up in float32, as FSDP reduces them: the bits are the same,
but for `reduce_every_micro_batch` of bfloat16 weights, which FSDP adds up in bfloat16.

FSDP copies every weight and gradient several times, also where it has only one process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class NarrowWeights:
    """The copies of a model's parameters in the compute dtype, and the sums of their gradients.

    Args:
        dtype: the compute dtype.
        keeps_memory: whether copies and sums are in the same memory in every step, as CUDA graphs need.
    """

    def __init__(self, dtype: torch.dtype, keeps_memory: bool = False) -> None:
        self._dtype, self._keeps_memory = dtype, keeps_memory
        self._kept_copies: dict[nn.Parameter, Tensor] = {}
        self._kept_sums: dict[nn.Parameter, Tensor] = {}
        self._own: dict[nn.Parameter, Tensor] = {}  # data of the parameters whose copies stand in their place
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooked: set[int] = set()

    @torch.no_grad()
    def stand_in(self, model: nn.Module) -> None:
        """Puts the copies in the parameters' place, unless they are there."""
        if self._own:
            return
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                parameter.register_post_accumulate_grad_hook(self._add)
                self._hooked.add(id(parameter))
            if parameter.dtype != self._dtype:
                self._own[parameter] = parameter.data
        copies = [self._room(self._kept_copies, parameter, self._dtype) for parameter in self._own]
        if copies:
            torch._foreach_copy_(copies, [*self._own.values()])  # few launches on a GPU
        for parameter, copy in zip(self._own, copies, strict=True):
            parameter.data = copy

    def step_back(self) -> None:
        """Frees the copies, and puts the parameters' own data back."""
        for parameter, data in self._own.items():
            parameter.data = data
        self._own.clear()

    def hand_over_gradients(self) -> None:
        """Gives each parameter the sum of its gradients."""
        self.step_back()
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def room_for_sum(self, parameter: nn.Parameter) -> Tensor:
        """(*shape) float32, where the parameter's sum of gradients is, or will be."""
        return self._room(self._kept_sums, parameter, torch.float32)

    def begin_sums(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begins the sums of these parameters with 0, unless they have begun."""
        new = {p: self.room_for_sum(p) for p in parameters if p not in self._sums}
        if new:
            torch._foreach_zero_([*new.values()])
            self._sums |= new

    def free_memory(self) -> None:
        """Frees the memory that is kept for the next step, but for what is in use."""
        self._kept_copies.clear()
        self._kept_sums.clear()

    def to(self, device: torch.device | str) -> None:
        """Moves the sums of gradients."""
        self._sums = {parameter: total.to(device) for parameter, total in self._sums.items()}

    def drop_gradients(self) -> None:
        self.step_back()
        self._sums.clear()

    def _add(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = self.room_for_sum(parameter).copy_(gradient)
        else:
            total.add_(gradient)

    def _room(self, kept: dict[nn.Parameter, Tensor], parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor of the parameter's shape."""
        room = kept.get(parameter)
        if room is None:
            room = torch.empty_like(parameter.data, dtype=dtype)
            if self._keeps_memory:
                kept[parameter] = room
        return room


_narrow: WeakKeyDictionary[nn.Module, NarrowWeights] = WeakKeyDictionary()


def narrow(model: nn.Module, dtype: torch.dtype, methods: tuple[str, ...], *, keeps_memory: bool = False) -> None:
    """Has the model run in a compute dtype, in place; works on the meta device.

    Args:
        model: its forward pass, and its ``methods``, find the copies in place.
        dtype: the compute dtype.
        methods: names of further methods that run the model.
        keeps_memory: see `NarrowWeights`.
    """
    weights = _narrow[model] = NarrowWeights(dtype, keeps_memory)
    model.register_forward_pre_hook(lambda module, _: weights.stand_in(module))
    for name in methods:
        setattr(model, name, _standing_in(weights, model, getattr(type(model), name)))


def _standing_in(weights: NarrowWeights, model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        weights.stand_in(model)
        return method(model, *arguments, **options)

    return run


def narrow_weights(model: nn.Module) -> NarrowWeights | None:
    """What `narrow` has made for this model."""
    return _narrow.get(model)


@contextlib.contextmanager
def narrowed(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the data of each parameter is a copy in another dtype, unless `narrow` makes such copies anyway.

    Args:
        model: whole on this rank, and run without gradients inside.
        dtype: of the copies.
    """
    own = {} if model in _narrow else {x: x.data for x in model.parameters() if x.dtype != dtype}
    try:
        for parameter, data in own.items():
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data
