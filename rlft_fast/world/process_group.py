"""The process group: joining it, leaving it, and the GPU of this process."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlft_fast.world.failures import name_lost_ranks_at_exit
from rlft_fast.world.world import World

_PR_SET_PDEATHSIG = 1  # of Linux: a signal for this process when its parent ends


def init_distributed(timeout_minutes: float = 30) -> World:
    """Joins the process group that torchrun describes. A single process, and a process with a group, joins nothing.

    If another process ends, an error that ends this one names it.

    Args:
        timeout_minutes: how long a collective waits for other ranks before it fails.

    Returns:
        The world of this process.

    Raises:
        ValueError: this machine has GPUs, but none for this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # a torchrun that is killed cannot end its processes itself
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return World.current()
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_gpu(torch.cuda.device_count()))
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the processes
    own, groups = (dist.PrefixStore(f"{name}/{restart}", store) for name in ("rlft_fast", "groups"))
    dist.init_process_group(_backend(), store=groups, rank=rank, world_size=world_size, timeout=timeout)
    world = World.current(own)
    name_lost_ranks_at_exit(world)
    return world


def end_with_parent(number: signal.Signals) -> None:
    """Asks Linux to send this process a signal when its parent dies. On other systems it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


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
            name, _, rest = task.read_text(encoding="utf-8").rpartition(") ")
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
