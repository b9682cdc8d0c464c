"""linear_logprob against its float64 definition, and its contract."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlft_fast import ops
from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.tiles import rounded_rows, row_chunks
from tests.ops.logprob.problems import WAYS, check, loss_problem, make_problem, ppo_clip, run
from tests.support.devices import DEVICES
from tests.support.memory import saved_sizes

F32, BF16 = torch.float32, torch.bfloat16


# V: one below and above a lane multiple (17, 257), an odd one below a block (37), just over a tile (2049), several
# tiles with a ragged end (5003). T: a single row, odd, more than one row multiple.
@pytest.mark.parametrize("logits", ["normal", "peaked", "flat", "low", "extreme"])
@pytest.mark.parametrize("V", [17, 37, 257, 2049, 5003])
@pytest.mark.parametrize("T", [1, 7, 100])
def test_no_further_from_truth_than_pytorch(T, V, logits):
    check(T, 64, V, logits=logits)


@pytest.mark.parametrize("logits", ["normal", "peaked"])
@pytest.mark.parametrize(
    "how", [{"train_weight": False}, {"train_weight": False, "entropy": False}, {"entropy": False}]
)
def test_frozen_weight_and_no_entropy(how, logits):
    check(100, 64, 5003, logits=logits, **how)


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
    asked=st.fixed_dictionaries({"train_weight": st.booleans(), "entropy": st.booleans()}),
)  # fmt: skip
def test_any_shape_and_option(device, T, D, V, softcap, scale, bias, per_token, workspace_mib, ignored, seed, asked):
    hidden, weight, target, _ = make_problem(T, D, V, seed=seed)
    target[torch.rand(T) < ignored] = -100
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": 0.7}
    if bias:
        options["bias_V"] = torch.randn(V)
    if per_token:
        options["temperature"] = torch.rand(T) + 0.5
    truth = run(reference.linear_logprob, hidden, weight, target, options, torch.float64, **asked)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    problem = (hidden.to(device), weight.to(device), target.to(device), {**options, "workspace_mib": workspace_mib})
    for o, t in zip(run(linear_logprob, *problem, F32, **asked), truth, strict=True):
        torch.testing.assert_close(o.cpu().double(), t, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_soft_cap_far_away_costs_no_digits(backend):
    """1 - exp(-2u) over 1 + exp(-2u) would leave three or four of tanh(u) at u = 1e-4."""
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight, target, _ = make_problem(20, 16, 300)
    logprob = linear_logprob(hidden, weight, target, softcap=1e4, backend=backend).logprob
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, softcap=1e4).logprob
    torch.testing.assert_close(logprob.double(), truth, rtol=1e-6, atol=1e-6)


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


# Chunks of different numbers of rows in each path, one chunk, and one of so many rows that threads take wider tiles.
@pytest.mark.parametrize(("num_tokens", "workspace_mib"), [(333, 1), (333, 64), (1100, 64)])
def test_same_bits_in_every_path_and_run(num_tokens, workspace_mib):
    """No grad, recomputing backward, frozen weight, loss: the same log-probabilities, so a ratio of exactly 1."""
    linear_logprob, linear_logprob_loss = (  # hides the imported ones
        partial(function, workspace_mib=workspace_mib) for function in (ops.linear_logprob, ops.linear_logprob_loss)
    )
    hidden, weight, target, _ = make_problem(num_tokens, 64, 5003)
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


@pytest.mark.parametrize("silent", [0, 3])  # rows without upstream gradient; every 7th is ignored
def test_kept_logits_give_the_same_bits(silent):
    """64 MiB hold all logits, and they are there in backward; 4 MiB do not."""
    hidden, weight, target, upstream, upstream_entropy = loss_problem()
    upstream[:silent], upstream_entropy[:silent] = 0, 0
    options = {"bias_V": torch.linspace(-1, 1, 5003), "temperature": torch.rand(300) + 0.5, "softcap": 20.0}
    results = []
    for workspace_mib in (64, 4):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with saved_sizes() as sizes:
            out = linear_logprob(h, w, target, workspace_mib=workspace_mib, return_entropy=True, **options)
        assert (max(sizes) > 257 * 5003) == (workspace_mib == 64)
        loss = (out.logprob * upstream + out.entropy * upstream_entropy).sum()
        loss.backward(retain_graph=True)
        once = [h.grad.clone(), w.grad.clone()]
        h.grad = w.grad = None
        loss.backward()  # what is kept is not written to
        results.append([*out[:2], *once, h.grad, w.grad])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


@given(num_rows=st.integers(0, 3000), most=st.integers(1, 700))
def test_chunks_of_rows_are_alike(num_rows, most):
    """Among fewer than 16 rows a row has other bits, so that no chunk may be the small rest of a division."""
    limit = rounded_rows(most, "cpu")
    chunks = list(row_chunks(num_rows, limit, "cpu"))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(num_rows))
    assert all(0 < size <= limit <= most for size in sizes)
    if num_rows >= 16 and limit >= 32:
        assert min(sizes) >= 16


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


def test_float64_stays_float64():
    hidden, weight, target, _ = make_problem(4, 8, 30)
    result = linear_logprob(hidden.double(), weight.double(), target)
    assert result.logprob.equal(reference.linear_logprob(hidden.double(), weight.double(), target).logprob)


# ---- upstream gradients -------------------------------------------------------------------------------------------


class NoGradient(torch.autograd.Function):
    """Hands on a value, and None backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


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


def flat_problem(requires_grad: bool, threshold: torch.Tensor | None = None):
    hidden, weight, target, _ = make_problem(6, 8, 64)  # no columns that only keep a distance: they hold anything
    index = torch.arange(6)
    tensors = [hidden.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), target, index, None]
    return [*tensors, torch.ones(1), threshold, 0.0, 1.0, "native", "", 64]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    namespace = torch.ops.rlft_fast
    torch.library.opcheck(
        namespace.linear_logprob, (*flat_problem(requires_grad, torch.zeros(6)), *[True] * 5), test_utils=tests
    )
    torch.library.opcheck(namespace.linear_logprob_frozen, tuple(flat_problem(requires_grad)), test_utils=tests)
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
