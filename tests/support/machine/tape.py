"""Records what a function computes on a CPU, and repeats it, as a CUDA graph repeats what was launched."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlft_fast.engine import state
from rlft_fast.engine.sharding import graphs
from rlft_fast.models.attention import functions
from rlft_fast.rollout import factory

T = TypeVar("T")
R = TypeVar("R")


class Tape:
    """Records functions. As in a CUDA graph:

    - sizes, numbers and tensors of the host are those of the recording, whatever they are when it is replayed;
    - every tensor is in the memory of the recording, and a replay overwrites it;
    - a recording computes nothing: memory from before it stays as it was;
    - an operator that waits for a value raises.

    Attributes:
        num_recorded: recordings made.
        num_replayed: replays of all recordings.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, function: Callable[[], T], /) -> tuple[T, Callable[[], None]]:
        with _NoReads(), _Recording() as recording:
            result = function()
        recording.restore()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            recording.replay()

        return result, replay


def record_on_cpu(monkeypatch: pytest.MonkeyPatch, recorder: R) -> R:
    """Engines with ``cuda_graphs`` record so on the CPU, with attention as on a GPU."""
    for module in (graphs, factory):
        monkeypatch.setattr(module, "CudaRecorder", lambda: recorder)
    monkeypatch.setattr(state, "require_graphs", lambda *_: None)
    monkeypatch.setattr(functions, "_has_varlen_kernel", lambda _: True)
    monkeypatch.setattr(varlen, "varlen_attn", _masked_attention)
    return recorder


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, **options) -> Tensor:
    """`varlen_attn` by masks: like the kernel it reads the boundaries on the device."""
    segment_q, segment_k = (
        torch.bucketize(torch.arange(len(x)), cu[1:], right=True) for x, cu in ((q, cu_q), (k, cu_k))
    )
    rows = torch.arange(len(q)) - cu_q[segment_q + 1]  # -1 for the last of a segment
    keys = torch.arange(len(k)) - cu_k[segment_k + 1]
    mask = (segment_q[:, None] == segment_k) & (keys <= rows[:, None])
    if options["window_size"][0] >= 0:
        mask &= keys >= rows[:, None] - options["window_size"][0]
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
    scores = options["scale"] * q.transpose(0, 1) @ k.transpose(1, 2)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1).bfloat16()


class _NoReads(TorchFunctionMode):
    """Refuses what a GPU would wait for, and what a CPU reads without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__):
            raise RuntimeError(f"{func.__name__} waits for the device")
        return func(*args, **kwargs or {})


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: set[int] = set()  # memory that the recording has made
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} waits for the device")
        for tensor in _written(func, args, kwargs):
            if _memory(tensor) not in self._own:
                self._before.setdefault(_memory(tensor), (tensor, tensor.clone()))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and _memory(x) not in given]
        self._own |= {_memory(x) for x in new}
        self._calls.append((func, args, kwargs, new))
        return result

    def restore(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, new in self._calls:
            result = func(*args, **kwargs)
            found = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            for tensor, again in zip(new, found if new else (), strict=True):
                tensor.copy_(again)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    names = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return [x for name in names for x in tree_leaves(given.get(name)) if isinstance(x, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
