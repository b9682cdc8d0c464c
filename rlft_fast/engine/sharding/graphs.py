"""CUDA graphs of a backbone: the host launches its forward pass at once, and its backward pass.

The kernels of a small model take less time than their launches. A graph repeats launches with the sizes and addresses
that it was recorded with. So inputs are copied into the memory of the recording, weights and sums of gradients stay
where they are (`NarrowWeights`), and sizes are rounded up so that they come again (`prepare_model_inputs`). The head
and the loss, whose rows differ from micro-batch to micro-batch, are launched as before.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlft_fast.config import EngineConfig
from rlft_fast.engine.sharding.narrow import NarrowWeights, narrow_weights
from rlft_fast.errors import brief
from rlft_fast.models import ModelInputs, RLModel, final_hidden, has_routers, has_vision
from rlft_fast.ops.packing import RowIndex
from rlft_fast.world import World

_MOST_SHAPES = 64  # that are recorded; each keeps its inputs and hidden states

Replay = Callable[[], None]
T = TypeVar("T")


class Recorder(Protocol):
    """Records what a function launches. Nothing runs until the replay."""

    def __call__(self, function: Callable[[], T], /) -> tuple[T, Replay]: ...


def require_graphs(config: EngineConfig, world: World) -> None:
    """Raises ValueError where ``cuda_graphs`` is set and cannot be, before there is a model."""
    if not config.cuda_graphs:
        return
    if world.device.type != "cuda":
        raise ValueError(
            f"cuda_graphs is set, but this process computes on a {world.device.type.upper()}, which has no graphs: "
            "leave it out"
        )
    if world.size > 1:
        raise ValueError(
            f"cuda_graphs is for a single process, but there are {world.size}: FSDP gathers weights at addresses that "
            "change; leave it out"
        )


def run_in_graphs(model: RLModel, config: EngineConfig) -> None:
    """Has the model's backbone run in CUDA graphs, in place, if ``cuda_graphs`` is set.

    Raises:
        ValueError: the model runs padded, or has experts or a vision tower.
    """
    if not config.cuda_graphs:
        return
    backbone = model.backbone
    reasons = {
        "runs padded": model.padded_because, "has experts": has_routers(backbone),
        "has a vision tower": has_vision(backbone),
    }  # fmt: skip
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"cuda_graphs is for dense models of text that run packed, but {type(backbone).__name__} {found[0]}: "
            "leave it out"
        )
    weights = narrow_weights(model)
    assert weights is not None, "cuda_graphs goes with bfloat16 alone"
    model.run_backbone = BackboneGraphs(weights, CudaRecorder())


def drop_graphs(model: nn.Module) -> None:
    """Forgets recordings, because weights move. The next passes record again."""
    if isinstance(graphs := getattr(model, "run_backbone", None), BackboneGraphs):
        graphs.drop()


def warn_of_recording(what: str, error: Exception) -> None:
    """Says why something could not be recorded: the end of a recording raises, too, after what went wrong in it."""
    reason = brief(error.__context__ or error)
    warnings.warn(f"cuda_graphs: {what} could not be recorded, so none is replayed: {reason}", stacklevel=3)


class CudaRecorder:
    """Records CUDA graphs. They share memory for what lives no longer than a pass."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], T], /) -> tuple[T, Replay]:
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate meanwhile, such as those that write a checkpoint.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own
        self._pool = graph.pool()
        return result, graph.replay


@dataclass
class _Pass:
    """A recorded forward pass and, where something trains, its backward pass."""

    inputs: ModelInputs
    hidden_UD: Tensor
    forward: Replay
    gradient_UD: Tensor | None = None
    backward: Replay | None = None
    trained: tuple[nn.Parameter, ...] = ()
    """Parameters to whose sums the backward pass adds."""


