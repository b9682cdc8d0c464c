"""The process group, and the collectives that trainers need besides FSDP's own. A single process is world size 1."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


def init_distributed(timeout_minutes: float = 30) -> dist.Store | None:
    """Joins the process group that torchrun describes; does nothing in a single process.

    Args:
        timeout_minutes: how long a collective waits for other ranks before it fails.

    Returns:
        The store at which the processes met, for `naming_lost_ranks`; None in a single process.

    Raises:
        ValueError: this machine has GPUs, but none for this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_gpu(torch.cuda.device_count()))
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the processes
    own, groups = (dist.PrefixStore(f"{name}/{restart}", store) for name in ("rlft_fast", "groups"))
    dist.init_process_group(_backend(), store=groups, rank=rank, world_size=world_size, timeout=timeout)
    return own


def ensure_process_group() -> None:
    """Makes a process group of one process in memory, unless there is a group: FSDP needs one in any case."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)


def leave_process_group(failed: bool = False) -> None:
    """Leaves the process group, if there is one. Called before the interpreter shuts down.

    Args:
        failed: this process ends by an error, which other processes may not have. NCCL destroys a group on all ranks
            together, so ranks would wait for each other; the group is aborted instead.
    """
    if dist.is_initialized():
        end = dist.distributed_c10d._abort_process_group if failed else dist.destroy_process_group
        end()
        _let_gloo_finish()


@contextlib.contextmanager
def leaving_process_group() -> Iterator[None]:
    """Leaves the process group at the end, and aborts it after an error inside."""
    try:
        yield
    except BaseException:
        leave_process_group(failed=True)
        raise
    leave_process_group()


def _let_gloo_finish() -> None:
    """Waits until gloo's threads rest. FSDP2's caches keep the threads alive after the group is gone (torch 2.13).

    A collective returns before gloo's thread has dropped the tensors, and dropping them may need the interpreter's
    lock. If the interpreter is shutting down by then, the process aborts although all its work is done. Sleeping frees
    the lock, so a thread with work left is then in state running. The wait ends after five seconds in any case.
    """
    rests = 0
    for _ in range(100):
        time.sleep(0.05)
        rests = 0 if _gloo_is_running() else rests + 1
        if rests == 2:  # at the first look a thread may have been waiting for the lock that this thread held
            return


def _gloo_is_running() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):  # empty on systems other than Linux
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = task.read_text().rpartition(") ")
            if "gloo" in name and rest.startswith("R"):
                return True
    return False


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _local_gpu(num_gpus: int) -> int:
    """The index of this process's GPU among the GPUs that the process sees."""
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if not 0 <= local_rank < num_gpus:
        raise ValueError(
            f"LOCAL_RANK is {os.environ.get('LOCAL_RANK', 'not set')}, but this process sees {num_gpus} GPUs: start by "
            f"torchrun at most one process per GPU, or set LOCAL_RANK (0 where a launcher shows each process its own)"
        )
    return local_rank


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_local_world_size() -> int:
    """The number of processes on this machine; all processes, if the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def get_device() -> torch.device:
    """This process's device: its GPU, or the CPU of a machine without GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def forked_rng() -> contextlib.AbstractContextManager[None]:
    """`torch.random.fork_rng` of the CPU and this process's GPU. torch's default would initialise every GPU."""
    device = get_device()
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def require_agreement(what: str, values: Mapping[str, Any]) -> None:
    """Requires the same values on all ranks. Different values would end in a hang or in nonsense.

    Args:
        what: name of the values in the message.
        values: JSON values by name.

    Raises:
        ValueError: ranks hold different values; raised on every rank.
    """
    if get_world_size() == 1:
        return
    own = torch.tensor(list(json.dumps(dict(values), sort_keys=True).encode()), dtype=torch.uint8)
    first, *others = (json.loads(bytes(part.tolist())) for part in all_gather_ragged(own.to(get_device())))
    differences = [
        f"{name} is {other.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
        for rank, other in enumerate(others, start=1)
        for name in sorted(first.keys() | other.keys())
        if other.get(name) != first.get(name)
    ]
    if differences:
        raise ValueError(f"the processes disagree on the {what}: {'; '.join(differences[:3])}. Give all the same")


def collective_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """The timeout of a group's collectives, by default of the group of all ranks. None: the backend does not say.

    New groups are made with the timeout of the group of all ranks: torch would give them its own default.
    """
    group = group or dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(group._device_types[0])
    return getattr(backend.options, "_timeout", None)


_sequence_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def sequence_group(size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` neighbouring ranks, which share micro-batches; None if `size` is 1.

    All ranks must call it. A group is made once, because each NCCL group has buffers on the device.

    Raises:
        ValueError: `size` does not divide the number of ranks.
    """
    if get_world_size() % size:
        raise ValueError(
            f"sequence_parallel={size} must divide the number of processes, which is {get_world_size()}: start a "
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


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def accumulate(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Adds a micro-batch's 0-d tensors to the totals in float32; for names that end in ``_max`` keeps the maximum."""
    for name, value in values.items():
        if name not in totals:
            totals[name] = value.float()
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value


def all_reduce(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds 0-d tensors over all ranks, or takes the maximum for names that end in ``_max``: at most two collectives."""
    if get_world_size() == 1:
        return values
    reduced = dict(values)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        names = sorted(name for name in values if name.endswith("_max") == (operation == dist.ReduceOp.MAX))
        if names:
            vector = torch.stack([values[name].float() for name in names])
            dist.all_reduce(vector, op=operation)
            reduced |= dict(zip(names, vector.unbind(), strict=True))
    return reduced


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    return bool(all_reduce({"flag_max": torch.tensor(float(flag))})["flag_max"])


def all_gather_ragged(tensor: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
    """Gathers every rank's 1-D tensor on every rank, in rank order.

    Args:
        tensor: (N_rank,) on this process's device or the CPU; N_rank may differ between ranks.
        sizes: N_rank of every rank; None: one more small collective gathers the sizes.
    """
    if get_world_size() == 1:
        return [tensor]
    if sizes is None:
        size = torch.tensor([tensor.shape[0]], device=tensor.device)
        every_size = [torch.empty_like(size) for _ in range(get_world_size())]
        dist.all_gather(every_size, size)
        sizes = [int(s) for s in torch.cat(every_size).tolist()]
    padded = tensor.new_zeros(max(sizes))
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [part[:size] for part, size in zip(gathered, sizes, strict=True)]
