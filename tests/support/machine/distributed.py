"""Runs a function in several processes that form a gloo group."""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A machine with a GPU spawns processes, because an import may initialise CUDA, and a fork of such a process cannot use
# the GPU.
FORKS = not torch.cuda.is_available()
_IMPORTED = ("peft", "tests.support.tiny_models", "rlft_fast.trainer.launch")  # where other tests have not done so
_forking: Connection | None = None


def begin_to_fork(*imports: str) -> None:
    """Forks a process that forks all others: it has imported what this process has imported, and no test has run in it.

    Imports take seconds. A process in which tests have run must not be forked: torch has threads by then.

    Args:
        imports: modules that many of the tests import in the processes that are forked.
    """
    global _forking
    _forking, other = multiprocessing.Pipe()
    if os.fork() != 0:
        other.close()
        return
    try:
        _forking.close()  # so that the pipe ends with the tests
        _fork_on_request(other, imports)
    finally:
        os._exit(0)


def _fork_on_request(connection: Connection, imports: Sequence[str]) -> None:
    for name in (*_IMPORTED, *imports):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError):  # tests of the ops have torch alone
        # transformers compiles hundreds of patterns for the first weights that a process reads: 0.25 s.
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    with contextlib.suppress(EOFError):
        while True:
            function, args, count = pickle.loads(connection.recv_bytes())
            try:
                mp.start_processes(function, args, nprocs=count, start_method="fork")
            except Exception as error:
                connection.send(error)
            else:
                connection.send(None)


def start_processes(function: Callable[..., None], count: int, *args: object) -> None:
    """Calls `function(number, *args)` in `count` processes; an exception in any of them is raised here.

    The environment variables of forked processes are those of the first test.

    Args:
        function: picklable, so a module-level function.
        count: number of processes.
        args: further arguments, pickled.
    """
    if not FORKS:
        mp.start_processes(function, args, nprocs=count, start_method="spawn")
        return
    assert _forking is not None, "this module has to be imported when tests are collected"
    _forking.send_bytes(pickle.dumps((function, args, count)))  # by value: send would share memory of tensors
    if (error := _forking.recv()) is not None:
        raise error


def run_distributed(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Calls `function(rank, *args)` in `world_size` processes that form a group; see `start_processes`."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_worker, world_size, world_size, Path(folder) / "store", function, args)


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
        for child in multiprocessing.active_children():  # a failed test leaves its vLLM, and Python waits for it
            child.kill()
