"""The bytes that are allocated while operators run."""

from collections.abc import Callable
from operator import call
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlft_fast.engine.memory.trace import Moment, Note


class MemoryTracker(TorchDispatchMode):
    """Follows the bytes of all storages that operators create while it is active. Works on fake tensors, too.

    Args:
        operator: ``namespace::name`` of an operator that takes memory inside, where the tracker does not see it.

    Attributes:
        moment: the present moment, as `mark` has named it.
        notes: the bytes after each operator, results included, and at the beginning of each moment.
        elsewhere: returns how many of the bytes are on another device at present, and do not count; None: no bytes.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.moment: Moment = ("setup",)
        self.notes: list[Note] = []
        self.elsewhere: Callable[[], int] | None = None
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._left_out_bytes = 0

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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on its shards, which come here again
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # reads a tensor's device, which more than half of all calls do
            return outputs
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and _device(tensor).type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        self._note(func.name() == self.operator)
        return outputs

    def _all_bytes(self) -> int:
        """Sizes are read anew each time, because FSDP frees weights by resizing their storage without an operator."""
        living = filter(None, map(call, self._storages.valuerefs()))  # an empty storage is false
        return sum(map(torch.UntypedStorage.nbytes, living))

    def _note(self, at_operator: bool = False) -> None:
        elsewhere = self._left_out_bytes + (self.elsewhere() if self.elsewhere is not None else 0)
        self.notes.append(Note(self.moment, at_operator, self._all_bytes() - elsewhere))


def _device(tensor: Tensor) -> torch.device:
    """To ask a fake tensor for its `device` calls an operator, as many as the pass has otherwise."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
