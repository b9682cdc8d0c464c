"""Bytes that are there while operators run."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Follows the bytes of all storages that operators create while it is active; works on fake tensors, too.

    Args:
        operator: the name of one, ``namespace::name``, that takes memory of its own unseen.

    Attributes:
        live: bytes that are there now.
        peaks: the most there were, by the moment that `mark` has named.
        peaks_at_operator: the most there were when a call of the operator ended, its results among them.
        elsewhere: tells how many of the bytes are on another device now, and do not count.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.live = 0
        self.moment: tuple[Hashable, ...] = ("setup",)
        self.peaks: dict[tuple[Hashable, ...], int] = defaultdict(int)
        self.peaks_at_operator: dict[tuple[Hashable, ...], int] = defaultdict(int)
        self.elsewhere: Callable[[], int] | None = None
        self._sizes: dict[int, int] = {}

    def mark(self, moment: tuple[Hashable, ...]) -> None:
        """From now on it is this moment."""
        self.moment = moment
        self._note(self.peaks)

    def leave_out(self) -> None:
        """What is there now does not count: it stays, on another device."""
        self.live = 0
        self.peaks.clear()

    def __enter__(self):
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            return original(storage, size)

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  FSDP frees weights so, without an operator
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        delattr(torch.UntypedStorage, "resize_")  # what remains is the base class's
        return super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shards comes here again
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._follow(tensor.untyped_storage())
        self._note(self.peaks)
        if func.name() == self.operator:
            self._note(self.peaks_at_operator)
        return outputs

    def _note(self, peaks: dict[tuple[Hashable, ...], int]) -> None:
        if self.live > peaks[self.moment]:
            here = self.live - (self.elsewhere() if self.elsewhere is not None else 0)
            peaks[self.moment] = max(peaks[self.moment], here)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self._sizes:
            self.live += size - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
