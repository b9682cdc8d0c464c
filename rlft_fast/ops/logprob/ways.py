"""A way to compute log-probabilities and their gradients: an operator of torch.library, and the gradients it fills.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.problem import ARGUMENTS, SCHEMA, Problem
from rlft_fast.ops.logprob.statistics import all_reduce
from rlft_fast.ops.logprob.tiles import in_huge_pages

# Positions of the arguments that may need a gradient.
_HIDDEN, _WEIGHT, _BIAS, _ADAPTER = map(ARGUMENTS.index, ("hidden_TD", "weight_VD", "bias_V", "adapter_VE"))


class Way(ABC):
    """One of the ways of `linear_logprob` and its loss. An instance is called with a problem and the way's options.

    Attributes:
        name: of its operator.
        options: schema of what the operator takes besides the problem.
        results: schema of what it returns.
    """

    name: str
    options: str
    results: str

    def __init__(self) -> None:
        self._operator = operator(self.name, self.options, self.results, self.forward, self.empty)
        self._operator.register_autograd(self._gradients, setup_context=self._save)

    def __call__(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        return self._operator(*problem.flat(), *options)

    @abstractmethod
    def forward(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        """The results, computed below autograd."""

    @abstractmethod
    def empty(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        """Results without values, for tracing."""

    @abstractmethod
    def save(self, ctx: Any, problem: Problem, options: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        """Keeps what `backward` reads, and marks the results that have no derivative."""

    @abstractmethod
    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dhidden, dweight, dbias) from the gradients of the results, None for a gradient that nothing asks for.

        Here and below dweight is the gradient of `Problem.trained`: of the weight, or of its adapter.
        """

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.no_gradients = [[None] * len(x) if _is_tensors(x) else None for x in inputs]
        ctx.trained = _WEIGHT if inputs[_ADAPTER] is None else _ADAPTER
        ctx.set_materialize_grads(False)  # autograd would make zeros of dweight's or the kept logits' size
        self.save(ctx, Problem.of(inputs), inputs[len(ARGUMENTS) :], output)

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.needs = [ctx.needs_input_grad[i] for i in (_HIDDEN, ctx.trained, _BIAS)]
        found = self.backward(ctx, *grads)
        if torch.is_grad_enabled():  # under create_graph
            found = refuse_second_derivative(*found)
        gradients = list(ctx.no_gradients)
        gradients[_HIDDEN], gradients[ctx.trained], gradients[_BIAS] = found
        return tuple(gradients)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that raise where they are differentiated.

    Without this error, autograd takes a gradient made of saved constants, such as the jacobian of a frozen head, for a
    constant: a gradient penalty would silently lack its derivative. `torch.autograd.function.once_differentiable` does
    not raise there, because it looks at the upstream gradient alone.
    """

    @staticmethod
    def forward(ctx, *gradients):
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "a fused log-probability has no second derivative: for a gradient penalty, pass backend='reference'"
        )


def refuse_second_derivative(*gradients: Tensor | None) -> tuple[Any, ...]:
    """The same gradients, whose derivative raises RuntimeError. Meant for a backward pass under create_graph."""
    present = iter(_OnceDifferentiable.apply(*(x.detach().requires_grad_() for x in gradients if x is not None)))
    return tuple(None if x is None else next(present) for x in gradients)


def _is_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(y, Tensor) for y in x)


def operator(
    name: str, options: str, results: str,
    forward: Callable[..., tuple[Tensor, ...]], empty: Callable[..., tuple[Tensor, ...]],
) -> Any:  # fmt: skip
    """Registers ``rlft_fast::name``, which takes a problem, flattened, and the options."""

    def of_problem(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *arguments: function(Problem.of(arguments), *arguments[len(ARGUMENTS) :])

    schema = f"({', '.join(filter(None, (SCHEMA, options)))}) -> ({results})"
    registered = torch.library.custom_op(f"rlft_fast::{name}", of_problem(forward), mutates_args=(), schema=schema)
    registered.register_fake(of_problem(empty))
    return registered


# ---- gradients ------------------------------------------------------------------------------------------------------


def wanted(grads: tuple[Tensor, ...], needs: list[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dhidden, dweight, dbias) with None in place of what nothing asks for."""
    d_hidden, d_weight, d_bias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return d_hidden, d_weight, d_bias


def empty_gradients(problem: Problem, needs: list[bool]) -> tuple[Tensor, ...]:
    """(dhidden, dweight, dbias) without values, each empty if not needed."""
    inputs = (problem.hidden_TD, problem.trained, problem.bias_V)
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if x is not None and needed
        else problem.hidden_TD.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def seen_rows(grad_logprob: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """(R,) bool: the rows that the loss sees: not clipped, advantage not zero, not masked."""
    seen = grad_logprob != 0
    return seen if grad_entropy is None else seen | (grad_entropy != 0)


class Gradients(NamedTuple):
    """Outputs of a backward pass, each empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @staticmethod
    def allocate(problem: Problem, needs: list[bool], in_float: bool = False) -> Gradients:
        """Memory in the inputs' dtypes, or in float32."""
        found = empty_gradients(problem, needs)
        if in_float:
            found = tuple(x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32) for x in found)
        grads = Gradients(*map(in_huge_pages, found))
        grads.hidden.zero_()
        return grads

    def rounded_as(self, problem: Problem) -> Gradients:
        """In the inputs' dtypes."""
        inputs = (problem.hidden_TD, problem.trained, problem.bias_V)
        return Gradients(*(grad if x is None else grad.to(x.dtype) for grad, x in zip(self, inputs, strict=True)))

    def accumulators(self, in_float: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where parts of dweight and dbias are added up: float32, or the outputs themselves; None if not needed."""
        weight_sum, bias_sum = (
            None if not x.numel() else x if x.dtype == torch.float32 or not in_float
            else in_huge_pages(torch.empty_like(x, dtype=torch.float32))
            for x in (self.weight, self.bias)
        )  # fmt: skip
        return weight_sum, bias_sum

    def round_from(self, weight_sum: Tensor | None, bias_sum: Tensor | None, empty: bool) -> None:
        """Takes over the accumulators; ``empty`` says that nothing was added to them."""
        for out, total in ((self.weight, weight_sum), (self.bias, bias_sum)):
            if empty:
                out.zero_()
            elif total is not None and total is not out:
                out.copy_(total)

    def set_hidden(self, index: Tensor, grad_rows: Tensor, group: str) -> None:
        """Stores complete rows of dhidden; where the vocabulary is sharded, every rank holds a part of their sum."""
        if group:
            all_reduce(grad_rows, group)
        self.hidden[index] = grad_rows.to(self.hidden.dtype)
