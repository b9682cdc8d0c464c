"""Gradients, their exact norm, and a count of the passes over them."""

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlft_fast.ops.optim import reference

# The usual one, the ones with kernels or branches of their own, and one that takes the general path.
NORM_TYPES = [2.0, 1.0, 3.0, math.inf, 3.3]  # float32 does not hold 3.3


def parameter(gradient: Tensor | None, like: Tensor | None = None) -> Tensor:
    leaf = torch.zeros_like(gradient if like is None else like).requires_grad_()
    leaf.grad = gradient
    return leaf


def random_gradients(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def exact_norm(gradients: list[Tensor], norm_type: float = 2.0) -> float:
    return reference.grad_norm(gradients, norm_type).item()


class CountCalls(TorchDispatchMode):
    """Counts the calls of our operators, each of which is one pass over its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "rlft_fast":
            self.calls.append((function._opname, len(args[0])))
        return function(*args, **(kwargs or {}))
