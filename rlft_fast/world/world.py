"""``World``: the processes that work together, and the collectives that trainers need besides FSDP's own."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlft_fast.errors import text_of

T = TypeVar("T")

RAISED_BY = "raised_by_rank"
"""Attribute of an error that `World.together` has raised for another rank: the number of this rank."""


def own_device() -> torch.device:
    """This process's device: its GPU, or the CPU of a machine without GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes that work together, seen from one of them. Components are given a world, and ask no globals.

    A world of size 1 needs no process group: its collectives return at once. In larger worlds all ranks must call a
    collective together.

    Args:
        rank: number of this process.
        size: number of processes.
        local_size: number of processes on this machine.
        device: this process's GPU, or the CPU of a machine without GPUs.
        store: where the processes met; None in a single process.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = field(default_factory=own_device)
    store: dist.Store | None = None

    @classmethod
    def current(cls, store: dist.Store | None = None) -> "World":
        """The world of torch's process group; of this process alone where there is no group."""
        if not dist.is_initialized():
            return cls()
        size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # all, if the launcher does not say
        return cls(rank=dist.get_rank(), size=size, local_size=local_size, store=store)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0. Rank 0 alone writes files that all ranks share."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def all_reduce(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds 0-d tensors over all ranks, or takes the maximum for names that end in ``_max``.

        It takes at most two collectives.
        """
        if self.size == 1:
            return values
        reduced = dict(values)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            names = sorted(name for name in values if name.endswith("_max") == (operation == dist.ReduceOp.MAX))
            if names:
                vector = torch.stack([values[name].float() for name in names])
                dist.all_reduce(vector, op=operation)
                reduced |= dict(zip(names, vector.unbind(), strict=True))
        return reduced

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.all_reduce({"flag_max": torch.tensor(float(flag))})["flag_max"])

    def together(self, function: Callable[[], T], *errors: type[Exception]) -> T:
        """Calls a function on every rank. If it fails on one rank, every rank raises, so that no rank goes on alone.

        All ranks raise an error of the same class. Ranks that have not failed with it say where it was raised.

        Args:
            function: runs without collectives: another rank may have failed before one.
            errors: what the function may raise. The class that comes first goes before the others, then the lowest
                rank; in place of `Exception`, other ranks raise a RuntimeError.

        Returns:
            This rank's own result.
        """
        try:
            result = function()
        except errors as error:
            self.any_rank(True)
            self._raise_first(error, errors)
        if self.any_rank(False):
            self._raise_first(None, errors)
        return result

    def _raise_first(self, own: Exception | None, errors: tuple[type[Exception], ...]) -> NoReturn:
        number = next((i for i, kind in enumerate(errors) if isinstance(own, kind)), None)
        outcomes = self.all_gather_json([number, text_of(own) or type(own).__name__])
        kind, rank = min((kind, rank) for rank, (kind, _) in enumerate(outcomes) if kind is not None)
        if own is not None and rank == self.rank:
            raise own
        error = (RuntimeError if errors[kind] is Exception else errors[kind])(f"rank {rank}: {outcomes[rank][1]}")
        setattr(error, RAISED_BY, rank)
        raise error from own

    def all_gather_json(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value, sort_keys=True).encode()), dtype=torch.uint8)
        return [json.loads(part.cpu().numpy().tobytes()) for part in self.all_gather_ragged(own.to(self.device))]

    def all_gather_ragged(self, tensor: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
        """Gathers every rank's tensor on every rank, in rank order.

        Args:
            tensor: (N_rank, ...) on this process's device or the CPU; N_rank may differ between ranks.
            sizes: N_rank of every rank; None: one more small collective gathers the sizes.
        """
        if self.size == 1:
            return [tensor]
        if sizes is None:
            own = torch.tensor([tensor.shape[0]], device=tensor.device)
            every = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(every, own)
            sizes = [int(size) for size in torch.cat(every).tolist()]
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded)
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def require_agreement(self, what: str, values: Mapping[str, Any]) -> None:
        """Requires the same values on all ranks. Different values would end in a hang or in nonsense.

        Args:
            what: name of the values in the message.
            values: JSON values by name.

        Raises:
            ValueError: ranks hold different values; raised on every rank.
        """
        if self.size == 1:
            return
        first, *others = self.all_gather_json(dict(values))
        differences = [
            f"{name} is {other.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
            for rank, other in enumerate(others, start=1)
            for name in sorted(first.keys() | other.keys())
            if other.get(name) != first.get(name)
        ]
        if differences:
            raise ValueError(f"the processes disagree on the {what}: {'; '.join(differences[:3])}. Give all the same")

    def sequence_group(self, size: int) -> dist.ProcessGroup | None:
        """This rank's group of `size` neighbouring ranks, which share micro-batches; None if `size` is 1.

        A group is made once, because each NCCL group has buffers on the device.

        Raises:
            ValueError: `size` does not divide the number of ranks.
        """
        if self.size % size:
            raise ValueError(
                f"sequence_parallel={size} must divide the number of processes, which is {self.size}: start a "
                "multiple of it, or lower it"
            )
        if size == 1:
            return None
        assert dist.group.WORLD is not None
        groups = _sequence_groups.setdefault(dist.group.WORLD, {})
        if size not in groups:
            group, _ = dist.new_subgroups(size, timeout=collective_timeout())
            assert isinstance(group, dist.ProcessGroup)
            groups[size] = group
        return groups[size]


_sequence_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def forked_rng() -> contextlib.AbstractContextManager[None]:
    """`torch.random.fork_rng` of the CPU and this process's GPU. torch's default would initialise every GPU."""
    device = own_device()
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def collective_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """The timeout of a group's collectives, by default of the group of all ranks. None: the backend does not say.

    New groups are made with the timeout of the group of all ranks: torch would give them its own default.
    """
    group = group or dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(group._device_types[0])
    return getattr(backend.options, "_timeout", None)


def accumulate(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Adds a micro-batch's 0-d tensors to the totals in float32; for names that end in ``_max`` keeps the maximum."""
    for name, value in values.items():
        if name not in totals:
            totals[name] = value.float()
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value
