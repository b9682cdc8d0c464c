"""The Triton kernels as compiled code: Triton's interpreter does not see what a compiler refuses, or spills."""

import json
import os
import subprocess
import sys

import pytest

KERNELS = {
    "_stats_kernel", "_grad_kernel", "_frozen_kernel", "_fused_stats_kernel", "_multiply_rows_kernel",
    "_multiply_columns_kernel",
}  # fmt: skip


@pytest.mark.slow  # a minute, until Triton's cache has them
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_no_kernel_spills_or_needs_more_shared_memory_than_there_is(capability):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton_binaries", str(capability)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    binaries = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {binary["kernel"] for binary in binaries} == KERNELS
    assert [b for b in binaries if b["stack"] or b["shared"] > b["shared_limit"]] == []
