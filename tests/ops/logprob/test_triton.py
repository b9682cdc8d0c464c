"""What only Triton's kernels have: a forward pass without logits in memory, and binaries for GPUs."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops.logprob import reference
from tests.ops.logprob.problems import BF16, F32, F64, interpreted, logprob_of, loss_of, run, weighted_by, wide_tiles
from tests.support.numerics import assert_no_further_from_truth

KERNELS = {
    "_stats_kernel", "_grad_kernel", "_frozen_kernel", "_fused_stats_kernel", "_fused_grad_kernel",
    "_target_logits_kernel", "_fused_odds_kernel", "_fused_sums_kernel", "_finish_sums_kernel",
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5, "temperature": torch.linspace(0.5, 1.5, 67)}])
def test_without_logits_no_further_from_truth_than_pytorch(options, backend, monkeypatch):
    """One column more than several tiles have, and more logits than are kept for backward."""
    called = count_calls(monkeypatch, "fused_stats", "fused_grad")
    wide_tiles(monkeypatch)
    hidden, weight, target, _ = make_inputs(67, 40, 8 * 512 + 1, logits="peaked")
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


def with_entropy(logprob: Tensor, entropy: Tensor | None, weight: Tensor) -> Tensor:
    assert entropy is not None
    return -logprob * weight - 0.1 * entropy


@interpreted
@pytest.mark.parametrize("way", ["frozen", "loss", "loss of the entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.02])
def test_from_odds_no_further_from_truth_than_pytorch(temperature, way, backend, monkeypatch):
    """Targets of log-probabilities down to -400 in one of three blocks of rows, several tiles in each program."""
    monkeypatch.setattr("rlft_fast.ops.logprob.triton._PROGRAMS", 6)
    called = count_calls(monkeypatch, "fused_odds", "fused_grad")
    hidden, weight, target, _ = make_inputs(140, 100, 449)
    likely = linear(hidden, weight).argmax(1)
    target[::3] = likely[::3]
    target[70:] = likely[70:]
    target[1::9] = -100

    def results(how: str, dtype: torch.dtype) -> list[Tensor]:
        h, w = (x.to(dtype, copy=True).requires_grad_(x is hidden or way != "frozen") for x in (hidden, weight))
        upstream = torch.randn(140, generator=torch.Generator().manual_seed(1)).to(dtype)
        options = {"temperature": temperature, "backend": how}
        if way == "frozen":
            logprob = logprob_of(**options)(h, w, target).logprob
            (logprob * upstream).sum().backward()
            return [logprob.detach(), h.grad]
        loss_fn = weighted_by if way == "loss" else with_entropy
        out = loss_of(**options)(h, w, target, loss_fn, upstream, return_entropy=True)
        out.loss.backward()
        return [out.logprob, out.entropy, h.grad, w.grad]

    truth = results("reference", F64)
    assert (truth[0][:64] < -50).any() == (temperature < 1)  # which the first reference does not hold
    assert truth[0][70:].min() > -40
    for actual, plain, exact in zip(results(backend, F32), results("reference", F32), truth, strict=True):
        assert_no_further_from_truth(actual, plain, exact)
    assert set(called) == {"fused_odds", *(["fused_grad"] if way == "loss of the entropy" else [])}


def stats_of(hidden: Tensor, weight: Tensor, target: Tensor, needs_maximum: bool, inv_temperature: Tensor):
    """(logprob, log-normaliser in float64) by Triton's forward kernels alone."""
    from rlft_fast.ops.logprob import triton

    sums = (torch.full(target.shape, value) for value in (-math.inf, -1.0, math.nan))
    maximum, excess, target_logit = sums
    triton.fused_stats(
        hidden, weight, target, inv_temperature, 0.5, needs_maximum, maximum, excess, target_logit
    )  # fmt: skip
    return (target_logit - maximum) - excess.log1p(), maximum.double() + excess.double().log1p()