class BackboneGraphs:
    """`final_hidden` in graphs: one recording for each size of the inputs, and for passes with and without gradient.

    A size runs without a graph at first, which compiles and tunes what it needs, and is recorded when it comes again.
    If a recording fails, this is said once, and all later passes run without graphs.

    Args:
        weights: of the model; they keep their memory.
        record: records what a function launches.
    """

    def __init__(self, weights: NarrowWeights, record: Recorder) -> None:
        self._weights, self._record = weights, record
        self._passes: dict[tuple[object, ...], _Pass | None] = {}  # None: it has run once
        self._anchor = torch.zeros((), requires_grad=True)  # has autograd call the backward pass
        self._num_forward = 0
        self._works = True

    def __call__(self, backbone: nn.Module, inputs: ModelInputs) -> Tensor:
        """(U, D) final hidden states. They are overwritten by the next pass of this size."""
        if not self._works or any(x is not None for x in (inputs.chunks, inputs.look_ahead, inputs.images)):
            return final_hidden(backbone, inputs)  # a recording copies no other inputs than `_tensors`
        trained = [p for p in backbone.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
        key = (bool(trained), *(x.shape for x in _tensors(inputs)), inputs.max_seqlen_q, inputs.max_seqlen_k)
        if key not in self._passes:
            if len(self._passes) < _MOST_SHAPES:
                self._passes[key] = None
            return final_hidden(backbone, inputs)
        recorded = self._passes[key] or self._recorded(backbone, inputs, trained)
        if recorded is None:
            return final_hidden(backbone, inputs)
        self._passes[key] = recorded
        return self._replayed(recorded, inputs)

    def drop(self) -> None:
        """Forgets recordings, and frees their memory."""
        self._passes.clear()
        self._weights.free_memory()

    def _recorded(self, backbone: nn.Module, inputs: ModelInputs, trained: list[nn.Parameter]) -> _Pass | None:
        own = _with_tensors(inputs, [x.clone() for x in _tensors(inputs)])
        try:
            hidden_UD, forward = self._record(lambda: final_hidden(backbone, own))
            if not trained:
                return _Pass(own, hidden_UD, forward)
            gradient_UD = torch.empty_like(hidden_UD)
            found, backward = self._record(lambda: self._add_gradients(hidden_UD, trained, gradient_UD))
            return _Pass(own, hidden_UD.detach(), forward, gradient_UD, backward, found)
        except Exception as error:
            self._works = False
            self.drop()
            warn_of_recording("a pass", error)
            return None

    def _add_gradients(
        self, hidden_UD: Tensor, trained: list[nn.Parameter], gradient_UD: Tensor
    ) -> tuple[nn.Parameter, ...]:
        """The backward pass. Its nodes of parameters, which belong to other streams, stay out of the recording."""
        gradients = torch.autograd.grad(hidden_UD, trained, gradient_UD, allow_unused=True)
        found = {p: gradient for p, gradient in zip(trained, gradients, strict=True) if gradient is not None}
        for parameter, gradient in found.items():
            self._weights.room_for_sum(parameter).add_(gradient)
        return (*found,)

    def _replayed(self, recorded: _Pass, inputs: ModelInputs) -> Tensor:
        torch._foreach_copy_(_tensors(recorded.inputs), _tensors(inputs))
        self._num_forward += 1
        if recorded.backward is None:
            recorded.forward()
            return recorded.hidden_UD
        self._weights.begin_sums(recorded.trained)
        return _Replayed.apply(self._anchor, recorded, self, self._num_forward)

    def add_gradients(self, recorded: _Pass, gradient_UD: Tensor, number: int) -> None:
        """Replays a backward pass."""
        if number != self._num_forward:
            raise RuntimeError(
                "the activations of this pass are gone, because another pass has run since: with cuda_graphs, run the "
                "backward pass before the next forward pass"
            )
        assert recorded.gradient_UD is not None
        assert recorded.backward is not None
        recorded.gradient_UD.copy_(gradient_UD)
        recorded.backward()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recorded: _Pass, graphs: BackboneGraphs, number: int) -> Tensor:
        ctx.recorded, ctx.graphs, ctx.number = recorded, graphs, number
        recorded.forward()
        return recorded.hidden_UD.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.graphs.add_gradients(ctx.recorded, gradients[0], ctx.number)
        return None, None, None, None


def _tensors(inputs: ModelInputs) -> list[Tensor]:
    """The tensors that a backbone reads."""
    own = [inputs.input_ids_U, inputs.position_ids_U, inputs.cu_seqlens_q, inputs.cu_seqlens_k]
    return own if inputs.key_index is None else [*own, *inputs.key_index]


def _with_tensors(inputs: ModelInputs, tensors: list[Tensor]) -> ModelInputs:
    ids_U, position_ids_U, cu_seqlens_q, cu_seqlens_k, *index = tensors
    return replace(
        inputs, input_ids_U=ids_U, position_ids_U=position_ids_U, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        key_index=RowIndex(*index) if index else None,
    )  # fmt: skip
