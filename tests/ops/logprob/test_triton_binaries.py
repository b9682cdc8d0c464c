"""The Triton kernels as compiled code: Triton's interpreter does not see what a compiler refuses, or spills."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

KERNELS = {
    "_stats_kernel", "_grad_kernel", "_frozen_kernel", "_fused_stats_kernel", "_multiply_rows_kernel",
    "_multiply_columns_kernel",
}  # fmt: skip


pytestmark = pytest.mark.slow  # a minute, until Triton's cache has them


@pytest.fixture(scope="module", params=[80, 86, 90, 100, 120])
def binaries(request) -> list[dict[str, Any]]:
    """Of a GPU's compute capability."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.logprob.triton_binaries", str(request.param)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    binaries = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {binary["kernel"] for binary in binaries} == KERNELS
    return binaries


def test_no_kernel_spills_or_needs_more_shared_memory_than_there_is(binaries):
    assert [b for b in binaries if b["stack"] or b["shared"] > b["shared_limit"]] == []


def test_no_kernel_narrows_float32(binaries):
    assert [b for b in binaries if b["tf32"]] == []