@interpreted
@pytest.mark.parametrize("tile", [pytest.param("_TILES", marks=pytest.mark.slow), "_LARGE"])
def test_rows_that_the_target_cannot_stand_for_are_computed_again(tile, backend, monkeypatch):
    """In three blocks of rows: log-probabilities below -60, no target, nan, inf. All splits have several tiles."""
    from rlft_fast.ops.logprob import triton

    if tile == "_LARGE":  # as on Hopper
        monkeypatch.setattr(triton, "gemm_tile", lambda operand: triton._LARGE)
    monkeypatch.setattr(triton, "_PROGRAMS", 6)
    monkeypatch.setattr(triton, "_SPLITS_OF_FEW", 2)
    hidden, weight, target, _ = make_inputs(260, 40, 1100, logits="peaked")
    temperature = torch.linspace(0.5, 1.5, 260)
    inv_temperature = 1 / temperature
    logits = linear(hidden.double(), weight.double()) * (0.5 * inv_temperature.double())[:, None]
    good, _ = stats_of(hidden, weight, target, False, inv_temperature)
    exact = logits.log_softmax(1)
    plain = (linear(hidden, weight) * (0.5 * inv_temperature)[:, None]).log_softmax(1)
    at_target = target[:, None]
    assert (exact.gather(1, at_target) > -0.01).any()
    assert_no_further_from_truth(good[:, None], plain.gather(1, at_target), exact.gather(1, at_target))

    unlikely = [3, 259]
    hidden[unlikely] *= 20
    target[unlikely] = (hidden[unlikely] @ weight.T).argmin(1)
    target[5] = -1
    hidden[7, 0], hidden[130, 1] = math.nan, math.inf
    bad = [*unlikely, 5, 7, 130]
    ours, ours_normaliser = stats_of(hidden, weight, target, False, inv_temperature)
    careful, careful_normaliser = stats_of(hidden, weight, target, True, inv_temperature)
    is_good = torch.ones(260, dtype=torch.bool).index_fill(0, torch.tensor(bad), False)
    assert torch.equal(ours[is_good], good[is_good])  # whatever the rows of their block are
    assert (careful[unlikely] < -60).all()
    torch.testing.assert_close(ours[bad], careful[bad], rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(ours_normaliser, careful_normaliser, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert ours[[5, 7, 130]].isnan().all()


@interpreted
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive_reverses_the_logits(scale, backend):
    hidden, weight, target, _ = make_inputs(5, 24, 200)
    ours = logprob_of(backend, logit_scale=scale)(hidden, weight, target).logprob
    exact = reference.linear_logprob(hidden.double(), weight.double(), target, logit_scale=scale).logprob
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize("entropy", [False, True])
def test_a_token_of_probability_0_is_as_if_it_were_not_there(entropy, backend):
    hidden, weight = torch.linspace(0.5, 2, 5)[:, None], torch.linspace(-3, 3, 200)[:, None]
    target = torch.tensor([0, 20, 100, 150, 199])
    exact = linear(hidden.double(), weight.double()).log_softmax(1)
    weight = torch.cat([weight, weight.new_full((1, 1), -math.inf)]).requires_grad_()
    out = loss_of(backend)(hidden, weight, target, weighted_by, torch.ones(5), return_entropy=entropy)
    torch.testing.assert_close(out.logprob.double(), exact.gather(1, target[:, None])[:, 0], rtol=1e-6, atol=0)
    if entropy:
        torch.testing.assert_close(out.entropy.double(), -(exact.exp() * exact).sum(1), rtol=1e-6, atol=0)


@interpreted
def test_the_likeliest_token_is_told_without_logits(backend):
    hidden, weight, target, _ = make_inputs(10, 24, 200, logits="peaked")
    target[::2] = linear(hidden, weight).argmax(1)[::2]
    out = logprob_of(backend)(hidden, weight.requires_grad_(), target, return_top1=True)
    assert torch.equal(out.top1, linear(hidden, weight).argmax(1) == target)


@interpreted
def test_odds_in_half_precision_and_large_tiles(backend, monkeypatch):
    """As on Hopper, except that the interpreter multiplies no bfloat16."""
    from rlft_fast.ops.logprob import triton

    monkeypatch.setattr(triton, "gemm_tile", lambda operand: triton._LARGE)
    hidden, weight, target, _ = make_inputs(67, 100, 449)
    odds = torch.full((67, 512), torch.nan, dtype=BF16)
    sums, reference, drop, _ = triton.fused_odds(hidden, weight, target, torch.ones(1), 1.0, False, odds[:, :449])
    logits = linear(hidden.double(), weight.double())
    target_logit = logits.gather(1, target[:, None])
    exact = (logits - target_logit).exp().scatter(1, target[:, None], 0)
    torch.testing.assert_close(odds[:, :449].double(), exact, rtol=2**-7, atol=0)  # NumPy cuts off, and rounds not
    torch.testing.assert_close(sums.double(), exact.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(reference.double(), target_logit[:, 0], rtol=1e-5, atol=1e-5)
    assert drop.abs().max() < 1e-6  # r is rounded
    assert odds[:, 449:].isnan().all()


@interpreted
@pytest.mark.parametrize("way", ["frozen", "loss"])
@pytest.mark.parametrize(
    ("hidden", "weight"), [([[math.nan]], [[1.0]]), ([[math.inf]], [[1.0], [-1.0]])], ids=["one token", "inf"]
)
def test_a_bad_target_logit_never_looks_certain(hidden, weight, way, backend):
    h, w = torch.tensor(hidden, requires_grad=True), torch.tensor(weight, requires_grad=way == "loss")
    target = torch.zeros(1, dtype=torch.int64)
    if way == "loss":
        out = loss_of(backend)(h, w, target, weighted_by, torch.ones(1))
        out.loss.backward()
    else:
        out = logprob_of(backend)(h, w, target)
        out.logprob.sum().backward()
    assert out.logprob.isnan().all()
    assert h.grad.isnan().all()


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


OTHERS = [pytest.param(capability, marks=pytest.mark.long) for capability in (80, 86, 100, 120)]


@pytest.fixture(scope="module", params=[90, *OTHERS])
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


@pytest.mark.slow  # a minute, until Triton's cache has the binaries
@pytest.mark.parametrize("binaries", [90], indirect=True)
def test_epilogues_have_few_instructions_for_each_logit(binaries):
    """A multiply-add, an ex2 and an addition; odds are also rounded and stored, and an entropy adds two instructions.

    With a running maximum there are 17 or more, so the count sees them.
    """

    def fewest(kernel: str, everything: bool) -> float:
        of_kernel = [b for b in binaries if b["large"] and (b["kernel"], b["everything"]) == (kernel, everything)]
        return min(b["instructions"] for b in of_kernel)

    assert fewest("_fused_sums_kernel", False) < 3.2
    assert fewest("_fused_odds_kernel", False) < 4.4
    assert fewest("_fused_odds_kernel", True) < 6.9
    assert fewest("_fused_stats_kernel", True) > 12
