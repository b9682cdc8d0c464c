"""Runs a function in several processes that form a gloo group."""

import faulthandler
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A server that has imported the slow packages forks the processes: imports take seconds. A machine with a GPU spawns
# them, because an import may initialise CUDA, and a fork of such a process cannot use the GPU.
START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
# Modules and not packages, which import their names on first use.
PRELOADED = ["pytest", "hypothesis", "peft", "tests.support.tiny_models", "rlft_fast.trainer.launch"]
multiprocessing.set_forkserver_preload(PRELOADED)


def run_distributed(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Calls `function(rank, *args)` in `world_size` processes; an exception in any of them is raised here.

    All calls share the environment variables of the first call.

    Args:
        function: picklable, so a module-level function.
        world_size: number of processes.
        args: further arguments, pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        arguments = world_size, store, function, args
        mp.start_processes(_worker, arguments, nprocs=world_size, start_method=START_METHOD)


def _worker(rank: int, world_size: int, store: Path, function: Callable[..., None], args: tuple) -> None:
    faulthandler.enable()  # a signal says where it struck: pytest's own handler is not in these processes
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),  # a deadlock should fail the test, not the whole run
    )
    # A write into the output of one of our models would make gradients wrong. Modules of other packages may warn.
    warnings.filterwarnings("error", r"FSDP2-wrapped module \(FSDP(Policy|Value|Reward)Model\) returned a view")
    try:
        function(rank, *args)
    finally:
        from rlft_fast.world.process_group import leave_process_group  # here: tests of the ops have torch alone

        leave_process_group()
