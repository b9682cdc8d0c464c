"""What every backend of linear_logprob has to hold to: the cases in which fused losses elsewhere were wrong.

Errors are measured against float64 and may be no larger than those of plain PyTorch in the same dtype. A new backend is
one more name in BACKENDS. Triton runs in its interpreter here, which takes a second for what others do in a
millisecond: it gets the small ones of the shapes.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rlft_fast import ops
from tests.ops.logprob.problems import gradients_without_row_7
from tests.support.memory import peak_allocated_bytes, peak_mib, requires_proc, saved_sizes
from tests.support.numerics import assert_no_further_from_truth

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
BACKENDS = ["native", "reference", *(["triton"] if find_spec("triton") else [])]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_fast_backend = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
triton_only = pytest.mark.skipif("triton" not in BACKENDS, reason="triton is not installed")


def linear_logprob(backend: str, **options: Any) -> Callable[..., ops.LinearLogprob]:
    return functools.partial(ops.linear_logprob, backend=backend, **options)


def linear_logprob_loss(backend: str, **options: Any) -> Callable[..., ops.LinearLogprobLoss]:
    return functools.partial(ops.linear_logprob_loss, backend=backend, **options)


def plain_logprob(hidden, weight, target, *, bias_V=None, return_entropy=True) -> ops.LinearLogprob:
    """What one writes without a fused op: logits in the inputs' dtype, statistics in float32."""
    logits = linear(hidden, weight, bias_V)
    log_p = logits.to(torch.promote_types(logits.dtype, F32)).log_softmax(-1)
    return ops.LinearLogprob(log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))


def make_problem(T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32):
    """(hidden, weight, target, options); the first and the last token of the vocabulary are among the targets."""
    g = torch.Generator().manual_seed(T + V)
    hidden = torch.randn(T, D, generator=g)
    weight = torch.randn(V, D, generator=g) / D**0.5
    target = torch.randint(0, V, (T,), generator=g)
    target[:1], target[1:2] = V - 1, 0
    options = {}
    if logits == "certain":  # softmax(target) -> 1
        weight[target] += 3 * hidden / D**0.5
    elif logits == "extreme":
        weight *= 10
    elif logits == "normalised":  # logsumexp = 0, as models trained with a z-loss have it
        weight *= 1e-2
        options["bias_V"] = torch.full((V,), -torch.tensor(V).log())
    elif logits == "low":  # all below -100
        options["bias_V"] = torch.full((V,), -150.0)
    return hidden.to(dtype), weight.to(dtype), target, {name: value.to(dtype) for name, value in options.items()}


def results(function: Callable[..., ops.LinearLogprob], problem, dtype: torch.dtype) -> list[Tensor]:
    """[logprob, entropy, dhidden, dweight], for random gradients of logprob and entropy."""
    hidden, weight, target, options = problem
    h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
    out = function(h, w, target, return_entropy=True, **{name: value.to(dtype) for name, value in options.items()})
    g = torch.Generator().manual_seed(1)
    upstream = torch.randn(2, len(target), generator=g)
    torch.autograd.backward([out.logprob, out.entropy], list(upstream.to(out.logprob.dtype)))
    return [out.logprob.detach(), out.entropy.detach(), h.grad, w.grad]


