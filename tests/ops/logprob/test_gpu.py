"""linear_logprob on a GPU: both backends beside float64, and streams, graphs and memory of a device."""

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import LOGITS, make_inputs
from rlft_fast.ops import backends, linear_logprob, linear_logprob_loss, support_logprob
from rlft_fast.ops.backends import device_name
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.workspace import scratch_bytes
from tests.ops.logprob.problems import (
    BF16,
    F16,
    F32,
    F64,
    check,
    check_loss,
    gradients,
    gradients_of_seen_rows,
    loss_problem,
    ppo_clip,
    run,
    run_loss,
)
from tests.support.numerics import assert_no_further_from_truth

pytestmark = pytest.mark.gpu
BACKENDS = ("native", "triton")


@pytest.fixture(autouse=True)
def _full_float32():
    """The oracle must multiply in float32, as our op does under any flag."""
    torch.backends.cuda.matmul.allow_tf32 = False


class HalfProduct(torch.autograd.Function):
    """hidden @ weight.T of half precision in float32, by tensor cores; gradients in float32."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        out = hidden.new_empty(len(hidden), len(weight), dtype=F32)
        return torch.mm(hidden, weight.T, out_dtype=F32, out=out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(hidden.dtype), (grad.T @ hidden.float()).to(weight.dtype)


@pytest.fixture(autouse=True)
def _eager_multiplies_in_its_dtype(monkeypatch):
    """Tensor cores add products in an order of their own, and a float32 GEMM of the same numbers has smaller errors."""
    in_float = reference.softmax_logits

    def softmax_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, *transform) -> Tensor:
        if hidden.dtype not in (BF16, F16) or not hidden.is_cuda:
            return in_float(hidden, weight, bias, *transform)
        z = HalfProduct.apply(hidden, weight)
        return reference.transform_logits(z if bias is None else z + bias.float(), *transform)

    monkeypatch.setattr(reference, "softmax_logits", softmax_logits)


cuda_problem = partial(make_inputs, device="cuda")


# V: below a block, odd, several blocks with a ragged end, a real vocabulary. T: one row, and no multiple of a tile.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize(("T", "D", "V"), [(64, 64, 17), (300, 64, 5003), (1000, 576, 50257), (129, 896, 151936)])
def test_no_further_from_truth_than_pytorch(T, D, V, logits, dtype, backend):
    check(T, D, V, logits=logits, dtype=dtype, device="cuda", backend=backend)


# An odd vocabulary, and numbers of rows whose tiles of 6 bytes per logit would be 5461 and 4228 columns wide.
@pytest.mark.parametrize(("T", "workspace_mib"), [(1024, 32), (331, 8)])
@pytest.mark.parametrize("train_weight", [False, True])
def test_gemm_operands_are_aligned(train_weight, T, workspace_mib, monkeypatch):
    """Without alignment for TMA and vectors of 16 bytes a vendor's GEMM is several times slower."""
    operands = []
    for name in ("mm", "addmm"):
        function = getattr(torch, name)

        def record(*matrices, function=function, out, **options):
            if out.is_cuda:  # an emulated GPU multiplies on the CPU, through the same functions
                operands.extend([*matrices, out])
            return function(*matrices, out=out, **options)

        monkeypatch.setattr(torch, name, record)
    hidden, weight, target, _ = cuda_problem(T, 64, 5003, dtype=BF16)
    hidden.requires_grad_()
    weight.requires_grad_(train_weight)
    how = {"backend": "native", "workspace_mib": workspace_mib}
    linear_logprob(hidden, weight, target, **how).logprob.sum().backward()
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: -logprob, **how).loss.backward()
    assert len(operands) >= 3 * (3 if train_weight else 2)
    for matrix in operands:
        assert 1 in matrix.stride()
        assert max(matrix.stride()) * matrix.element_size() % 16 == 0
        assert matrix.data_ptr() % 16 == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("logits", ["normal", "peaked"])
