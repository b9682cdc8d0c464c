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
from tests.ops.logprob.problems import F32, F64, interpreted, logprob_of, run
from tests.support.numerics import assert_no_further_from_truth

KERNELS = {
    "_stats_kernel", "_grad_kernel", "_frozen_kernel", "_fused_stats_kernel", "_fused_grad_kernel"
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5, "temperature": torch.linspace(0.5, 1.5, 67)}])
def test_without_logits_no_further_from_truth_than_pytorch(options, backend, monkeypatch):
    """One column more than several tiles have, and more logits than are kept for backward."""
    called = count_calls(monkeypatch, "fused_stats", "fused_grad")
    hidden, weight, target, _ = make_inputs(67, 100, 3969, logits="peaked")
    target[3], target[5] = -100, 0
    ours, eager, truth = (
        run(function, hidden, weight, target, options, dtype, entropy=False)
        for function, dtype in (
            (logprob_of(backend, workspace_mib=1), F32), (reference.linear_logprob, F32),
            (reference.linear_logprob, F64),
        )
    )  # fmt: skip
    for actual, plain, exact in zip(ours, eager, truth, strict=True):
        assert_no_further_from_truth(actual, plain, exact)
    assert set(called) == {"fused_stats", "fused_grad"}


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Fills the list with the names of the kernels' functions that are called."""
    from rlft_fast.ops.logprob import triton

    called: list[str] = []

    def recorded(name: str):
        function = getattr(triton, name)
        return lambda *arguments: (called.append(name), function(*arguments))[1]

    for name in names:
        monkeypatch.setattr(triton, name, recorded(name))
    return called


@interpreted
@pytest.mark.parametrize("scale", [1e-3, 0.3, 1, 3])
def test_a_soft_cap_costs_no_digits(scale, backend):
    """tanh(u) within 3 roundings and its slope within 8, near 0, where a polynomial meets exp, and near 1."""
    import triton
    import triton.language as tl

    from rlft_fast.ops.logprob.triton import _slope, _softmax_logits

    # The functions are arguments, because Triton looks up names in the module alone.
    @triton.jit
    def kernel(z_ptr, x_ptr, slope_ptr, slope_of: tl.constexpr, logits_of: tl.constexpr):
        at = tl.arange(0, 1024)
        z = tl.load(z_ptr + at)
        tl.store(x_ptr + at, logits_of(z, 0.0, 2.0, 4.0, 1.0, True))
        tl.store(slope_ptr + at, slope_of(z, 0.0, 2.0, 4.0, 1.0, True))

    z = 4 * scale * torch.linspace(-2, 2, 1024)
    x, slope = torch.empty_like(z), torch.empty_like(z)
    kernel[(1,)](z, x, slope, _slope, _softmax_logits)
    u = z.double() / 4
    torch.testing.assert_close(x.double(), 8 * u.tanh(), rtol=3 * 2**-24, atol=0)
    torch.testing.assert_close(slope.double(), 2 / u.cosh() ** 2, rtol=8 * 2**-24, atol=0)


@interpreted
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