@functools.lru_cache(maxsize=1)  # of the last problem: backends are compared one after the other
def plain_and_true_results(T: int, D: int, V: int, logits: str, dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    problem = make_problem(T, D, V, logits=logits, dtype=dtype)
    return results(plain_logprob, problem, dtype), results(plain_logprob, problem, F64)


def check(backend: str, T: int, D: int, V: int, logits: str = "normal", dtype: torch.dtype = F32) -> None:
    ours = results(linear_logprob(backend), make_problem(T, D, V, logits=logits, dtype=dtype), dtype)
    assert (ours[0] <= 0).all()
    for actual, eager, truth in zip(ours, *plain_and_true_results(T, D, V, logits, dtype), strict=True):
        assert actual.isfinite().all()
        assert_no_further_from_truth(actual, eager, truth)


# ---- numbers --------------------------------------------------------------------------------------------------------


# V: below and beyond a vector or a tile of columns, and those of real models (Llama 2, GPT-2, Qwen; the last two are
# no multiples of 1024). D: of real models. T: nothing, one row, few, and more than a chunk.
@each_fast_backend
@pytest.mark.parametrize(
    ("T", "D", "V"),
    [
        (0, 64, 17), (1, 3584, 37), (7, 1536, 257), (1000, 896, 17), (4097, 64, 37), (4097, 576, 257),
        (7, 576, 32000), (1000, 64, 5003), (1, 64, 50257), (7, 64, 129920), (1, 64, 151936),
    ],
)  # fmt: skip
def test_shapes(T, D, V, backend):
    check(backend, T, D, V)


@triton_only
@pytest.mark.parametrize("V", [17, 37, 257])
@pytest.mark.parametrize("T", [0, 1, 7])
def test_small_shapes_in_triton(T, V):
    check("triton", T, 24, V)


KINDS = ["certain", "extreme", "normalised", "low"]


# 37 fits a vector or two, 2049 is one more than a tile, 50257 has many tiles and a ragged end.
@each_fast_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("V", [37, 2049, 50257])
@pytest.mark.parametrize("logits", KINDS)
def test_logits(logits, V, dtype, backend):
    check(backend, 40, 64, V, logits, dtype)


@triton_only
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("V", [17, 257])
@pytest.mark.parametrize("logits", KINDS)
def test_logits_of_small_vocabularies_in_triton(logits, V, dtype):
    check("triton", 40, 24, V, logits, dtype)


@each_backend
@pytest.mark.parametrize("workspace_mib", [1, 64])  # several chunks of rows, and one
def test_narrow_gradients_are_rounded_once(workspace_mib, backend):
    """The error of a narrow gradient is that of one rounding, however many chunks add to it."""
    # Triton's interpreter cuts float32 off where a GPU rounds it to bfloat16. It rounds to float16.
    narrow, num_tokens, vocab = (torch.float16, 64, 4500) if backend == "triton" else (BF16, 256, 9001)
    hidden, weight, target, _ = make_problem(num_tokens, 64, vocab, dtype=narrow)
    hidden += 1  # a gradient that grows from chunk to chunk instead of averaging out
    upstream = torch.ones(num_tokens)

    def gradients(call, dtype):
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        return torch.autograd.grad(call(h, w), [h, w])

    recomputed = linear_logprob(backend, workspace_mib=workspace_mib)
    fused = linear_logprob_loss(backend, workspace_mib=workspace_mib)
    truth = gradients(lambda h, w: plain_logprob(h, w, target).logprob.sum(), F64)
    for ours in (
        gradients(lambda h, w: recomputed(h, w, target).logprob.sum(), narrow),
        gradients(lambda h, w: fused(h, w, target, lambda logprob, _, g: logprob * g, upstream).loss, narrow),
    ):
        for actual, exact in zip(ours, truth, strict=True):
            rounding = (exact.to(narrow) - exact).norm()
            assert (actual - exact).norm() < 1.02 * rounding


@each_backend
def test_autocast_narrows_the_inputs_and_nothing_else(backend):
    """As it does for a linear layer; logits and statistics stay float32."""
    hidden, weight, target, _ = make_problem(20, 64, 300)

    def compute(cast: Callable[[Tensor], Tensor], autocast: bool) -> list[Tensor]:
        leaves = h, w, b = [x.clone().requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, 300))]
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = linear_logprob(backend, return_entropy=True)(cast(h), cast(w), target, bias_V=cast(b))
            fused = linear_logprob_loss(backend, bias_V=cast(b))
            loss = fused(cast(h), cast(w), target, lambda logprob, _: logprob.square()).loss
        return [*out[:2], loss, *torch.autograd.grad(out.logprob.sum() + out.entropy.sum() + loss, leaves)]

    expected = compute(Tensor.bfloat16, autocast=False)
    for actual, same in zip(compute(Tensor.float, autocast=True), expected, strict=True):
        assert actual.dtype == F32
        assert torch.equal(actual, same)


# ---- gradients that come and go -------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(
    "upstream",
    [
        pytest.param(torch.arange(24.0)[::2], id="strided"),
        pytest.param(torch.arange(12.0).flip(0), id="flipped"),
        pytest.param(torch.tensor(3.0).expand(12), id="expanded"),
        pytest.param(None, id="none"),
    ],
)
@pytest.mark.parametrize("of", ["logprob", "entropy"])
@pytest.mark.parametrize("train_weight", [True, False])
def test_upstream_gradients(train_weight, of, upstream, backend):
    """Any layout, and one of the two results without a gradient of its own."""
    hidden, weight, target, _ = make_problem(12, 16, 300)

    def gradients(function, upstream):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(train_weight)
        value = getattr(function(h, w, target, return_entropy=True), of)
        value.sum().backward() if upstream is None else value.backward(upstream)
        return [h.grad, w.grad] if train_weight else [h.grad]

    ours = gradients(linear_logprob(backend), upstream)
    contiguous = None if upstream is None else upstream.contiguous()
    for actual, same, plain in zip(
        ours, gradients(linear_logprob(backend), contiguous), gradients(plain_logprob, contiguous), strict=True
    ):
        assert torch.equal(actual, same)
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)


