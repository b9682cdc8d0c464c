"""Mixed precision of one process, without FSDP: there is nothing to shard, to gather or to reduce.

The parameters keep their own dtype, float32 as a rule, wherever something reads or changes them. While the model runs,
the data of each parameter is a copy in the compute dtype, made once per step or inference and not once per unit and
pass. Gradients arrive in the compute dtype and are added up in float32, as FSDP reduces them: the bits are the same,
but for `reduce_every_micro_batch` of bfloat16 weights, which FSDP adds up in bfloat16.

FSDP copies every weight and gradient several times, also where it has only one process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class NarrowWeights:
    """The copies of a model's parameters in the compute dtype, and the sums of their gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
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
                parameter.data = parameter.data.to(self._dtype)

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
            self._sums[parameter] = gradient.to(torch.float32)
        else:
            total.add_(gradient)


_narrow: WeakKeyDictionary[nn.Module, NarrowWeights] = WeakKeyDictionary()


def narrow(model: nn.Module, dtype: torch.dtype, methods: tuple[str, ...]) -> None:
    """Has the model run in a compute dtype, in place; works on the meta device.

    Args:
        model: its forward pass, and its ``methods``, find the copies in place.
        dtype: the compute dtype.
        methods: names of further methods that run the model.
    """
    weights = _narrow[model] = NarrowWeights(dtype)
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
