"""The bytes that are allocated while operators run."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Follows the bytes of all storages that operators create while it is active. Works on fake tensors, too.

    Args:
        operator: ``namespace::name`` of an operator that takes memory inside, where the tracker does not see it.

    Attributes:
        moment: the present moment, as `mark` has named it.
        peaks: most bytes at each moment.
        peaks_at_operator: most bytes at each moment when a call of the operator ended, its results included.
        elsewhere: returns how many of the bytes are on another device at present, and do not count; None: no bytes.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.moment: tuple[Hashable, ...] = ("setup",)
        self.peaks: dict[tuple[Hashable, ...], int] = defaultdict(int)
        self.peaks_at_operator: dict[tuple[Hashable, ...], int] = defaultdict(int)
        self.elsewhere: Callable[[], int] | None = None
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._left_out_bytes = 0

    def mark(self, moment: tuple[Hashable, ...]) -> None:
        """Begins another moment."""
        self.moment = moment
        self._note(self.peaks)

    def leave_out(self) -> None:
        """Has the present bytes not count: they stay, on another device."""
        self._left_out_bytes = self._all_bytes()
        self.peaks.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on its shards, which come here again
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        self._note(self.peaks)
        if func.name() == self.operator:
            self._note(self.peaks_at_operator)
        return outputs

    def _all_bytes(self) -> int:
        """Sizes are read anew each time, because FSDP frees weights by resizing their storage without an operator."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _note(self, peaks: dict[tuple[Hashable, ...], int]) -> None:
        num_bytes = self._all_bytes() - self._left_out_bytes
        if num_bytes > peaks[self.moment]:
            here = num_bytes - (self.elsewhere() if self.elsewhere is not None else 0)
            peaks[self.moment] = max(peaks[self.moment], here)