@each_backend
def test_tied_embedding(backend):
    """A weight that is embedding and head gets the sum of both gradients."""
    _, weight, target, _ = make_problem(12, 16, 300)
    ids, gradients = torch.arange(12) % 5, []
    for function, dtype in ((linear_logprob(backend), F32), (plain_logprob, F64)):
        w = weight.to(dtype, copy=True).requires_grad_()
        function(w[ids].tanh(), w, target).logprob.sum().backward()
        gradients.append(w.grad.double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@each_backend
def test_each_gradient_is_the_same_alone(backend):
    """Frozen hidden states or a frozen weight change nothing in the other gradient but rounding."""
    hidden, weight, target, _ = make_problem(*several_tiles(backend))

    def gradients(*trained: bool):
        h, w = (x.clone().requires_grad_(train) for x, train in zip((hidden, weight), trained, strict=True))
        linear_logprob(backend)(h, w, target).logprob.square().sum().backward()
        return h.grad, w.grad

    both, only_hidden, only_weight = gradients(True, True), gradients(True, False), gradients(False, True)
    assert only_hidden[1] is None
    assert only_weight[0] is None
    torch.testing.assert_close(only_hidden[0], both[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(only_weight[1], both[1])


@each_backend
@pytest.mark.parametrize("T", [0, 5])
def test_nothing_to_score(T, backend):
    """No row, or every row ignored, whatever it holds: zeros in results and gradients."""
    hidden = torch.full((T, 8), torch.nan, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    target = torch.full((T,), -100)
    out = linear_logprob(backend)(hidden, weight, target, return_entropy=True)
    unknown = torch.full((T,), torch.nan)
    loss = linear_logprob_loss(backend)(hidden, weight, target, lambda logprob, _, x: logprob * x, unknown).loss
    (out.logprob.sum() + out.entropy.sum() + loss).backward()
    for zeros in (out.logprob, out.entropy, loss, hidden.grad, weight.grad):
        assert (zeros == 0).all()


# ---- bad numbers stay where they are --------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("train_weight", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_hidden_state(bad, train_weight, backend):
    hidden, weight, target, _ = make_problem(8, 16, 3000)
    broken = hidden.clone()
    broken[3, 2] = bad

    def compute(hidden):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(train_weight)
        out = linear_logprob(backend)(h, w, target, return_entropy=train_weight)
        (out.logprob.sum() + (out.entropy.sum() if train_weight else 0)).backward()
        return [out.logprob, h.grad, *([out.entropy] if train_weight else [])]

    others = torch.arange(8) != 3
    for actual, expected in zip(compute(broken), compute(hidden), strict=True):
        assert not actual[3].isfinite().all()
        assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])  # autograd's 0 * nan is nan
@pytest.mark.parametrize("way", ["recomputed", "frozen", "loss"])
def test_bad_hidden_state_that_the_loss_does_not_see(way, backend):
    hidden, weight, target, _ = make_problem(8, 16, 3000)
    expected = gradients_without_row_7(way, hidden, weight, target, backend)
    hidden[7] = torch.nan
    for actual, good in zip(gradients_without_row_7(way, hidden, weight, target, backend), expected, strict=True):
        assert torch.equal(actual, good)
        assert actual.isfinite().all()


@each_backend
def test_bad_upstream_gradient(backend):
    hidden, weight, target, _ = make_problem(8, 16, 300)
    upstream = torch.ones(8)
    gradients = []
    for value in (1.0, torch.nan):
        upstream[3] = value
        h = hidden.clone().requires_grad_()
        linear_logprob(backend)(h, weight.clone().requires_grad_(), target).logprob.backward(upstream)
        gradients.append(h.grad)
    others = torch.arange(8) != 3
    assert gradients[1][3].isnan().all()
    assert torch.equal(gradients[0][others], gradients[1][others])


# ---- the same bits --------------------------------------------------------------------------------------------------


def several_tiles(backend: str) -> tuple[int, int, int]:
    return (67, 24, 2100) if backend == "triton" else (333, 64, 5003)


@each_backend
def test_same_inputs_same_bits(backend):
    problem = make_problem(*several_tiles(backend))
    first, second = (results(linear_logprob(backend), problem, F32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("ignored", [0, 3])
def test_on_policy_ratio_is_one(ignored, dtype, backend):
    """Between a pass without gradient and any with it, rows left out or not.

    Triton's fused forward has an order of its own: there the ratio is 1 to rounding.
    """
    hidden, weight, target, _ = make_problem(*several_tiles(backend), dtype=dtype)
    if ignored:
        target[::ignored] = -100
    with torch.no_grad():
        old = linear_logprob(backend)(hidden, weight, target).logprob
    hidden.requires_grad_()
    frozen = linear_logprob(backend)(hidden, weight, target).logprob
    weight.requires_grad_()
    trained = linear_logprob(backend)(hidden, weight, target, return_entropy=True).logprob
    fused = linear_logprob_loss(backend)(hidden, weight, target, lambda logprob, _: logprob).logprob
    for new in (frozen, trained, fused):
        assert ((new - old).abs() <= (1e-5 if backend == "triton" else 0)).all()


# ---- memory ---------------------------------------------------------------------------------------------------------


def train(function, hidden, weight, target):
    return torch.autograd.grad(function(hidden, weight, target).logprob.sum(), hidden)


@requires_proc
@each_fast_backend
def test_a_frozen_weight_has_no_gradient_in_memory(backend):
    hidden, weight, target, _ = make_problem(16, 512, 65536)  # the gradient would take 128 MiB, the logits take 4
    hidden.requires_grad_()
    assert peak_mib(lambda: train(linear_logprob(backend, workspace_mib=4), hidden, weight, target)) < 40


@pytest.mark.parametrize("trained", ["hidden", "weight", "hidden and weight"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("threshold", [False, True])
def test_workspace_bounds_what_is_allocated(trained, entropy, softcap, threshold):
    hidden, weight, target, _ = make_problem(2048, 16, 8192)  # logits of 64 MiB
    hidden.requires_grad_("hidden" in trained)
    weight.requires_grad_("weight" in trained)
    options = {"workspace_mib": 4, "softcap": softcap, "return_entropy": entropy}
    if threshold:
        options["threshold_T"] = torch.zeros(2048)

    def step():
        result = linear_logprob("native", **options)(hidden, weight, target)
        loss = result.logprob.sum() + (result.entropy.sum() if entropy else 0)
        return torch.autograd.grad(loss, [x for x in (hidden, weight) if x.requires_grad])

    assert peak_allocated_bytes(step) < 5 * 2**20  # also 0.6 MiB of gradients, and what each row has


@pytest.mark.parametrize(
    ("pass_", "workspace_mib"), [("no grad", 16), ("frozen", 16), ("recomputed", 16), ("kept", 280), ("fused", 16)]
)
def test_workspace_bounds_the_memory_of_the_logits(pass_, workspace_mib):
    hidden, weight, target, _ = make_problem(2048, 16, 32768)  # logits of 256 MiB, a weight of 2
    hidden.requires_grad_(pass_ != "no grad")
    weight.requires_grad_(pass_ in ("recomputed", "kept", "fused"))
    options = {"workspace_mib": workspace_mib}

    def step():
        if pass_ == "fused":
            loss = linear_logprob_loss("native", **options)(hidden, weight, target, lambda logprob, _: logprob)
            return torch.autograd.grad(loss.loss, [hidden, weight])
        logprob = linear_logprob("native", **options)(hidden, weight, target).logprob
        trained = [x for x in (hidden, weight) if x.requires_grad]
        return torch.autograd.grad(logprob.sum(), trained) if trained else logprob

    assert peak_allocated_bytes(step) < (workspace_mib + 3) * 2**20  # also gradients of 2.1 MiB


@pytest.mark.parametrize(("V", "most_rows"), [(1984, 66), (4000, 33)])  # one tile, and three of 1984 columns
@pytest.mark.parametrize("too_many", [False, True])
def test_logits_are_kept_where_they_fit_beside_a_tile(V, most_rows, too_many):
    num_rows = most_rows + too_many
    hidden, weight, target, _ = make_problem(num_rows, 8, V)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]

    def step():
        return torch.autograd.grad(linear_logprob("native", workspace_mib=1)(*inputs, target).logprob.sum(), inputs)

    with saved_sizes() as sizes:
        peak = peak_allocated_bytes(step)
    assert peak < 1.2 * 2**20  # also gradients of 0.13 MiB at most
    assert (max(sizes) < num_rows * V) == too_many
