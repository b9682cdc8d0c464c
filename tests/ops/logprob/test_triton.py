"""What only Triton's kernels have: a forward pass without logits in memory, and binaries for GPUs."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops.logprob import reference
from tests.ops.logprob.problems import F32, F64, INTERPRETED, logprob_of
from tests.support.numerics import assert_no_further_from_truth

KERNELS = {
    "_stats_kernel", "_grad_kernel", "_frozen_kernel", "_fused_stats_kernel", "_fused_grad_kernel"
}  # fmt: skip


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("V", [257, 2049])  # one block of columns, and one column more than a tile
def test_fused_forward_no_further_from_truth_than_pytorch(V, backend):
    hidden, weight, target, _ = make_inputs(67, 100, V)
    ours, eager, truth = (
        function(hidden.to(dtype), weight.to(dtype), target, return_entropy=True)
        for function, dtype in (
            (logprob_of(backend), F32), (reference.linear_logprob, F32), (reference.linear_logprob, F64)
        )
    )  # fmt: skip
    assert_no_further_from_truth(ours.logprob, eager.logprob, truth.logprob)
    assert_no_further_from_truth(ours.entropy, eager.entropy, truth.entropy)


@pytest.mark.parametrize("backend", INTERPRETED)
def test_fused_forward_allocates_no_logits(backend):
    hidden, weight, target, _ = make_inputs(67, 16, 2100)
    with torch.profiler.profile(profile_memory=True) as profiler:
        logprob_of(backend)(hidden, weight, target)
    assert 0 < max(event.cpu_memory_usage for event in profiler.events()) < 4 * 67 * 1024  # half a tile


@pytest.fixture(scope="module", params=[80, 86, 90, 100, 120])
def binaries(request) -> list[dict[str, Any]]:
    """Of every kernel for one compute capability. The interpreter does not see what a compiler refuses, or spills."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.logprob.triton_binaries", str(request.param)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    binaries = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {binary["kernel"] for binary in binaries} == KERNELS
    return binaries


@pytest.mark.slow  # a minute, until Triton's cache has the binaries
def test_no_kernel_spills_or_needs_more_shared_memory_than_there_is(binaries):
    assert [b for b in binaries if b["stack"] or b["shared"] > b["shared_limit"]] == []


@pytest.mark.slow  # a minute, until Triton's cache has the binaries
def test_no_kernel_narrows_float32(binaries):
    assert [b for b in binaries if b["tf32"]] == []
