"""`python -m benchmarks.prediction.counting T,D,V ...`: what the head's ways do on a pretended GPU, as JSON lines."""

from benchmarks.support import fake_gpu  # before torch, which asks once whether there is a GPU

fake_gpu.install()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from benchmarks.ops.ways import ppo_clip  # noqa: E402
from benchmarks.prediction.counts import WAYS, Counts, Gemm, Shape  # noqa: E402
from rlft_fast.ops import linear_logprob, linear_logprob_loss  # noqa: E402

aten = torch.ops.aten
_FREE = (  # of the names of operators that launch nothing
    "aten::empty", "aten::new_empty", "aten::detach", "aten::lift", "aten::view", "aten::_unsafe_view", "aten::alias",
)  # fmt: skip
_GATHER = {aten.index.Tensor, aten.index_select.default, aten.gather.default}  # that read what they return


def count_ways(shapes: list[Shape]) -> Iterator[tuple[str, Shape, Counts]]:
    """Counts of all ways at all shapes. The process does nothing else."""

    def problem(shape: Shape, frozen: bool) -> tuple[Any, ...]:
        tokens, dim, vocab = shape
        hidden = torch.empty(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, dim, device="cuda", dtype=torch.bfloat16, requires_grad=not frozen)
        target, index = (torch.empty(tokens, device="cuda", dtype=torch.int64) for _ in range(2))
        return hidden, weight, target, index, torch.empty(tokens, device="cuda")

    def runs(way: str, shape: Shape) -> Callable[[], object]:
        hidden, weight, target, index, per_token = problem(shape, frozen=way == "frozen weight")
        options = {"active_index": index, "backend": "native"}
        if way == "loss":
            return lambda: linear_logprob_loss(
                hidden, weight, target, ppo_clip, per_token, per_token, **options
            ).loss.backward()
        if way == "no grad":
            return torch.no_grad()(lambda: linear_logprob(hidden, weight, target, **options))
        return lambda: linear_logprob(hidden, weight, target, **options).logprob.backward(per_token)

    with Counting() as mode:
        for shape in shapes:
            for way in WAYS:
                run = runs(way, shape)
                mode.counts = Counts()
                run()
                yield way, shape, mode.counts


class Counting(fake_gpu.DeviceOfShapes):
    """While it is entered, work on the device is added to `counts`, and custom operators run their own code."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "rlft_fast":
            if (python := fake_gpu.python_implementation(func)) is not None:
                with self:
                    return python(*args, **kwargs)
            self._count(func, func._schema.name, _kernel_bytes(func, args))
            return None
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._count_operator(func, args, kwargs, result)
        return result

    def _count_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        own = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor) and x.is_cuda]
        if not own or func.is_view or func.namespace == "prim" or func._schema.name.startswith(_FREE):
            return
        if fake_gpu.waits(func, args, kwargs):
            self.counts.waits.append(str(func))
        if (gemm := _gemm(func, args, kwargs, result)) is not None:
            self.counts.gemms[gemm] += 1
            self.counts.launches += 1
            return
        self._count(func, func._schema.name, _operator_bytes(func, args, kwargs, result))

    def _count(self, func: Any, name: str, num_bytes: int) -> None:
        self.counts.bytes[name] += num_bytes
        self.counts.launches += 1


def _gemm(func: Any, args: Any, kwargs: Any, result: Any) -> Gemm | None:
    if func.overloadpacket not in (aten.mm, aten.addmm):
        return None
    accumulates = func.overloadpacket is aten.addmm
    a, b = args[1:3] if accumulates else args[:2]
    return Gemm(a.shape[0], a.shape[1], b.shape[1], a.itemsize, result.itemsize, accumulates)


def _kernel_bytes(func: Any, args: Any) -> int:
    """What one of our kernels reads and writes, beside a few numbers per row."""
    name, logits = func._opname, args[0]
    read = logits.numel() * logits.itemsize
    if name == "logprob_stats_":
        return read
    if name == "scale_":
        return 4  # the factor, which is 1 here
    if name == "logprob_grad_":
        return read + args[-1].numel() * args[-1].itemsize
    if name == "logprob_frozen_":
        accumulator, exp_logits = args[-2:]
        return 2 * read + exp_logits.numel() * exp_logits.itemsize + 2 * accumulator.numel() * accumulator.itemsize
    return sum(x.numel() * x.itemsize for x in tree_leaves(args) if isinstance(x, Tensor))


def _operator_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    written = sum(x.numel() * x.itemsize for x in results)
    if func in _GATHER:
        return 2 * written
    if func.overloadpacket in (aten.index_put, aten.index_put_):
        return 2 * sum(x.numel() * x.itemsize for x in tree_leaves(args[2]) if isinstance(x, Tensor))
    overwrites = func.overloadpacket in (aten.copy_, aten.fill_, aten.zero_)
    given = args[1:] if overwrites else args
    read = sum(x.numel() * x.itemsize for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_cuda)
    return read + written


if __name__ == "__main__":
    for way, shape, counts in count_ways([tuple(map(int, given.split(","))) for given in sys.argv[1:]]):
        row = {"way": way, "shape": shape, "gemms": [[list(gemm), n] for gemm, n in counts.gemms.items()]}
        print(json.dumps(row | {"bytes": counts.bytes, "launches": counts.launches, "waits": counts.waits}))
