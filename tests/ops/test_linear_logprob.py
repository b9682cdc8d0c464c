"""linear_logprob and linear_logprob_loss against their float64 definition, and their contracts."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

from rlft_fast import ops
from rlft_fast.ops import linear_logprob, linear_logprob_loss, reference, support_logprob
from rlft_fast.ops.tiles import rounded_rows, row_chunks
from tests.devices import DEVICES
from tests.distributed import run_distributed
from tests.numerics import assert_no_further_from_truth

F32, BF16 = torch.float32, torch.bfloat16


def make_problem(
    T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32, seed: int = 0, device: str = "cpu"
):
    """(hidden, weight, target, options) whose logits have a certain character."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=g)
    weight = torch.randn(V, D, generator=g) / D**0.5
    target = torch.randint(0, V, (T,), generator=g)
    options: dict[str, Tensor] = {}
    if logits == "peaked":  # the target has 0.9 of the mass, nearly all, or in every eighth row all of it
        margin_T = torch.empty(T).uniform_(1.5, 2.5, generator=g) * math.log(V)
        margin_T[::8] *= 10
        hidden += (margin_T / weight[target].square().sum(-1))[:, None] * weight[target]
    elif logits == "flat":
        weight *= 1e-3
    elif logits == "low":  # everything far below 0: a maximum that starts at 0 underflows
        options["bias_V"] = torch.full((V,), -150.0)
    elif logits == "extreme":
        weight *= 10
    options = {name: value.to(device) for name, value in options.items()}
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device), options


def run(function, hidden: Tensor, weight: Tensor, target: Tensor, options, dtype, *, train_weight=True, entropy=True):
    """[logprob, entropy, dhidden, dweight] for random upstream gradients, in ``dtype``."""
    h = hidden.to(dtype).detach().clone().requires_grad_()
    w = weight.to(dtype).detach().clone().requires_grad_(train_weight)
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    result = function(h, w, target, return_entropy=entropy, **cast)
    g = torch.Generator().manual_seed(1)
    loss = (result.logprob * torch.randn(target.shape, generator=g).to(target.device)).sum()
    if entropy:
        loss = loss + (result.entropy * torch.randn(target.shape, generator=g).to(target.device)).sum()
    loss.backward()
    outputs = [result.logprob.detach(), h.grad]
    return outputs + ([result.entropy.detach()] if entropy else []) + ([w.grad] if train_weight else [])