def test_frozen_weight(logits, entropy, dtype, backend):
    how = {"train_weight": False, "entropy": entropy}
    check(129, 128, 5003, logits=logits, dtype=dtype, device="cuda", backend=backend, **how)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("workspace_mib", [40, None])  # several groups with a float32 accumulator, and one without
def test_loss_no_further_from_truth_than_pytorch(workspace_mib, dtype, backend):
    problem = loss_problem(T=1500, V=5003, dtype=dtype, device="cuda")
    check_loss(problem, dtype, {"backend": backend, "workspace_mib": workspace_mib}, return_entropy=True)


# For few rows of many dimensions a vendor's GEMM may split the sum, and the width of a tile decides whether it does.
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("T", "D", "V"), [(1500, 64, 5003), (64, 4096, 20011)])
def test_paths_agree_to_float32_rounding(T, D, V, dtype):
    hidden, weight, target, old, advantage = loss_problem(T=T, D=D, V=V, dtype=dtype, device="cuda")
    with torch.no_grad():
        scored = linear_logprob(hidden, weight, target).logprob
    trained = linear_logprob(hidden.requires_grad_(), weight.requires_grad_(), target).logprob
    frozen = linear_logprob(hidden, weight.detach(), target).logprob
    fused = linear_logprob_loss(hidden, weight, target, ppo_clip, old, advantage).logprob
    for other in (trained, frozen, fused):
        torch.testing.assert_close(other, scored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_kept_logits_change_nothing_but_roundings(dtype, backend):
    """256 MiB hold all logits, and backward finds them. 4 MiB hold narrower tiles alone."""
    *problem, options = cuda_problem(300, 64, 5003, dtype=dtype)
    ours, eager, truth = (
        run(partial(function, **how), *problem, options, to)
        for function, how, to in (
            (linear_logprob, {"workspace_mib": 4, "backend": backend}, dtype),
            (reference.linear_logprob, {}, dtype),
            (reference.linear_logprob, {}, F64),
        )
    )
    for o, e, t in zip(ours, eager, truth, strict=True):
        assert_no_further_from_truth(o, e, t)
    kept = run(partial(linear_logprob, backend=backend), *problem, options, dtype)
    assert backend == "triton" or kept[0].equal(ours[0])  # the vendor's GEMM makes the logits that Triton keeps
    for k, e, t in zip(kept, eager, truth, strict=True):
        assert_no_further_from_truth(k, e, t)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_every_run(backend):
    problem = cuda_problem(1000, 576, 50257, dtype=BF16)
    first, second = (run(partial(linear_logprob, backend=backend), *problem, BF16) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


# Ends in the middle of a vector, of a block and of a tile; one logit past several blocks.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("train_weight", [False, True])  # Triton stores logits for backward alone
@pytest.mark.parametrize("V", [37, 503, 20011])
def test_every_statistic(V, train_weight, dtype, backend):
    hidden, weight, target, _ = cuda_problem(30, 64, V, dtype=dtype, logits="peaked")
    target[::2] = torch.arange(15, device="cuda")
    options = {"bias_V": torch.linspace(-1, 3, V, device="cuda"), "softcap": 20.0, "temperature": 0.7}
    asked = dict.fromkeys(("return_entropy", "return_sum_prob_squared", "return_top1", "return_mean_logits"), True)
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, **options, **asked)
    weight.requires_grad_(train_weight)
    result = linear_logprob(hidden, weight, target, backend=backend, **options, **asked)
    for ours, exact in zip(result, truth, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=1e-4)
    assert 0 < result.top1.sum() < 30
    torch.testing.assert_close(result.mean_logits.double(), truth.mean_logits, rtol=1e-5, atol=1e-6)


def scored(h: Tensor, w: Tensor, y: Tensor, **how) -> None:
    asked = dict.fromkeys(("return_entropy", "return_sum_prob_squared", "return_top1", "return_mean_logits"), True)
    with torch.no_grad():
        linear_logprob(h, w, y, **asked, **how)


def with_every_option(h: Tensor, w: Tensor, y: Tensor, **how) -> None:
    zeros = torch.zeros(len(y), device="cuda")
    how |= {"temperature": zeros + 0.7, "bias_V": w[:, 0].detach(), "softcap": 5.0, "threshold_T": zeros}
    result = linear_logprob(h, w, y, return_entropy=True, **how)
    (result.logprob + result.entropy).sum().backward()


def over_ids(h: Tensor, w: Tensor, y: Tensor, **_) -> None:
    support_logprob(h, w, y, torch.stack([y, y], 1)).logprob.sum().backward()


def fused(h: Tensor, w: Tensor, y: Tensor, **how) -> None:
    loss = lambda logprob, entropy: torch.where(logprob > -9, -logprob, 0.0) - entropy  # noqa: E731
    linear_logprob_loss(h, w, y, loss, return_entropy=True, **how).loss.backward()


CALLS = {
    "no grad": scored,
    "recomputed": lambda h, w, y, **how: linear_logprob(h, w, y, workspace_mib=1, **how).logprob.sum().backward(),
    "kept": lambda h, w, y, **how: linear_logprob(h, w, y, **how).logprob.sum().backward(),
    "frozen": lambda h, w, y, **how: linear_logprob(h, w.detach(), y, **how).logprob.sum().backward(),
    "every option": with_every_option,
    "ids": over_ids,
    "loss": fused,
    "loss of a frozen head": lambda h, w, y, **how: fused(h, w.detach(), y, **how),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_waits_for_nothing_when_the_active_rows_are_known(call, backend):
    hidden, weight, target, _ = cuda_problem(70, 64, 5003 if backend == "native" else 503, dtype=BF16)
    target[::7] = -100
    index = (target.cpu() != -100).nonzero().flatten().cuda()
    step = partial(
        CALLS[call], hidden.requires_grad_(), weight.requires_grad_(), target, active_index=index, backend=backend
    )
    step()  # Triton compiles, cuBLAS allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_cuda_graph():
    hidden, weight, target, _ = cuda_problem(300, 64, 5003, dtype=BF16)
    index = torch.arange(300, device="cuda")
    score = partial(linear_logprob, active_index=index, return_entropy=True)
    expected = score(hidden, weight, target)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        score(hidden, weight, target)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = score(hidden, weight, target)
    graph.replay()
    assert captured.logprob.equal(expected.logprob)
    assert captured.entropy.equal(expected.entropy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_outside_the_vocabulary_gives_nan(backend, monkeypatch):
    hidden, weight, target, _ = cuda_problem(20, 64, 300, dtype=BF16)
    target[3], target[4] = 300, -1
    logprob = linear_logprob(hidden, weight, target, backend=backend).logprob
    assert logprob.isnan().nonzero().flatten().tolist() == [3, 4]
    frozen = linear_logprob(hidden.requires_grad_(), weight, target, backend=backend).logprob
    assert frozen.isnan().nonzero().flatten().tolist() == [3, 4]
    monkeypatch.setenv("RLFT_FAST_DEBUG", "1")
    with pytest.raises(ValueError, match=r"target_T\[3\] is 300"):
        linear_logprob(hidden, weight, target, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("way", ["recomputed", "frozen", "loss"])
def test_rows_that_the_loss_does_not_see_add_nothing(way, dtype, backend):
    hidden, weight, target, _ = cuda_problem(100, 64, 5003, dtype=dtype)
    seen = torch.ones(100, device="cuda")
    seen[7] = 0
    expected = gradients_of_seen_rows(way, hidden, weight, target, seen, backend)
    assert (expected[0][7] == 0).all()
    hidden[7] = torch.nan
    for actual, good in zip(gradients_of_seen_rows(way, hidden, weight, target, seen, backend), expected, strict=True):
        assert actual.equal(good)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_threshold(softcap, backend):
    hidden, weight, target, _ = cuda_problem(100, 64, 5003, dtype=BF16)
    z = reference.transform_logits(hidden.double() @ weight.double().T, 1.0, softcap, 1.0)
    threshold = z.topk(21).values[:, 19:].mean(-1).float()  # half-way between two logits
    ours, eager, truth = (
        run(partial(function, threshold_T=threshold, softcap=softcap), hidden, weight, target, {}, dtype)
        for function, dtype in (
            (partial(linear_logprob, backend=backend), BF16),
            (reference.linear_logprob, BF16),
            (reference.linear_logprob, F64),
        )
    )
    for o, e, t in zip(ours, eager, truth, strict=True):
        assert_no_further_from_truth(o, e, t)


def test_compiles_to_one_graph(monkeypatch):
    entry = {"device": device_name(torch.device("cuda")), "dtype": "float32", "shape": [40, 64, 300]}
    times = {"milliseconds": {"native": 1.0, "triton": 2.0}}
    measured = [{**entry, **times, "kind": kind} for kind in backends.KINDS]
    monkeypatch.setattr(backends, "_MEASURED", measured)  # `auto` finds a measurement
    hidden, weight, target, old, advantage = loss_problem(T=40, V=300, device="cuda")

    index = (target != -100).nonzero().squeeze(1)

    def step(h: Tensor, w: Tensor) -> Tensor:
        result = linear_logprob(h * 1.0, w, target, return_entropy=True, active_index=index)
        fused = linear_logprob_loss(h * 1.0, w, target, ppo_clip, old, advantage, active_index=index)
        return (result.logprob * advantage).sum() + result.entropy.sum() + 2 * fused.loss

    compiled = gradients(torch.compile(step, fullgraph=True), hidden, weight)
    torch.testing.assert_close(compiled, gradients(step, hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_peak_memory(backend):
    """The workspace bounds the logits. Beside it are float32 dhidden, and memory of GEMMs and reductions."""
    T, D, V = 4096, 1024, 151936
    hidden, weight, target, _ = cuda_problem(T, D, V, dtype=BF16)
    hidden.requires_grad_(), weight.requires_grad_()
    index = torch.arange(T, device="cuda")

    def step() -> None:
        hidden.grad = weight.grad = None
        options = {"active_index": index, "workspace_mib": 128, "backend": backend}
        linear_logprob(hidden, weight, target, **options).logprob.sum().backward()

    step()
    outputs = 2 * (T * D + V * D)
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    extra = torch.cuda.max_memory_allocated() - before - outputs
    assert extra < 128 * 2**20 + 4 * T * D + 32 * 2**20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "workspace_mib"), [(1000, None), (6000, None), (6000, 512)])
def test_scratch_is_the_memory_of_the_loss(T, workspace_mib, backend):
    D, V = 1024, 151936
    hidden, weight, target, _ = cuda_problem(T, D, V, dtype=BF16)
    hidden.requires_grad_(), weight.requires_grad_()
    how = {"workspace_mib": workspace_mib, "backend": backend}
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob, **how)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob, **how)
    measured = torch.cuda.max_memory_allocated() - before - 2 * (T + V) * D
    planned = scratch_bytes(T, D, V, BF16, "cuda", workspace_mib)
    assert measured == pytest.approx(planned, rel=0.1) if backend == "native" else measured < 1.1 * planned


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_than_the_current_one(backend):
    problem = loss_problem(T=300, V=5003, dtype=BF16, device="cuda:0")
    linear = partial(linear_logprob_loss, backend=backend, return_entropy=True)
    expected = run_loss(linear, problem, BF16)
    for ours, same in zip(run_loss(linear, [x.cuda(1) for x in problem], BF16), expected, strict=True):
        assert ours.device.index == 1
        assert torch.equal(ours.cpu(), same.cpu())
