"""Runs a function in several processes that form a gloo group."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Calls `function(rank, *args)` in `world_size` processes; an exception in any of them is raised here.

    Args:
        function: picklable, so a module-level function.
        world_size: number of processes.
        args: further arguments, pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (world_size, Path(folder) / "store", function, args), nprocs=world_size)


def _worker(rank: int, world_size: int, store: Path, function: Callable[..., None], args: tuple) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),  # a deadlock should fail the test, not the whole run
    )
    try:
        function(rank, *args)
    finally:
        from rlft_fast.engine.distributed import leave_process_group  # needs more than the ops' tests do

        leave_process_group()
