"""Freed memory stays with the process."""

import os
import resource

import pytest
import torch

from rlft_fast.world import keep_freed_memory
from tests.support.machine.distributed import start_processes
from tests.support.machine.memory import keep_no_freed_memory, requires_proc


def page_faults() -> int:
    """Of writing 64 MiB that were written and freed before, in pieces as large as a matrix of weights."""
    faults = 0
    for _ in range(4):  # malloc finds its places with the first ones
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [torch.ones(2**20) for _ in range(16)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del pieces
    return faults


def check_page_faults(number: int) -> None:
    """Where the environment says how malloc behaves, it stays so."""
    pages = 2**26 // 4096
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # which glibc reads as a process begins
    keep_no_freed_memory()
    keep_freed_memory()
    assert page_faults() > pages // 2
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    keep_freed_memory()
    assert page_faults() < 100


@requires_proc
@pytest.mark.dist
def test_memory_that_was_freed_is_written_without_page_faults():
    start_processes(check_page_faults, 1)
