"""Runs a function in several processes that form a gloo group."""

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked from one that has imported what takes seconds. Not where there is a GPU: imports may look for it,
# and a fork of a process that did cannot use it.
_START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
multiprocessing.set_forkserver_preload(["pytest", "hypothesis", "peft", "rlft_fast.trainer"])


def run_distributed(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Calls `function(rank, *args)` in `world_size` processes; an exception in any of them is raised here.

    The processes have the environment of the first call's.

    Args:
        function: picklable, so a module-level function.
        world_size: number of processes.
        args: further arguments, pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        arguments = world_size, store, function, args
        mp.start_processes(_worker, arguments, nprocs=world_size, start_method=_START_METHOD)


def _worker(rank: int, world_size: int, store: Path, function: Callable[..., None], args: tuple) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),  # a deadlock should fail the test, not the whole run
    )
    # Whoever writes into the output of a model of ours would get wrong gradients. Of others' modules we have no say.
    warnings.filterwarnings("error", r"FSDP2-wrapped module \(FSDP(Policy|Value|Reward)Model\) returned a view")
    try:
        function(rank, *args)
    finally:
        from rlft_fast.world.collectives import leave_process_group  # needs more than the ops' tests do

        leave_process_group()
