"""The bytes that are allocated while operators run."""

import weakref
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from rlft_fast.engine.memory.trace import Moment, Note

_DEVICE, _UNSAFE_VIEW = torch.ops.prim.device.default, torch.ops.aten._unsafe_view.default


class MemoryTracker(FakeTensorMode):
    """Runs operators on tensors without data, and follows the bytes of all storages that they create.

    It is a `FakeTensorMode` because a second mode beside one would see every operator once more, which takes a third
    of a plan's time.

    Args:
        operator: ``namespace::name`` of an operator that takes memory inside, where the tracker does not see it.

    Attributes:
        moment: the present moment, as `mark` has named it.
        notes: the bytes after each operator, results included, and at the beginning of each moment. A view allocates
            nothing and has no note.
        elsewhere: returns how many of the bytes are on another device at present, and do not count; None: no bytes.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.operator = operator
        self.moment: Moment = ("setup",)
        self.notes: list[Note] = []
        self.elsewhere: Callable[[], int] | None = None
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._settled: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # of the setup
        self._settled_bytes = 0
        self._left_out_bytes = 0
        self._depth = 0  # of operators that run inside of an operator which is made of others

    def mark(self, moment: Moment) -> None:
        """Begins another moment."""
        self.moment = moment
        self._note()

    def begin_pass(self, offloaded: bool) -> None:
        """Ends the setup. The number of its operators depends on DTensor's caches, so one note stands for all.

        Args:
            offloaded: whether the present bytes do not count, since they stay on another device.
        """
        peak = max(note.num_bytes for note in self.notes)
        self._left_out_bytes = self._all_bytes() if offloaded else 0
        self.notes = [] if offloaded else [Note(self.moment, False, peak)]
        self._settle()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that torch makes otherwise takes time at every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd reads it for every gradient: more than half of all calls
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on its shards, which come here again
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        if (func.is_view or func is _UNSAFE_VIEW) and self._depth == 0 and isinstance(args[0], FakeTensor):
            return self._view(func, *args, **(kwargs or {}))
        self._depth += 1
        try:
            outputs = self.dispatch(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._follow(outputs)
            self._note(func.name() == self.operator)
        return outputs

    def _view(self, func: Any, base: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        """Other views of the storage of `base`, found without torch's cache of results, which takes longer."""
        with in_kernel_invocation_manager(self):
            outputs = func(base, *args, **kwargs)
        if isinstance(outputs, Tensor):
            return FakeTensor(self, outputs, base.fake_device)
        return type(outputs)(FakeTensor(self, output, base.fake_device) for output in outputs)

    def _follow(self, outputs: object) -> None:
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and _device(tensor).type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._settled:
                    self._storages[storage._cdata] = storage

    def _settle(self) -> None:
        """Adds up weights and optimizer state once, instead of after each operator. No pass resizes their storages."""
        for key, storage in self._storages.items():
            num_bytes = storage.nbytes()
            self._settled[key] = weakref.ref(storage, partial(self._forget, key, num_bytes))
            self._settled_bytes += num_bytes
        self._storages.clear()

    def _forget(self, key: int, num_bytes: int, _: object) -> None:
        del self._settled[key]
        self._settled_bytes -= num_bytes

    def _all_bytes(self) -> int:
        """Sizes are read anew each time, because FSDP frees weights by resizing their storage without an operator."""
        living = filter(None, map(call, self._storages.valuerefs()))  # an empty storage is false
        return self._settled_bytes + sum(map(torch.UntypedStorage.nbytes, living))

    def _note(self, at_operator: bool = False) -> None:
        elsewhere = self._left_out_bytes + (self.elsewhere() if self.elsewhere is not None else 0)
        self.notes.append(Note(self.moment, at_operator, self._all_bytes() - elsewhere))


def _device(tensor: Tensor) -> torch.device:
    """To ask a fake tensor for its `device` calls an operator, as many as the pass has otherwise."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