def gradients_without_row_7(way: str, hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> list[Tensor]:
    """[dhidden] and, unless the weight is frozen, [dweight] of a loss that does not see row 7."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(way != "frozen")
    upstream = torch.ones(target.shape, device=target.device)
    upstream[7] = 0
    if way == "loss":
        masked = lambda logprob, _, seen: torch.where(seen > 0, logprob, 0.0)  # noqa: E731
        linear_logprob_loss(h, w, target, masked, upstream, backend=backend).loss.backward()
    else:
        linear_logprob(h, w, target, backend=backend).logprob.backward(upstream)
    return [h.grad] if way == "frozen" else [h.grad, w.grad]


def check(
    T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32, device: str = "cpu",
    backend: str = "auto", **how,
) -> None:  # fmt: skip
    """Errors are compared over several problems where one has few rows: a single number is right or wrong by luck."""
    make = partial(make_problem, T, D, V, logits=logits, dtype=dtype, device=device)
    problems = [make(seed=seed) for seed in range(-(-64 // T))]

    def results(function, dtype):
        runs = [run(function, *problem, dtype, **how) for problem in problems]
        return [torch.cat(values) for values in zip(*runs, strict=True)]

    ours, eager = results(partial(linear_logprob, backend=backend), dtype), results(reference.linear_logprob, dtype)
    for o, e, t in zip(ours, eager, results(reference.linear_logprob, torch.float64), strict=True):
        assert o.isfinite().all()
        assert_no_further_from_truth(o, e, t)


# V: one below and above a lane multiple (17, 257), an odd one below a block (37), just over a tile (2049), several
# tiles with a ragged end (5003). T: a single row, odd, more than one row multiple.
@pytest.mark.parametrize("logits", ["normal", "peaked", "flat", "low", "extreme"])
@pytest.mark.parametrize("V", [17, 37, 257, 2049, 5003])
@pytest.mark.parametrize("T", [1, 7, 100])
def test_no_further_from_truth_than_pytorch(T, V, logits):
    check(T, 64, V, logits=logits)


@pytest.mark.parametrize(
    "how", [{"train_weight": False}, {"train_weight": False, "entropy": False}, {"entropy": False}]
)
def test_frozen_weight_and_no_entropy(how):
    check(100, 64, 5003, **how)


@pytest.mark.parametrize("logits", ["normal", "peaked", "flat"])
@pytest.mark.parametrize("how", [{}, {"train_weight": False, "entropy": False}])
def test_bfloat16(logits, how):
    check(100, 64, 5003, logits=logits, dtype=BF16, **how)


def test_bfloat16_statistics_are_float32():
    hidden, weight, target, _ = make_problem(10, 64, 257, dtype=BF16)
    result = linear_logprob(hidden, weight, target, return_entropy=True)
    assert result.logprob.dtype == result.entropy.dtype == F32


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(0, 40), D=st.integers(1, 40), V=st.integers(1, 3000), softcap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25]), bias=st.booleans(), per_token=st.booleans(),
    workspace_mib=st.sampled_from([1, 64]), ignored=st.floats(0, 1), seed=st.integers(0, 5),
)  # fmt: skip
def test_any_shape_and_option(device, T, D, V, softcap, scale, bias, per_token, workspace_mib, ignored, seed):
    hidden, weight, target, _ = make_problem(T, D, V, seed=seed)
    target[torch.rand(T) < ignored] = -100
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": 0.7}
    if bias:
        options["bias_V"] = torch.randn(V)
    if per_token:
        options["temperature"] = torch.rand(T) + 0.5
    truth = run(reference.linear_logprob, hidden, weight, target, options, torch.float64)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    problem = (hidden.to(device), weight.to(device), target.to(device), {**options, "workspace_mib": workspace_mib})
    for o, t in zip(run(linear_logprob, *problem, F32), truth, strict=True):
        torch.testing.assert_close(o.cpu().double(), t, rtol=2e-4, atol=2e-5)


def test_optional_statistics():
    hidden, weight, target, _ = make_problem(100, 64, 5003, logits="peaked")
    target[::2] = torch.randint(0, 5003, (50,))
    target[5] = -100
    asked_for = {"return_sum_prob_squared": True, "return_top1": True}
    ours = linear_logprob(hidden, weight.requires_grad_(), target, **asked_for)
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, **asked_for)
    torch.testing.assert_close(ours.sum_prob_squared.double(), truth.sum_prob_squared, rtol=1e-5, atol=1e-7)
    assert 0 < ours.top1.sum() < 100
    assert ours.top1.equal(truth.top1)
    assert ours.entropy is None
    assert not ours.sum_prob_squared.requires_grad


def test_bias_gradient():
    hidden, weight, target, _ = make_problem(50, 64, 5003)
    grads = []
    for function, dtype in ((linear_logprob, F32), (reference.linear_logprob, torch.float64)):
        bias = torch.linspace(-1, 1, 5003, dtype=dtype, requires_grad=True)
        function(hidden.to(dtype), weight.to(dtype), target, bias_V=bias).logprob.square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=1e-6)


def test_ignored_rows_are_zero_and_without_gradient():
    hidden, weight, target, _ = make_problem(20, 16, 300)
    hidden[5] = torch.nan  # even what stands in an ignored row must not matter
    target[[0, 5, 19]] = -100
    hidden.requires_grad_()
    result = linear_logprob(hidden, weight.requires_grad_(), target, return_entropy=True)
    (result.logprob.sum() + result.entropy.sum()).backward()
    for values in (result.logprob, result.entropy, hidden.grad):
        assert (values[[0, 5, 19]] == 0).all()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("T", [0, 5])
def test_nothing_to_do(T):
    """No rows, or every row ignored: zeros everywhere, also in gradients."""
    hidden, weight = torch.randn(T, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    target = torch.full((T,), -100)
    linear_logprob(hidden, weight, target).logprob.sum().backward()
    assert (weight.grad == 0).all()
    weight.grad = None
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob).loss.backward()
    assert (weight.grad == 0).all()
    assert hidden.grad.shape == (T, 8)
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_numbers_stay_in_their_row(bad):
    hidden, weight, target, _ = make_problem(8, 16, 300)
    clean = linear_logprob(hidden, weight, target).logprob
    hidden[3, 2] = bad
    broken = linear_logprob(hidden, weight, target).logprob
    assert not broken[3].isfinite()
    others = torch.arange(8) != 3
    assert torch.equal(broken[others], clean[others])


def test_impossible_tokens():
    """A logit of -inf has probability 0, adds nothing to the entropy, and gets no gradient."""
    hidden, weight, target, _ = make_problem(6, 16, 40)
    target = target % 20
    bias = torch.zeros(40)
    bias[20:] = -torch.inf
    hidden.requires_grad_()
    result = linear_logprob(hidden, weight, target, bias_V=bias, return_entropy=True)
    expected = linear_logprob(hidden, weight[:20], target, return_entropy=True)
    torch.testing.assert_close(result.logprob, expected.logprob)
    torch.testing.assert_close(result.entropy, expected.entropy)
    ours, theirs = (torch.autograd.grad(r.entropy.sum(), hidden)[0] for r in (result, expected))
    torch.testing.assert_close(ours, theirs)


def test_strided_and_expanded_upstream_gradients():
    hidden, weight, target, _ = make_problem(12, 16, 300)
    grads = []
    for upstream in (torch.arange(24.0)[::2], torch.tensor(3.0).expand(12)):
        for g in (upstream, upstream.contiguous()):
            h = hidden.clone().requires_grad_()
            linear_logprob(h, weight.clone().requires_grad_(), target).logprob.backward(g)
            grads.append(h.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[2], grads[3])


# Column-major hidden states come from a convolution, such weights from GPT-2; V of several tiles, the last one ragged.
@pytest.mark.parametrize("way", ["no grad", "forward + backward", "frozen head", "loss"])
def test_layout_does_not_matter(way):
    hidden, weight, target, _ = make_problem(12, 16, 5003)
    bias = torch.randn(5003)

    def results(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        h, w, b = hidden.detach().requires_grad_(), weight.detach(), bias.detach()
        if way != "frozen head":
            w.requires_grad_()
            b.requires_grad_()
        if way == "no grad":
            with torch.no_grad():
                return [linear_logprob(h, w, target, bias_V=b).logprob]
        if way == "loss":
            out = linear_logprob_loss(h, w, target, lambda logprob, _: -logprob, bias_V=b)
            return [out.logprob, *torch.autograd.grad(out.loss, [h, w, b])]
        out = linear_logprob(h, w, target, bias_V=b).logprob
        return [out, *torch.autograd.grad(out.sum(), [x for x in (h, w, b) if x.requires_grad])]

    def every_second(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]

    expected = results(hidden, weight, bias)
    for layout in (lambda x: x.t().contiguous().t(), every_second):
        for ours, contiguous in zip(results(*map(layout, (hidden, weight, bias))), expected, strict=True):
            torch.testing.assert_close(ours, contiguous)
    if way == "no grad":
        constant = linear_logprob(hidden, weight, target, bias_V=torch.ones(1).expand(5003)).logprob
        torch.testing.assert_close(constant, linear_logprob(hidden, weight, target).logprob)


@pytest.mark.parametrize("workspace_mib", [1, 64])  # chunks of different numbers of rows in each path, and one chunk
def test_same_bits_in_every_path_and_run(workspace_mib):
    """No grad, recomputing backward, frozen weight, loss: the same log-probabilities, so a ratio of exactly 1."""
    linear_logprob, linear_logprob_loss = (  # hides the imported ones
        partial(function, workspace_mib=workspace_mib) for function in (ops.linear_logprob, ops.linear_logprob_loss)
    )
    hidden, weight, target, _ = make_problem(333, 64, 5003)
    hidden.requires_grad_()
    trainable = weight.clone().requires_grad_()
    with torch.no_grad():
        expected = linear_logprob(hidden, weight, target).logprob
    assert torch.equal(linear_logprob(hidden, weight, target, return_entropy=True).logprob, expected)
    assert torch.equal(linear_logprob(hidden, trainable, target).logprob, expected)
    assert torch.equal(linear_logprob(hidden, weight, target).logprob, expected)
    first = linear_logprob_loss(hidden, trainable, target, ppo_clip, expected, expected)
    assert torch.equal(first.logprob, expected)
    again = linear_logprob_loss(hidden, trainable, target, ppo_clip, expected, expected)
    grads = [torch.autograd.grad(result.loss, [hidden, trainable]) for result in (first, again)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@given(num_rows=st.integers(0, 3000), most=st.integers(1, 700))
def test_chunks_of_rows_are_alike(num_rows, most):
    """Among fewer than 16 rows a row has other bits, so that no chunk may be the small rest of a division."""
    limit = rounded_rows(most, torch.empty(0))
    chunks = list(row_chunks(num_rows, limit, torch.empty(0)))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(num_rows))
    assert all(0 < size <= limit <= most for size in sizes)
    if num_rows >= 16 and limit >= 32:
        assert min(sizes) >= 16


# ---- linear_logprob_loss --------------------------------------------------------------------------------------------


def ppo_clip(logprob: Tensor, entropy: Tensor | None, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprob - old_logprob).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return loss if entropy is None else loss - 0.1 * entropy


def weighted_by(logprob: Tensor, _, weight: Tensor) -> Tensor:
    return -logprob * weight


def loss_problem(T=300, D=64, V=5003, dtype=F32):
    hidden, weight, target, _ = make_problem(T, D, V, dtype=dtype)
    target[::7] = -100
    g = torch.Generator().manual_seed(2)
    old = reference.linear_logprob(hidden, weight, target).logprob + 0.3 * torch.randn(T, generator=g)
    return hidden, weight, target, old, torch.randn(T, generator=g)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("workspace_mib", [1, 64])  # six chunks, and one
def test_loss_no_further_from_truth_than_pytorch(dtype, entropy, workspace_mib):
    hidden, weight, target, old, advantage = loss_problem(dtype=dtype)
    results = []
    for function, to in (
        (linear_logprob_loss, dtype),
        (reference.linear_logprob_loss, dtype),
        (reference.linear_logprob_loss, torch.float64),
    ):  # fmt: skip
        options = {"workspace_mib": workspace_mib} if function is linear_logprob_loss else {}
        h, w = hidden.to(to).clone().requires_grad_(), weight.to(to).clone().requires_grad_()
        out = function(h, w, target, ppo_clip, old, advantage, temperature=0.8, return_entropy=entropy, **options)
        (2 * out.loss).backward()
        results.append([out.loss.detach(), out.logprob, h.grad, w.grad] + ([out.entropy] if entropy else []))
        assert not out.logprob.requires_grad
    # The loss is one number, whose error has no statistics: a millionth of the terms it sums.
    ours, _, truth = (values.pop(0).double() for values in results)
    assert abs(ours - truth) < 1e-6 * (0.1 + advantage.abs()).sum()
    for ours, eager, truth in zip(*results, strict=True):
        assert_no_further_from_truth(ours, eager, truth)


def test_loss_gradients_only_where_needed():
    hidden, weight, target, old, advantage = loss_problem()
    hidden.requires_grad_()
    linear_logprob_loss(hidden, weight, target, ppo_clip, old, advantage).loss.backward()
    with_weight = hidden.grad.clone()
    hidden.grad = None
    linear_logprob_loss(hidden, weight.requires_grad_(), target, ppo_clip, old, advantage).loss.backward()
    assert torch.equal(hidden.grad, with_weight)
    with torch.no_grad():
        assert not linear_logprob_loss(hidden, weight, target, ppo_clip, old, advantage).loss.requires_grad


def test_constant_loss_has_zero_gradient():
    hidden, weight, target, *_ = loss_problem()
    weight.requires_grad_()
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: torch.ones_like(logprob)).loss.backward()
    assert (weight.grad == 0).all()


def test_second_backward_is_an_error_not_a_wrong_number():
    hidden, weight, target, old, advantage = loss_problem()
    loss = linear_logprob_loss(hidden, weight.requires_grad_(), target, ppo_clip, old, advantage).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


class NoGradient(torch.autograd.Function):
    """Hands on a value, and None backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


# What each way of computing calls what comes out of it: the loss as a value of one call.
WAYS = {
    "recomputed": lambda h, w, y: linear_logprob(h, w.requires_grad_(), y).logprob,
    "frozen": lambda h, w, y: linear_logprob(h, w, y).logprob,
    "loss": lambda h, w, y: linear_logprob_loss(h, w.requires_grad_(), y, lambda logprob, _: logprob).loss,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_upstream_gradient(way):
    hidden, weight, target, _ = make_problem(6, 5, 40)
    NoGradient.apply(WAYS[way](hidden.requires_grad_(), weight, target)).sum().backward()
    assert hidden.grad is None or (hidden.grad == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_double_backward_is_an_error_not_a_wrong_number(way):
    hidden, weight, target, _ = make_problem(6, 5, 40)
    hidden.requires_grad_()
    value = WAYS[way](hidden, weight, target).square().sum()
    (grad,) = torch.autograd.grad(value, hidden, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(grad.square().sum(), hidden)


# 1 / 3001, as of the mean over a batch, is no bfloat16; 1e-7 and 1e5 are no float16, though the gradients are.
@pytest.mark.parametrize("way", ["frozen", "loss"])
@pytest.mark.parametrize(
    ("dtype", "upstream"), [(BF16, 1 / 3001), (torch.float16, 1e-7), (torch.float16, 1e5)], ids=str
)
def test_upstream_gradients_are_not_rounded(dtype, upstream, way):
    hidden, weight, target, _ = make_problem(64, 16, 200, dtype=dtype)
    weight *= 0.05 if upstream > 1 else 30
    (WAYS[way](hidden.requires_grad_(), weight, target).sum() * upstream).backward()
    h = hidden.detach().double().requires_grad_()
    (reference.linear_logprob(h, weight.detach().double(), target).logprob.sum() * upstream).backward()
    # Signed like the gradient, errors of single roundings cancel, and that of the upstream gradient does not.
    error = ((hidden.grad.double() - h.grad) * h.grad.sign()).sum() / h.grad.abs().sum()
    assert abs(error) < (0.02 if upstream == 1e-7 else 2e-4)


# ---- torch's own checks ---------------------------------------------------------------------------------------------


def op_arguments(requires_grad: bool, *group: str):
    hidden, weight, target, _ = make_problem(6, 8, 50)
    index = torch.arange(6)
    tensors = [hidden.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), target, index, None]
    return [*tensors, torch.ones(1), *([torch.zeros(6)] if group else []), 0.0, 1.0, "native", *group, 64]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    namespace = torch.ops.rlft_fast
    torch.library.opcheck(
        namespace.linear_logprob, (*op_arguments(requires_grad, ""), True, True, True), test_utils=tests
    )
    torch.library.opcheck(namespace.linear_logprob_frozen, tuple(op_arguments(requires_grad)), test_utils=tests)
    torch.library.opcheck(namespace.linear_logprob_frozen_backward, (torch.ones(6, 8), torch.ones(6)))


def test_opcheck_epilogues():
    z, row = torch.randn(4, 9), torch.zeros(4)
    common = (z, torch.tensor([0, 3, 8, 1]), 0, None, torch.ones(1), 0.0, 1.0)
    stats = (torch.full((4,), -torch.inf), row.clone(), row.clone(), row.clone(), row.clone())
    torch.library.opcheck(torch.ops.rlft_fast.logprob_stats_, (*common, *stats))
    frozen = (stats[0], row.clone(), row.clone(), row.clone(), row.clone(), torch.zeros(4, 6), torch.empty_like(z))
    torch.library.opcheck(torch.ops.rlft_fast.logprob_frozen_, (*common, *frozen))
    torch.library.opcheck(torch.ops.rlft_fast.use_huge_pages_, (torch.zeros(4),))
    upstream = (row + 1, row + 2, row + 1, row + 1, row + 1)
    torch.library.opcheck(torch.ops.rlft_fast.logprob_grad_, (*common, *upstream, torch.empty_like(z)))


def test_gradcheck_of_the_reference():
    hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    bias, target = torch.randn(7, dtype=torch.float64), torch.tensor([0, 6, -100, 3, 3])

    def function(h, w, b):
        return tuple(
            reference.linear_logprob(h, w, target, bias_V=b, softcap=3.0, temperature=0.7, return_entropy=True)[:2]
        )

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (hidden, weight, bias)])


def test_compiles_to_one_graph():
    hidden, weight, target, old, advantage = loss_problem(T=40, V=300)

    def step(h: Tensor, w: Tensor) -> Tensor:
        result = linear_logprob(h * 1.0, w, target, return_entropy=True)
        frozen = linear_logprob(h * 1.0, weight, target)
        fused = linear_logprob_loss(h * 1.0, w, target, ppo_clip, old, advantage)
        return ((result.logprob + frozen.logprob) * advantage).sum() + result.entropy.sum() + 2 * fused.loss

    grads = []
    for function in (step, torch.compile(step, fullgraph=True)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        function(h, w).backward()
        grads.append((h.grad, w.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def weighted(weight: float):
    def loss(logprob: Tensor, _, factor: float = weight) -> Tensor:
        return -logprob * factor * weight

    return loss


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, logprob: Tensor, _) -> Tensor:
        return -logprob * self.weight**2


takes_objects = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="dynamo takes no object as a constant: it raises"
)


@pytest.mark.parametrize("make", [weighted, pytest.param(Weighted, marks=takes_objects)])
def test_another_loss_function_compiles_again(make):
    """The same code with another closure, default or attribute must not be the first one for good."""
    hidden, weight, target, _ = make_problem(20, 8, 50)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(h: Tensor, loss_fn) -> Tensor:
        return linear_logprob_loss(h, weight, target, loss_fn).loss

    for loss_fn in map(make, (1.0, 2.0, 3.0)):
        expected = linear_logprob_loss(hidden, weight, target, loss_fn).loss
        for _ in range(2):  # an eager call in between leaves the graph its function
            torch.testing.assert_close(step(hidden, loss_fn), expected)
            linear_logprob_loss(hidden, weight, target, loss_fn)


@pytest.mark.parametrize("loss_fn", [partial(weighted(2.0), factor=2.0), Weighted(2.0).__call__])
def test_loss_functions_that_are_new_each_time_do_not_compile(loss_fn):
    hidden, weight, target, _ = make_problem(20, 8, 50)

    def step(h: Tensor) -> Tensor:
        return linear_logprob_loss(h, weight, target, loss_fn).loss

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"not a functools\.partial or a bound method"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    assert torch.equal(torch.compile(step, backend="aot_eager")(hidden), step(hidden))  # outside of the graph


def test_threads_share_a_loss_function():
    hidden, weight, target, _ = make_problem(6, 5, 40)
    expected = linear_logprob_loss(hidden, weight, target, weighted(1.0)).loss
    shared = weighted(1.0)
    with ThreadPoolExecutor(4) as pool:
        losses = pool.map(lambda _: linear_logprob_loss(hidden, weight, target, shared).loss, range(1000))
    assert all(loss == expected for loss in losses)


# ---- sharded vocabulary ---------------------------------------------------------------------------------------------

SHARDS = {2: [1500, 1503], 3: [1, 2000, 1002]}  # uneven, one of a single token


def check_vocab_group(rank: int, world_size: int) -> None:
    bounds = [0, *torch.tensor(SHARDS[world_size]).cumsum(0).tolist()]
    own = slice(bounds[rank], bounds[rank + 1])
    hidden, weight, target, old, advantage = loss_problem(T=60, V=3003)
    target[:3] = torch.tensor([0, 1, 3002])  # the first and the last row of shards
    bias = torch.linspace(-1, 1, 3003)
    target[3:9] = (hidden[3:9] @ weight.T + bias).argmax(-1)

    def results(rows: slice, **group) -> list[Tensor]:
        h, w, b = (x.clone().requires_grad_() for x in (hidden, weight[rows], bias[rows]))
        options = {"bias_V": b, "softcap": 20.0, "temperature": 0.7, "return_entropy": True, "workspace_mib": 1} | group
        some = torch.full((60,), -torch.inf).index_fill_(0, torch.arange(20), 0.0)
        more = {"return_sum_prob_squared": True, "return_top1": True, "threshold_T": some}
        out = linear_logprob(h, w, target, **options, **more)
        ((out.logprob * old).sum() + (out.entropy * advantage).sum()).backward()
        grads = [h.grad, w.grad, b.grad]
        h.grad, w.grad, b.grad = None, None, None
        fused = linear_logprob_loss(h, w, target, ppo_clip, old, advantage, **options)
        fused.loss.backward()
        return [*out, *fused, *grads, h.grad, w.grad, b.grad]

    whole = results(slice(None))
    sharded = results(own, vocab_group=dist.group.WORLD)
    for actual, expected in zip(sharded, whole, strict=True):
        expected = expected[own] if expected.dim() and expected.shape[0] == 3003 else expected
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        assert actual.any()
    with pytest.raises(ValueError, match="outside the vocabulary of 3003"):
        linear_logprob(hidden, weight[own], target.fill_(3003), vocab_group=dist.group.WORLD)
    rows = 60 - rank
    with pytest.raises(ValueError, match="disagree"):
        linear_logprob(hidden[:rows], weight[own], target[:rows], vocab_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="gather the weight"):
        linear_logprob(hidden, weight[own], target, vocab_group=dist.group.WORLD, backend="reference")


def check_uneven_shards(rank: int, sizes: list[int]) -> None:
    """Two MiB hold one row of the larger shard's logits and four of the smaller's: both reduce row by row."""
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    own = slice(bounds[rank], bounds[rank + 1])
    hidden, weight, target, _ = make_problem(8, 4, sum(sizes))
    advantage = torch.linspace(-1, 1, 8)

    def results(rows: slice, compiles: bool = False, **group) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        call = torch.compile(linear_logprob_loss, fullgraph=True, backend="aot_eager", disable=not compiles)
        fused = call(h, w, target, weighted_by, advantage, workspace_mib=2, active_index=torch.arange(8), **group)
        fused.loss.backward()
        out = linear_logprob(h, w, target, workspace_mib=1, **group).logprob
        return [fused.loss.detach(), fused.logprob, out.detach(), h.grad, w.grad]

    expected = results(slice(None))
    for compiles in (False, True):
        actual = results(own, compiles, vocab_group=dist.group.WORLD)
        for ours, whole in zip(actual, [*expected[:-1], expected[-1][own]], strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def check_shards_that_all_ranks_refuse(rank: int) -> None:
    hidden, target = torch.randn(2, 1), torch.zeros(2, dtype=torch.int64)
    options = {"vocab_group": dist.group.WORLD, "workspace_mib": 1}
    for sizes, message in (([300_000, 5], "cannot hold one row of logits .300000"), ([10, 0], r"they hold \[10, 0\]")):
        with pytest.raises(ValueError, match=message):
            linear_logprob_loss(hidden, torch.randn(sizes[rank], 1), target, weighted_by, torch.ones(2), **options)
    with pytest.raises(ValueError, match=r"they hold \[10, 0\]"):
        linear_logprob(hidden, torch.randn([10, 0][rank], 1), target, **options)


@pytest.mark.dist
def test_uneven_shards():
    run_distributed(check_uneven_shards, 2, [400_000, 120_000])


@pytest.mark.dist
def test_shards_that_all_ranks_refuse():
    run_distributed(check_shards_that_all_ranks_refuse, 2)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", SHARDS)
def test_sharded_vocabulary(world_size):
    run_distributed(check_vocab_group, world_size, world_size)


# ---- memory ---------------------------------------------------------------------------------------------------------

_PEAK = """
import re, torch
from rlft_fast import ops
from rlft_fast.ops import linear_logprob, linear_logprob_loss
torch.set_num_threads(1)
hidden, weight = torch.randn(1024, 64, requires_grad=True), torch.randn(49152, 64, requires_grad=True)
target, g = torch.randint(0, 49152, (1024,)), torch.randn(1024)
def step():
    hidden.grad = weight.grad = None
    {step}
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
step()
hidden.grad = weight.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = peak()
step()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize(
    "step",
    [
        "(linear_logprob(hidden, weight, target, workspace_mib=16).logprob * g).sum().backward()",
        "linear_logprob_loss(hidden, weight, target, lambda lp, _, g: lp * g, g, workspace_mib=16).loss.backward()",
    ],
)
def test_peak_memory(step):
    """The logits alone would take 192 MiB; the weight gradient takes 12 MiB, and the workspace may take 16."""
    code = _PEAK.replace("{step}", step)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(output) < 12 + 16 + 8


# ---- bad input ------------------------------------------------------------------------------------------------------

H, W, Y = torch.zeros(4, 8), torch.zeros(10, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((H.unsqueeze(0), W, Y), {}, ValueError, r"hidden_TD \(T, D\).*flatten"),
        ((H, torch.zeros(10, 7), Y), {}, ValueError, r"\(10, 7\)"),
        ((H, W[:0], Y), {}, ValueError, "no rows"),
        ((H, W, Y[:3]), {}, ValueError, r"target_T of shape \(4,\)"),
        ((H, W, Y.int()), {}, TypeError, "int64"),
        ((H, W.bfloat16(), Y), {}, TypeError, "bfloat16"),
        ((H.int(), W.int(), Y), {}, TypeError, "int32"),
        ((H, W, Y), {"bias_V": torch.zeros(9)}, ValueError, r"bias_V of shape \(10,\)"),
        ((H, W, Y), {"temperature": 0.0}, ValueError, "temperature must be positive"),
        ((H, W, Y), {"temperature": torch.inf}, ValueError, "temperature must be positive"),
        ((H, W, Y), {"temperature": 1e-39}, ValueError, "temperature must be positive, from 1.2e-38 to 8.5e"),
        ((H, W, Y), {"temperature": None}, ValueError, "temperature must be a number, got None"),
        ((H, W, Y), {"temperature": torch.tensor(1.0)}, ValueError, r"got \(\); one for all is a float"),
        ((H, W, Y), {"temperature": torch.tensor([1, 1, 1, torch.inf])}, ValueError, "got inf in row 3"),
        ((H, W, Y), {"temperature": torch.tensor([1, 1e-40, 1, 1])}, ValueError, "positive.* in row 1"),
        ((H, W, Y), {"softcap": 1e-46}, ValueError, "softcap must be from 1.2e-38"),
        ((H, W, Y), {"softcap": "30"}, ValueError, "softcap must be a number, got '30'"),
        ((H, W, Y), {"logit_scale": None}, ValueError, "logit_scale must be a number, got None"),
        ((H, W, Y), {"ignore_index": None}, ValueError, "ignore_index must be an int, got None"),
        ((H, W, Y), {"workspace_mib": 2.0}, ValueError, "workspace_mib must be an int, got 2.0"),
        ((H, W, Y.numpy()), {}, ValueError, "target_T must be a torch.Tensor, got ndarray"),
        ((H, W, None), {}, ValueError, "target_T must be a torch.Tensor, got NoneType"),
        ((H, W, Y), {"active_index": [0, 1]}, ValueError, "active_index must be a torch.Tensor, got list"),
        ((H, W, Y), {"temperature": torch.ones(3)}, ValueError, "one value per token"),
        ((H, W, Y), {"temperature": torch.tensor([1.0, 1.0, 0.0, 1.0])}, ValueError, "positive.* got 0.0 in row 2"),
        ((H, W, Y), {"softcap": torch.inf}, ValueError, "softcap"),
        ((H, W, Y), {"bias_V": torch.zeros(10, dtype=torch.int64)}, TypeError, "bias_V must be floating point"),
        ((H[0], W, Y), {}, ValueError, r"got \(8,\)"),
        ((H, W, Y), {"active_index": torch.arange(4).int()}, TypeError, "int32"),
        ((H, W, Y), {"active_index": torch.arange(4)[None]}, ValueError, "one dimension"),
        ((H, W, Y), {"active_index": torch.arange(5)}, ValueError, "expected the 4 rows .*, got 5 rows"),
        ((H, W, Y), {"active_index": torch.arange(4).flip(0)}, ValueError, "ascending"),
        ((H, W, Y), {"active_index": torch.arange(4, device="meta")}, ValueError, "active_index is on meta"),
        ((H, W, Y), {"softcap": -1.0}, ValueError, "softcap"),
        ((H, W, Y), {"workspace_mib": 0}, ValueError, "workspace_mib"),
        ((H, W, Y), {"backend": "cuda"}, ValueError, "backend must be"),
        ((H, W.to("meta"), Y), {}, ValueError, "weight_VD is on meta"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        linear_logprob(*arguments, **options)
    with pytest.raises(error, match=message):
        linear_logprob_loss(*arguments, lambda logprob, _: logprob, **options)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rows_without_a_target_need_no_temperature(backend):
    hidden, weight, target, _ = make_problem(4, 8, 30)
    target[2] = -100

    def results(temperature) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options: dict[str, Any] = {"temperature": temperature, "return_entropy": True, "backend": backend}
        out = linear_logprob(h, w, target, **options)
        fused = linear_logprob_loss(h, w, target, ppo_clip, torch.zeros(4), torch.ones(4), **options)
        return [out.logprob, *torch.autograd.grad(out.logprob.sum() + out.entropy.sum() + fused.loss, [h, w])]

    for actual, expected in zip(results(torch.tensor([1.0, 1.0, 0.0, 1.0])), results(1.0), strict=True):
        assert actual.equal(expected)


def test_float64_stays_float64():
    hidden, weight, target, _ = make_problem(4, 8, 30)
    result = linear_logprob(hidden.double(), weight.double(), target)
    assert result.logprob.equal(reference.linear_logprob(hidden.double(), weight.double(), target).logprob)


@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_is_refused(way):
    hidden, weight, target, _ = make_problem(4, 8, 30)
    with torch.autograd.forward_ad.dual_level():
        hidden = torch.autograd.forward_ad.make_dual(hidden, hidden)
        with pytest.raises(ValueError, match=r"\(4, 8\) input carries a tangent.*backend='reference'"):
            WAYS[way](hidden, weight, target)
        result = linear_logprob(hidden, weight, target, backend="reference")
        assert torch.autograd.forward_ad.unpack_dual(result.logprob).tangent.any()


def check_sharded_tensors(rank: int) -> None:
    """They are named before torch's own error, whichever they are, and the advice helps."""
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    dist.broadcast(hidden, 0), dist.broadcast(weight, 0)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    calls = (
        partial(linear_logprob),
        partial(linear_logprob_loss, loss_fn=lambda logprob, _: logprob),
        partial(support_logprob, support_TK=torch.zeros(4, 1, dtype=torch.int64)),
        partial(support_logprob, threshold_T=torch.zeros(4)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"weight_VD is a DTensor.*Shard\(dim=0\).*LogprobHead.*vocab_group"):
            call(hidden_TD=hidden, weight_VD=sharded, target_T=target)
        with pytest.raises(ValueError, match=r"hidden_TD is a DTensor"):
            call(hidden_TD=distribute_tensor(hidden, mesh, [Replicate()]), weight_VD=weight, target_T=target)
    expected = linear_logprob(hidden, weight, target).logprob
    whole = linear_logprob(hidden, sharded.full_tensor(), target).logprob
    local = linear_logprob(hidden, sharded.to_local(), target, vocab_group=mesh.get_group()).logprob
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(local, expected)


@pytest.mark.dist
def test_sharded_tensors_are_named():
    run_distributed(check_sharded_tensors, 2)


@pytest.mark.parametrize("bad_target", [10, -1])
def test_target_outside_the_vocabulary(bad_target):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        linear_logprob(H, W, torch.tensor([0, 1, bad_target, 2]))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("loss", "got"), [(Tensor.sum, r"got \(\)"), (lambda _: 1.0, "got float"), (lambda x: (x, x), "got tuple")]
)
def test_bad_loss_function(loss, got, backend):
    with pytest.raises(ValueError, match=rf"one loss per token, a \(4,\) tensor; {got}"):
        linear_logprob_loss(H, W, Y, lambda logprob, _: loss(logprob), backend=backend)


@pytest.mark.parametrize("values", [None, [0.0] * 4])
def test_bad_values_per_token(values):
    with pytest.raises(ValueError, match=rf"per_token\[0\] must be a \(4,\) tensor .*got {type(values).__name__}"):
        linear_logprob_loss(H, W, Y, lambda logprob, _, x: logprob, values)
    with pytest.raises(ValueError, match=r"per_token\[0\]"):
        linear_logprob_loss(H, W, Y, lambda logprob, _, x: logprob, torch.zeros(3))


def test_a_row_of_logits_must_fit_the_workspace():
    hidden, weight, target = torch.randn(2, 1), torch.randn(300_000, 1), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cannot hold one row.*at least 2"):
        linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob, workspace_mib=1)


def test_autocast_casts_as_linear_does():
    hidden, weight, target, _ = make_problem(40, 16, 300)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = linear_logprob(h, w, target)
        fused = linear_logprob_loss(h, w, target, lambda logprob, _: logprob)
    expected = linear_logprob(hidden.bfloat16(), weight.bfloat16(), target).logprob
    assert result.logprob.dtype == F32
    assert result.logprob.equal(expected)
    assert fused.logprob.equal(expected)
    result.logprob.sum().backward()
    assert h.grad.dtype == w.grad.dtype == F32
