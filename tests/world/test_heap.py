"""Freed memory stays with the process."""

import os
import subprocess
import sys

import pytest

from tests.support.machine.memory import requires_proc

# Page faults of writing 64 MiB that were written and freed before, in pieces as large as a matrix of weights.
_FAULTS = """
import resource, torch
from rlft_fast.world import keep_freed_memory

keep_freed_memory()
for _ in range(4):  # malloc finds its places with the first ones
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(2**20) for _ in range(16)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del pieces
print(faults)
"""


@requires_proc
@pytest.mark.parametrize(("environment", "keeps"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, False)])
def test_memory_that_was_freed_is_written_without_page_faults(environment, keeps):
    """Where the environment says how malloc behaves, it stays so."""
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    faults = int(done.stdout)
    assert faults < 100 if keeps else faults > 2**26 // 4096 // 2
