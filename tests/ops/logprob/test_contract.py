"""What every backend of linear_logprob holds to, beside its numbers: layouts, bad rows, equal bits, bounded memory."""

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob
from tests.ops.logprob.problems import (
    BF16,
    F32,
    INTERPRETED,
    WAYS,
    each_backend,
    each_fast_backend,
    each_kernel,
    gradients,
    gradients_of_seen_rows,
    logprob_of,
    loss_of,
    loss_problem,
    ppo_clip,
    run,
    several_tiles,
    thin,
)
from tests.support.machine.memory import peak_allocated_bytes, peak_mib, requires_proc, saved_sizes
from tests.support.numerics import assert_close_to_rounding

# ---- layouts --------------------------------------------------------------------------------------------------------


def every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


# Column-major hidden states come from a convolution, such weights from GPT-2; V of several tiles, the last one ragged.
@each_backend
@pytest.mark.parametrize("layout", [column_major, every_second])
@pytest.mark.parametrize("way", ["no grad", *WAYS])
def test_layout_does_not_matter(way, layout, backend):
    hidden, weight, target, _ = make_inputs(12, 16, 300 if backend == "triton" else 5003)
    bias = torch.randn(len(weight))

    def results(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        h = hidden.detach().requires_grad_(way != "no grad")
        w, b = (x.detach().requires_grad_(way not in ("no grad", "frozen")) for x in (weight, bias))
        trained = [x for x in (h, w, b) if x.requires_grad]
        if way == "loss":
            out = loss_of(backend)(h, w, target, lambda logprob, _: -logprob, bias_V=b)
            return [out.logprob, *torch.autograd.grad(out.loss, trained)]
        out = logprob_of(backend)(h, w, target, bias_V=b).logprob
        return [out, *(torch.autograd.grad(out.sum(), trained) if trained else [])]

    changed = results(*map(layout, (hidden, weight, bias)))
    for ours, contiguous in zip(changed, results(hidden, weight, bias), strict=True):
        torch.testing.assert_close(ours, contiguous)


@each_backend
def test_an_expanded_bias_changes_nothing(backend):
    V = 300 if backend == "triton" else 5003
    hidden, weight, target, _ = make_inputs(12, 16, V)
    constant = logprob_of(backend)(hidden, weight, target, bias_V=torch.ones(1).expand(V)).logprob
    torch.testing.assert_close(constant, logprob_of(backend)(hidden, weight, target).logprob)


# ---- rows and tokens that do not count ------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(("T", "active"), [(0, []), (5, []), (20, [1, 2, 3, 8, 18])])  # no row, all ignored, most
def test_ignored_rows_are_zero_and_without_gradient(T, active, backend):
    """An ignored row may hold any value, and so may its value per token."""
    target = torch.full((T,), -100).index_fill_(0, torch.tensor(active, dtype=torch.int64), 7)
    ignored = target == -100
    hidden = torch.randn(T, 8).masked_fill_(ignored[:, None], torch.nan).requires_grad_()
    weight = torch.randn(30, 8, requires_grad=True)
    out = logprob_of(backend)(hidden, weight, target, return_entropy=True)
    unknown = torch.ones(T).masked_fill(ignored, torch.nan)
    loss = loss_of(backend)(hidden, weight, target, lambda logprob, _, x: logprob * x, unknown).loss
    (out.logprob.sum() + out.entropy.sum() + loss).backward()
    for values in (out.logprob, out.entropy, hidden.grad):
        assert (values[ignored] == 0).all()
        assert values.isfinite().all()
    for sums in (loss, weight.grad):
        assert sums.isfinite().all()
        assert sums.any() == bool(active)


@each_backend
@pytest.mark.parametrize("way", ["no grad", "recomputed", "frozen"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_hidden_state(bad, way, backend):
    hidden, weight, target, _ = make_inputs(8, 16, 300 if backend == "triton" else 3000)
    broken = hidden.clone()
    broken[3, 2] = bad

    def compute(hidden):
        h, w = hidden.clone().requires_grad_(way != "no grad"), weight.clone().requires_grad_(way == "recomputed")
        out = logprob_of(backend)(h, w, target, return_entropy=way != "frozen")
        values = [out.logprob, *([out.entropy] if way != "frozen" else [])]
        return values + ([torch.autograd.grad(sum(x.sum() for x in values), h)[0]] if way != "no grad" else [])

    others = torch.arange(8) != 3
    for actual, expected in zip(compute(broken), compute(hidden), strict=True):
        assert not actual[3].isfinite().all()
        assert torch.equal(actual[others], expected[others])


@each_kernel  # autograd of the reference multiplies 0 by nan
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("T", "step"), [(8, 8), (140, 2)])  # one row, and half of more rows than a tile has
def test_bad_hidden_state_that_the_loss_does_not_see(T, step, way, backend):
    hidden, weight, target, _ = make_inputs(T, 16, 130 if backend == "triton" else 3000)
    seen = torch.linspace(0.5, 2, T)
    seen[step - 1 :: step] = 0
    expected = gradients_of_seen_rows(way, hidden, weight, target, seen, backend)
    assert (expected[0][seen == 0] == 0).all()
    hidden[seen == 0] = torch.nan
    for actual, good in zip(gradients_of_seen_rows(way, hidden, weight, target, seen, backend), expected, strict=True):
        assert torch.equal(actual, good)
        assert actual.isfinite().all()


@each_backend
def test_bad_upstream_gradient(backend):
    hidden, weight, target, _ = make_inputs(8, 16, 300)
    upstream = torch.ones(8)
    grads = []
    for value in (1.0, torch.nan):
        upstream[3] = value
        h = hidden.clone().requires_grad_()
        logprob_of(backend)(h, weight.clone().requires_grad_(), target).logprob.backward(upstream)
        grads.append(h.grad)
    others = torch.arange(8) != 3
    assert grads[1][3].isnan().all()
    assert torch.equal(grads[0][others], grads[1][others])


# One tile; and two tiles, where the second or the first tile holds impossible tokens alone.
@each_kernel
@pytest.mark.parametrize(("V", "possible"), [(40, slice(0, 20)), (2100, slice(0, 20)), (2100, slice(2080, 2100))])
@pytest.mark.parametrize("train_weight", [True, False])
def test_impossible_tokens(V, possible, train_weight, backend):
    """A logit of -inf has probability 0, adds nothing to the entropy, and gets no gradient."""
    hidden, weight, target, _ = make_inputs(6, 16, V)
    target = target % 20
    bias = torch.full((V,), -torch.inf)
    bias[possible] = 0
    hidden.requires_grad_(), weight.requires_grad_(train_weight)

    def grads(weight: Tensor, target: Tensor, **options) -> list[Tensor]:
        function = logprob_of(backend, **options)
        results = [function(hidden, weight, target).logprob]  # a frozen weight has a way of its own
        results.append(function(hidden, weight, target, return_entropy=True).entropy)
        return [x for y in results for x in (y.detach(), *torch.autograd.grad(y.sum(), hidden))]

    ours = grads(weight, target + possible.start, bias_V=bias)
    for actual, expected in zip(ours, grads(weight[possible], target), strict=True):
        torch.testing.assert_close(actual, expected)


@each_backend
def test_the_temperature_has_no_gradient(backend):
    hidden, weight, target, _ = make_inputs(6, 16, 40)
    temperature = torch.full((6,), 0.7, requires_grad=True)
    assert not logprob_of(backend)(hidden, weight, target, temperature=temperature).logprob.requires_grad


@each_kernel
@pytest.mark.parametrize("train_weight", [True, False])
def test_an_impossible_target_has_the_gradient_of_the_others(train_weight, backend):
    hidden, weight, target, _ = make_inputs(6, 16, 40)
    bias = torch.zeros(40).index_fill_(0, target[:1], -torch.inf)
    hidden.requires_grad_(), weight.requires_grad_(train_weight)
    logprob = logprob_of(backend)(hidden, weight, target, bias_V=bias).logprob
    assert logprob[0] == -torch.inf
    (grad,) = torch.autograd.grad(logprob, hidden, torch.ones(6))
    h, w = hidden.detach().double(), weight.detach().double()
    expected = w[target] - (h @ w.T + bias).softmax(-1) @ w
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


# ---- the same bits --------------------------------------------------------------------------------------------------


@each_backend
def test_same_inputs_same_bits(backend):
    problem = make_inputs(*several_tiles(backend))
    first, second = (run(logprob_of(backend), *problem, F32) for _ in range(2))
    hidden, weight, target, *per_token = loss_problem(*several_tiles(backend))
    loss = lambda h, w: loss_of(backend)(h, w, target, ppo_clip, *per_token).loss  # noqa: E731
    first, second = (grads + gradients(loss, hidden, weight) for grads in (first, second))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gemm_keeps_bits_of_columns() -> bool:
    """Whether a column has the same bits in a tile of 496 columns as in the whole matrix. MKL's AVX2 kernels differ."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 64, generator=generator) for rows in (333, 5003))
    return torch.equal(a @ b.T, torch.cat([a @ tile.T for tile in b.split(496)], dim=1))


# Chunks of different numbers of rows in each way, one chunk, and one of so many rows that threads take wider tiles.
@pytest.mark.parametrize(
    ("backend", "T", "D", "V", "workspace_mib"),
    [
        ("native", 333, 64, 5003, 1), ("native", 333, 64, 5003, 64), ("native", 1100, 64, 5003, 64),
        ("reference", 333, 64, 5003, None),
        *[pytest.param(name, 67, 24, 100, None, marks=thin) for name in INTERPRETED],
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("ignored", [0, 3])
def test_on_policy_ratio_is_one(ignored, dtype, backend, T, D, V, workspace_mib):
    """Between a pass without gradient and any with it, rows left out or not.

    Triton's fused forward has an order of its own: there the ratio is 1 to rounding. In the loss it is so, too, where
    the CPU's own GEMM rounds a column of a narrower matrix differently.
    """
    hidden, weight, target, _ = make_inputs(T, D, V, dtype=dtype)
    if ignored:
        target[::ignored] = -100
    logprob = logprob_of(backend, workspace_mib=workspace_mib)
    with torch.no_grad():
        old = logprob(hidden, weight, target).logprob
        news = [logprob(hidden, weight, target, return_entropy=True).logprob]
    hidden.requires_grad_()
    news.append(logprob(hidden, weight, target).logprob)  # frozen
    weight.requires_grad_()
    news.append(logprob(hidden, weight, target, return_entropy=True).logprob)
    loss = loss_of(backend, workspace_mib=workspace_mib)
    news.append(loss(hidden, weight, target, lambda logprob, _: logprob).logprob)
    exact = backend != "native" or gemm_keeps_bits_of_columns()
    for new in news if exact else news[:-1]:
        assert ((new - old).abs() <= (1e-5 if backend == "triton" else 0)).all()
    if not exact:
        assert_close_to_rounding(news[-1], old, roundings=2)


@pytest.mark.parametrize("T", [129, 143, 257, 1025])  # one row more than chunks of 128 rows hold, or a few
def test_chunks_of_rows_are_alike(T):
    """A row among fewer than 16 rows may have other bits, so the last chunk may not be the small rest of a division."""
    hidden, weight, target, _ = make_inputs(T, 64, 2100)
    chunked, whole = (linear_logprob(hidden, weight, target, workspace_mib=mib).logprob for mib in (1, 64))
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("silent", [0, 3])  # rows without upstream gradient; every 7th is ignored
def test_kept_logits_give_the_same_bits(silent):
    """64 MiB hold all logits, and backward finds them; 4 MiB do not."""
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
        # Twice: what is kept is not written to.
        grads = [torch.autograd.grad(loss, [h, w], retain_graph=True) for _ in range(2)]
        results.append([*out[:2], *grads[0], *grads[1]])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


# ---- memory ---------------------------------------------------------------------------------------------------------


def train(function, hidden, weight, target):
    return torch.autograd.grad(function(hidden, weight, target).logprob.sum(), hidden)


@requires_proc
@each_fast_backend
def test_a_frozen_weight_has_no_gradient_in_memory(backend):
    hidden, weight, target, _ = make_inputs(16, 256, 65536)  # the gradient alone would take 64 MiB
    hidden.requires_grad_()
    # At most 25 MiB are needed, and holes that other tests have left in the heap add up to 20.
    assert peak_mib(lambda: train(logprob_of(backend, workspace_mib=4), hidden, weight, target)) < 64


@pytest.mark.parametrize("way", ["no grad", "frozen", "recomputed", "loss"])
def test_an_adapter_is_joined_to_the_weight_tile_by_tile(way):
    hidden, weight, target, _ = make_inputs(32, 256, 32768)  # logits of 4 MiB
    frozen, adapter = weight[:, :-4].contiguous(), weight[:, -4:].contiguous()  # of 31.5 MiB
    trained = [x.requires_grad_() for x in {"no grad": (), "frozen": (hidden,)}.get(way, (hidden, adapter))]

    def step():
        if way == "loss":
            function, value = loss_of("native"), lambda logprob, _: logprob
            return torch.autograd.grad(function(hidden, frozen, target, value, adapter_VE=adapter).loss, trained)
        logprob = logprob_of("native", workspace_mib=2)(hidden, frozen, target, adapter_VE=adapter).logprob
        return torch.autograd.grad(logprob.sum(), trained) if trained else logprob

    assert peak_allocated_bytes(step) < 12 * 2**20  # a copy alone would take 32 MiB


@pytest.mark.parametrize("trained", ["hidden", "weight", "hidden and weight"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("threshold", [False, True])
def test_workspace_bounds_what_is_allocated(trained, entropy, softcap, threshold):
    hidden, weight, target, _ = make_inputs(1024, 16, 8192)  # logits of 32 MiB
    hidden.requires_grad_("hidden" in trained)
    weight.requires_grad_("weight" in trained)
    options = {"workspace_mib": 4, "softcap": softcap, "return_entropy": entropy}
    if threshold:
        options["threshold_T"] = torch.zeros(1024)

    def step():
        result = logprob_of("native", **options)(hidden, weight, target)
        loss = result.logprob.sum() + (result.entropy.sum() if entropy else 0)
        return torch.autograd.grad(loss, [x for x in (hidden, weight) if x.requires_grad])

    assert peak_allocated_bytes(step) < 5 * 2**20  # also 0.6 MiB of gradients, and what each row has


@pytest.mark.parametrize(
    ("pass_", "workspace_mib"), [("no grad", 16), ("frozen", 16), ("recomputed", 16), ("kept", 80), ("fused", 16)]
)
def test_workspace_bounds_the_memory_of_the_logits(pass_, workspace_mib):
    hidden, weight, target, _ = make_inputs(1024, 16, 16384)  # logits of 64 MiB, a weight of 1
    hidden.requires_grad_(pass_ != "no grad")
    weight.requires_grad_(pass_ in ("recomputed", "kept", "fused"))
    options = {"workspace_mib": workspace_mib}

    def step():
        if pass_ == "fused":
            loss = loss_of("native", **options)(hidden, weight, target, lambda logprob, _: logprob)
            return torch.autograd.grad(loss.loss, [hidden, weight])
        logprob = logprob_of("native", **options)(hidden, weight, target).logprob
        trained = [x for x in (hidden, weight) if x.requires_grad]
        return torch.autograd.grad(logprob.sum(), trained) if trained else logprob

    assert peak_allocated_bytes(step) < (workspace_mib + 2) * 2**20  # also gradients of 1.1 MiB


@pytest.mark.parametrize(("V", "most_rows"), [(1984, 66), (4000, 33)])  # one tile, and three of 1984 columns
@pytest.mark.parametrize("too_many", [False, True])
def test_logits_are_kept_where_they_fit_beside_a_tile(V, most_rows, too_many):
    num_rows = most_rows + too_many
    hidden, weight, target, _ = make_inputs(num_rows, 8, V)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]

    def step():
        return torch.autograd.grad(logprob_of("native", workspace_mib=1)(*inputs, target).logprob.sum(), inputs)

    with saved_sizes() as sizes:
        peak = peak_allocated_bytes(step)
    assert peak < 1.2 * 2**20  # also gradients of 0.13 MiB at most
    assert (max(sizes) < num_rows * V) == too_many
