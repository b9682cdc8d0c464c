"""The Triton backend of linear_logprob against float64, in Triton's interpreter where there is no GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from tests.ops.logprob import problems
from tests.ops.logprob.problems import loss_problem, make_problem, ppo_clip, run
from tests.support.numerics import assert_no_further_from_truth

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_logprob = partial(linear_logprob, backend="triton")
triton_loss = partial(linear_logprob_loss, backend="triton")


def on_device(*values: Any) -> list[Any]:
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in values]


def check(D: int, V: int, **how: Any) -> None:
    """Rows: not a multiple of a tile's, and more of them where most of a distribution is one token."""
    problems.check(67, D, V, device=DEVICE, backend="triton", rows=200, **how)


# V: below a block, not a multiple of anything, one column more than a block of 2048.
@pytest.mark.parametrize(
    ("V", "logits"), [(17, "normal"), (257, "low"), (2049, "peaked"), (2049, "extreme"), (300, "flat")]
)
def test_no_further_from_truth_than_pytorch(V, logits):
    check(24, V, logits=logits)


@pytest.mark.parametrize("V", [257, 2049])
def test_fused_forward_no_further_from_truth_than_pytorch(V):
    hidden, weight, target = on_device(*make_problem(67, 100, V)[:3])
    ours, eager, truth = (
        function(hidden.to(dtype), weight.to(dtype), target, return_entropy=True)
        for function, dtype in (
            (triton_logprob, torch.float32),
            (reference.linear_logprob, torch.float32),
            (reference.linear_logprob, torch.float64),
        )
    )
    assert_no_further_from_truth(ours.logprob, eager.logprob, truth.logprob)
    assert_no_further_from_truth(ours.entropy, eager.entropy, truth.entropy)


def test_fused_forward_allocates_no_logits():
    hidden, weight, target = on_device(*make_problem(67, 16, 2100)[:3])
    with torch.profiler.profile(profile_memory=True) as profiler:
        triton_logprob(hidden, weight, target)
    sizes = [event.device_memory_usage if DEVICE == "cuda" else event.cpu_memory_usage for event in profiler.events()]
    assert 0 < max(sizes) < 4 * 67 * 1024  # half a tile


@pytest.mark.parametrize("grad", [False, True])
def test_layout_does_not_matter(grad):
    hidden, weight, target = on_device(*make_problem(67, 100, 300)[:3])
    results = []
    for h, w in ((hidden, weight), (hidden.t().contiguous().t(), weight.t().contiguous().t())):
        h, w = h.detach().requires_grad_(grad), w.detach().requires_grad_(grad)
        logprob = triton_logprob(h, w, target).logprob
        results.append([logprob, *(torch.autograd.grad(logprob.sum(), [h, w]) if grad else [])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("entropy", [False, True])
def test_frozen_weight(entropy):
    check(24, 2100, logits="peaked", train_weight=False, entropy=entropy)


@pytest.mark.parametrize("train_weight", [True, False])
def test_every_option(train_weight):
    hidden, weight, target, _ = make_problem(40, 24, 500)
    target[[0, 7]] = -100
    options = {"bias_V": torch.randn(500), "softcap": 3.0, "logit_scale": 0.7, "temperature": torch.rand(40) + 0.5}
    ours, truth = (
        run(function, *on_device(hidden, weight, target), {k: on_device(v)[0] for k, v in options.items()}, dtype,
            train_weight=train_weight, entropy=train_weight)
        for function, dtype in ((triton_logprob, torch.float32), (reference.linear_logprob, torch.float64))
    )  # fmt: skip
    for o, t in zip(ours, truth, strict=True):
        torch.testing.assert_close(o.double(), t, rtol=2e-5, atol=2e-6)


def test_optional_statistics():
    hidden, weight, target, _ = make_problem(40, 24, 3000, logits="peaked")
    target[::2] = torch.randint(0, 3000, (20,))
    asked_for = {"return_entropy": True, "return_sum_prob_squared": True, "return_top1": True}
    hidden, weight, target = on_device(hidden, weight, target)
    ours = triton_logprob(hidden, weight, target, **asked_for)
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, **asked_for)
    for o, t in zip(ours[:3], truth[:3], strict=True):
        torch.testing.assert_close(o.double(), t, rtol=1e-5, atol=1e-6)
    assert 0 < ours.top1.sum() < 40
    assert ours.top1.equal(truth.top1)


@pytest.mark.parametrize("workspace_mib", [1, 64])  # several chunks, and one
def test_loss_no_further_from_truth_than_pytorch(workspace_mib):
    V = 20_000
    hidden, weight, target, *per_token = on_device(*loss_problem(T=40, V=V))
    results = []
    for function, dtype in (
        (partial(triton_loss, workspace_mib=workspace_mib), torch.float32),
        (reference.linear_logprob_loss, torch.float32),
        (reference.linear_logprob_loss, torch.float64),
    ):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        bias = torch.linspace(-1, 1, V, dtype=dtype, device=DEVICE, requires_grad=True)
        values = [x.to(dtype) for x in per_token]
        result = function(h, w, target, ppo_clip, *values, bias_V=bias, return_entropy=True)
        result.loss.backward()
        results.append([*(x.detach() for x in result), h.grad, w.grad, bias.grad])
    # The loss is one number, whose error has no statistics: a millionth of the terms it sums.
    ours, _, truth = (values.pop(0).double() for values in results)
    assert abs(ours - truth) < 1e-6 * (0.1 + per_token[1].abs()).sum()
    for ours, eager, truth in zip(*results, strict=True):
        assert_no_further_from_truth(ours, eager, truth)


def test_bad_rows_stay_alone():
    hidden, weight, target, _ = make_problem(12, 16, 300)
    hidden[3], hidden[8, 0] = torch.nan, torch.inf
    hidden, weight, target = on_device(hidden.requires_grad_(), weight, target)
    result = triton_logprob(hidden, weight, target, return_entropy=True)
    good = [t for t in range(12) if t not in (3, 8)]
    for values in (result.logprob, result.entropy):
        assert values[good].isfinite().all()
        assert values[[3, 8]].isnan().all()


def test_same_bits_every_run():
    problem = on_device(*make_problem(67, 24, 2100)[:3])
    first, second = (run(triton_logprob, *problem, {}, torch.float32) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_rows_without_upstream_gradient_are_left_out():
    """Unseen rows are marked by nan: one that took part would spoil dweight."""
    hidden, weight, target, _ = make_problem(300, 16, 500)
    hidden, weight, target = on_device(hidden, weight, target)
    silent = torch.rand(300, device=DEVICE) < 0.5
    bad = hidden.masked_fill(silent[:, None], torch.nan).requires_grad_()
    upstream = torch.randn(300, device=DEVICE).masked_fill(silent, 0)
    w = weight.clone().requires_grad_()
    triton_logprob(bad, w, target).logprob.backward(upstream)
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    reference.linear_logprob(h64, w64, target).logprob.backward(upstream.double())
    assert (bad.grad[silent] == 0).all()
    torch.testing.assert_close(bad.grad.double(), h64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-4, atol=1e-4)
