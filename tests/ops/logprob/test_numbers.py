"""linear_logprob beside its float64 definition, in every backend.

Errors may be no larger than errors of plain PyTorch in the same dtype.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.ops.problems import LOGITS, make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from tests.ops.logprob.problems import (
    BF16,
    F16,
    F32,
    F64,
    INTERPRETED,
    WAYS,
    check,
    each_fast_backend,
    each_kernel,
    gradients,
    interpreted,
    plain_logprob,
    run,
    weighted_by,
    wide_tiles,
)
from tests.support.machine.devices import DEVICES
from tests.support.numerics import assert_no_further_from_truth

each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
each_logits = pytest.mark.parametrize("logits", LOGITS)


# V: below and above a lane multiple (17, 257), an odd one below a block (37), just over a tile (2049), several tiles
# with a ragged end (5003). T: nothing, a single row, odd, more than one row multiple.
@each_fast_backend
@pytest.mark.parametrize("V", [17, 37, 257, 2049, 5003])
@pytest.mark.parametrize("T", [0, 1, 7, 100])
def test_small_shapes(T, V, backend):
    check(T, 64, V, logits="peaked", backend=backend, rows=16 if V > 2000 else 64)  # rows of many terms vary less


# V and D of real models (Llama 2, GPT-2, Qwen; the last two V are no multiples of 1024), and T of more than a chunk.
@each_fast_backend
@pytest.mark.parametrize(
    ("T", "D", "V"),
    [
        (1, 3584, 37), (7, 1536, 257), (1000, 896, 17), (4097, 64, 37), (4097, 576, 257), (7, 576, 32000),
        (1000, 64, 5003), (1, 64, 50257), (7, 64, 129920), (1, 64, 151936),
    ],
)  # fmt: skip
@pytest.mark.thin(2)
def test_real_shapes(T, D, V, backend):
    check(T, D, V, backend=backend, rows=1 if V > 10_000 else 16)


@interpreted
@pytest.mark.parametrize("V", [17, 37, 257])
@pytest.mark.parametrize("T", [0, 1, 7])
def test_small_shapes_in_triton(T, V, backend):
    check(T, 24, V, backend=backend, rows=T)


# 37 fits a vector or two, 2049 is one more than a tile, 50257 has many tiles and a ragged end.
@each_fast_backend
@each_dtype
@pytest.mark.parametrize("V", [37, 2049, 50257])
@each_logits
@pytest.mark.thin(8)
def test_logits(logits, V, dtype, backend):
    check(100, 64, V, logits=logits, dtype=dtype, backend=backend)


# Without certain targets among 17 tokens: the rounding of logits is most of their error, and the interpreter's products
# by NumPy round otherwise than torch's.
@interpreted
@each_dtype
@pytest.mark.parametrize(("logits", "V"), [(x, V) for x in LOGITS for V in (17, 257) if (x, V) != ("certain", 17)])
def test_logits_in_triton(logits, V, dtype, backend):
    check(40, 24, V, logits=logits, dtype=dtype, backend=backend, rows=120 if logits == "peaked" else 40)


# One more than a block of 2048 columns.
@interpreted
@pytest.mark.parametrize("logits", ["peaked", "extreme"])
def test_several_blocks_in_triton(logits, backend):
    check(40, 24, 2049, logits=logits, backend=backend, rows=120)


@pytest.mark.parametrize("logits", ["normal", "peaked", "flat"])
@each_dtype
@pytest.mark.parametrize(
    "how", [{"train_weight": False}, {"train_weight": False, "entropy": False}, {"entropy": False}]
)
def test_frozen_weight_and_no_entropy(how, dtype, logits):
    check(100, 64, 5003, logits=logits, dtype=dtype, rows=100, **how)


@interpreted
@pytest.mark.parametrize("entropy", [False, True])
def test_frozen_weight_in_triton(entropy, backend):
    T, V = (40, 2100) if entropy else (67, 200)  # several blocks of a row, or several tiles of 64 x 64
    check(T, 24, V, logits="peaked", backend=backend, rows=120, train_weight=False, entropy=entropy)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40)
@given(
    T=st.integers(0, 40), D=st.integers(1, 40), V=st.integers(1, 3000), softcap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25]), bias=st.booleans(), per_token=st.booleans(),
    workspace_mib=st.sampled_from([1, 64]), ignored=st.floats(0, 1), seed=st.integers(0, 5),
    asked=st.fixed_dictionaries({"train_weight": st.booleans(), "entropy": st.booleans()}),
)  # fmt: skip
def test_any_shape_and_option(device, T, D, V, softcap, scale, bias, per_token, workspace_mib, ignored, seed, asked):
    hidden, weight, target, _ = make_inputs(T, D, V, seed=seed)
    target[torch.rand(T) < ignored] = -100
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": 0.7}
    if bias:
        options["bias_V"] = torch.randn(V)
    if per_token:
        options["temperature"] = torch.rand(T) + 0.5
    truth = run(reference.linear_logprob, hidden, weight, target, options, F64, **asked)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    problem = (hidden.to(device), weight.to(device), target.to(device), {**options, "workspace_mib": workspace_mib})
    for o, t in zip(run(linear_logprob, *problem, F32, **asked), truth, strict=True):
        torch.testing.assert_close(o.cpu().double(), t, rtol=2e-4, atol=2e-5)


def with_adapter(function: Any, hidden: Tensor, weight: Tensor, target: Tensor, to: torch.dtype, **options):
    """[logprob, dhidden, dadapter, dbias] where the last six columns of the weight are trained."""
    h, whole = hidden.to(to, copy=True).requires_grad_(), weight.to(to)
    frozen, adapter = whole[:, :-6].contiguous(), whole[:, -6:].clone().requires_grad_()
    trained = [h, adapter]
    if "bias_V" in options:
        trained.append(options["bias_V"].to(to, copy=True).requires_grad_())
        options["bias_V"] = trained[-1]
    upstream = torch.randn(len(target), generator=torch.Generator().manual_seed(1)).to(target.device)
    if function in (linear_logprob, linear_logprob_loss):
        head, options = (h, frozen, target), {**options, "adapter_VE": adapter}
    else:
        head = h, torch.cat([frozen, adapter], dim=-1), target
    if function in (linear_logprob_loss, reference.linear_logprob_loss):
        result = function(*head, weighted_by, -upstream, **options)
        result.loss.backward()
    else:
        result = function(*head, **options)
        (result.logprob * upstream).sum().backward()
    return [result.logprob.detach(), *(x.grad for x in trained)]


@pytest.mark.parametrize("device", DEVICES)
@each_kernel
@each_dtype
@pytest.mark.parametrize("way", ["recomputed", "kept", "loss", "loss in chunks"])
@pytest.mark.parametrize("transformed", [False, True])
def test_an_adapter_beside_a_frozen_weight(transformed, way, dtype, backend, device, monkeypatch):
    T, D, V = (67, 24, 4201) if backend == "triton" else (160, 32, 5003)
    if backend == "triton":
        wide_tiles(monkeypatch)
    hidden, weight, target, _ = make_inputs(T, D, V, logits="peaked", dtype=dtype, device=device)
    target[::7] = -100
    options: dict[str, Any] = {}
    if transformed:
        options = {
            "bias_V": torch.randn(V, device=device).to(dtype), "softcap": 30.0, "logit_scale": 0.5,
            "temperature": torch.linspace(0.5, 1.5, T, device=device),
        }  # fmt: skip
    is_loss = "loss" in way
    ours = with_adapter(
        linear_logprob_loss if is_loss else linear_logprob, hidden, weight, target, dtype, **options,
        workspace_mib=1 if way in ("recomputed", "loss in chunks") else 64, backend=backend,
    )  # fmt: skip
    plain = reference.linear_logprob_loss if is_loss else reference.linear_logprob
    eager, truth = (with_adapter(plain, hidden, weight, target, to, **options) for to in (dtype, F64))
    for actual, by_torch, exact in zip(ours, eager, truth, strict=True):
        assert_no_further_from_truth(actual, by_torch, exact)


@interpreted
@pytest.mark.parametrize("train_weight", [True, False])
def test_every_option_in_triton(train_weight, backend):
    hidden, weight, target, _ = make_inputs(40, 24, 500)
    target[[0, 7]] = -100
    options = {"bias_V": torch.randn(500), "softcap": 3.0, "logit_scale": 0.7, "temperature": torch.rand(40) + 0.5}
    how = {"train_weight": train_weight, "entropy": train_weight}
    ours = run(partial(linear_logprob, backend=backend), hidden, weight, target, options, F32, **how)
    truth = run(reference.linear_logprob, hidden, weight, target, options, F64, **how)
    for o, t in zip(ours, truth, strict=True):
        torch.testing.assert_close(o.double(), t, rtol=2e-5, atol=2e-6)


@each_kernel
def test_a_soft_cap_far_away_costs_no_digits(backend):
    """1 - exp(-2u) over 1 + exp(-2u) would leave three or four digits of tanh(u) at u = 1e-4."""
    hidden, weight, target, _ = make_inputs(20, 16, 300)
    logprob = linear_logprob(hidden, weight, target, softcap=1e4, backend=backend).logprob
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, softcap=1e4).logprob
    torch.testing.assert_close(logprob.double(), truth, rtol=1e-6, atol=1e-6)


@each_kernel
def test_optional_statistics(backend):
    T, V = (10, 2100) if backend == "triton" else (100, 5003)
    hidden, weight, target, _ = make_inputs(T, 24, V, logits="peaked")
    target[::2] = torch.randint(0, V, (T // 2,))
    target[5] = -100
    asked = {"return_sum_prob_squared": True, "return_top1": True, "return_entropy": backend == "triton"}
    truth = reference.linear_logprob(hidden.double(), weight.double(), target, **asked)
    for trains in (False, True):
        ours = linear_logprob(hidden, weight.requires_grad_(trains), target, backend=backend, **asked)
        for o, t in zip(ours[:3], truth[:3], strict=True):
            assert (o is None) == (t is None)
            if o is not None:
                torch.testing.assert_close(o.double(), t, rtol=1e-5, atol=1e-6)
        assert 0 < ours.top1.sum() < T
        assert ours.top1.equal(truth.top1)
        assert not ours.sum_prob_squared.requires_grad


# Less than a block, one column more than a block, and many blocks, whose roundings add up where logits are about -150.
@each_kernel
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("V", [17, 2049, 50257])
def test_mean_of_the_logits(V, logits, backend):
    rows, vocab = (16, min(V, 4500)) if backend == "triton" else (24, V)
    hidden, weight, target, options = make_inputs(rows, 24, vocab, logits=logits)
    target[3:5] = -100

    def mean(to: torch.dtype, backend: str) -> Tensor:
        how = {"backend": backend, "return_mean_logits": True}
        return linear_logprob(hidden.to(to), weight.to(to), target, **options, **how).mean_logits

    truth, eager = mean(F64, "reference"), mean(F32, "reference")
    for stores_logits in (False, True):
        weight.requires_grad_(stores_logits)
        ours = mean(F32, backend)
        assert not ours.requires_grad
        assert (ours[3:5] == 0).all()
        assert_no_further_from_truth(ours, eager, truth)


@each_kernel
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_mean_of_the_logits_that_the_softmax_sees(softcap, backend):
    """Also of narrow operands, whose sums are float32: here the bias decides, the soft-cap, and each temperature."""
    hidden, weight, target, _ = make_inputs(20, 16, 300, dtype=F16)
    options = {"bias_V": torch.linspace(-4, 9, 300), "softcap": softcap, "logit_scale": 0.7}
    temperature = torch.linspace(0.5, 2, 20)
    z = 0.7 * (hidden.double() @ weight.double().T + options["bias_V"])
    z = z if softcap is None else softcap * (z / softcap).tanh()
    expected = (z / temperature.double()[:, None]).mean(-1)
    for name in ("reference", backend):
        asked = {"backend": name, "return_mean_logits": True, "return_entropy": True, "return_sum_prob_squared": True}
        result = linear_logprob(hidden, weight, target, temperature=temperature, **options, **asked)
        assert result.mean_logits.dtype == F32
        torch.testing.assert_close(result.mean_logits.double(), expected, rtol=1e-6, atol=1e-6)


@each_kernel
def test_a_mean_that_is_asked_for_changes_no_other_bit(backend):
    hidden, weight, target, _ = make_inputs(*((10, 24, 2100) if backend == "triton" else (100, 24, 5003)))
    asked = {"return_entropy": True, "return_sum_prob_squared": True, "return_top1": True, "backend": backend}
    weight.requires_grad_()
    with_mean, without = (linear_logprob(hidden, weight, target, return_mean_logits=x, **asked) for x in (True, False))
    assert without.mean_logits is None
    for ours, same in zip(with_mean[:4], without[:4], strict=True):
        assert ours.equal(same)


@each_kernel
def test_a_mean_over_an_impossible_token(backend):
    """A logit of -inf makes the mean -inf, and a bad row changes no other."""
    hidden, weight, target, _ = make_inputs(6, 16, 300)
    bias = torch.zeros(300)

    def mean() -> Tensor:
        return linear_logprob(hidden, weight, target, bias_V=bias, return_mean_logits=True, backend=backend).mean_logits

    expected = mean()
    hidden[3] = torch.nan
    actual = mean()
    assert actual[3].isnan()
    others = torch.arange(6) != 3
    assert actual[others].equal(expected[others])
    bias[7] = -torch.inf
    assert mean()[others].isneginf().all()


def test_bfloat16_statistics_are_float32():
    hidden, weight, target, _ = make_inputs(10, 64, 257, dtype=BF16)
    result = linear_logprob(hidden, weight, target, return_entropy=True)
    assert result.logprob.dtype == result.entropy.dtype == F32


def test_float64_stays_float64():
    hidden, weight, target, _ = make_inputs(4, 8, 30)
    result = linear_logprob(hidden.double(), weight.double(), target)
    assert result.logprob.equal(reference.linear_logprob(hidden.double(), weight.double(), target).logprob)


def test_more_rows_than_logits_in_the_workspace():
    """Backward takes a tile of all rows: a single column exceeds the workspace, and still has to do."""
    hidden, weight, target, _ = make_inputs(2**18 + 1, 2, 3)
    ours = gradients(lambda h, w: linear_logprob(h, w, target, workspace_mib=1).logprob.sum(), hidden, weight)
    truth = gradients(lambda h, w: plain_logprob(h, w, target).logprob.sum(), hidden.double(), weight.double())
    for actual, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6)


def test_gradients_of_certain_targets_are_no_difference_of_equal_numbers():
    """The frozen head's U = (onehot - P) W where p is 1 but for 1e-5 or less, of which 1 - p has few digits."""
    hidden, weight, target, _ = make_inputs(32, 128, 1500, logits="certain")
    (grad,) = gradients(lambda h: linear_logprob(h, weight, target).logprob.sum(), hidden)
    exact = plain_logprob(hidden.double(), weight.double(), target).logprob
    assert exact.mean() > -1e-5
    (truth,) = gradients(lambda h: plain_logprob(h, weight.double(), target).logprob.sum(), hidden.double())
    assert (grad - truth).norm(dim=-1).div(truth.norm(dim=-1)).max() < 1e-4


@each_kernel
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("top", [[0], [3, 2000]])  # one token has all of the mass but 1e-14, or two tokens have
def test_log_sum_keeps_the_digits_beside_the_maximum(top, entropy, backend):
    V, peak = 2100, 40.0
    weight = torch.zeros(V, 1)
    weight[top] = peak
    result = linear_logprob(
        torch.ones(2, 1), weight, torch.tensor([top[0], 5]), return_entropy=entropy, backend=backend
    )
    rest = torch.tensor((V - len(top)) * math.exp(-peak) / len(top), dtype=F64)  # in units of the largest ones
    log_sum = math.log(len(top)) + rest.log1p()
    truth = torch.stack([-log_sum, -peak - log_sum])
    torch.testing.assert_close(result.logprob.double(), truth, rtol=1e-6, atol=0)
    if entropy:
        torch.testing.assert_close(result.entropy[0].double(), log_sum + peak * rest / (1 + rest), rtol=1e-6, atol=0)


# Several chunks of rows, and one. In Triton's interpreter several chunks take seconds.
@pytest.mark.parametrize(
    ("backend", "workspace_mib"),
    [
        *((backend, workspace_mib) for backend in ("native", "reference") for workspace_mib in (1, 64)),
        *(pytest.param(backend, 64) for backend in INTERPRETED),
        *(pytest.param(backend, 1, marks=[pytest.mark.slow, pytest.mark.long]) for backend in INTERPRETED),
    ],
)
def test_narrow_gradients_are_rounded_once(workspace_mib, backend):
    """The error of a narrow gradient is the error of one rounding, however many chunks add to it."""
    # Triton's interpreter cuts float32 off where a GPU rounds it to bfloat16. It rounds to float16.
    in_triton = (F16, 64, 32, 4160 if workspace_mib == 1 else 200)
    narrow, *shape = in_triton if backend == "triton" else (BF16, 256, 64, 9001)
    hidden, weight, target, _ = make_inputs(*shape, dtype=narrow)
    hidden += 1  # a gradient that grows from chunk to chunk instead of averaging out
    upstream, how = torch.ones(len(target)), {"workspace_mib": workspace_mib, "backend": backend}
    truth = gradients(lambda h, w: plain_logprob(h, w, target).logprob.sum(), hidden.double(), weight.double())
    fused = lambda logprob, _, g: logprob * g  # noqa: E731
    for function in (
        lambda h, w: linear_logprob(h, w, target, **how).logprob.sum(),
        lambda h, w: linear_logprob_loss(h, w, target, fused, upstream, **how).loss,
    ):
        for actual, exact in zip(gradients(function, hidden, weight), truth, strict=True):
            rounding = (exact.to(narrow) - exact).norm()
            assert (actual - exact).norm() < 1.02 * rounding


# 1 / 3001, as of the mean over a batch, is no bfloat16; 1e-7 and 1e5 are no float16, though the gradients are.
@pytest.mark.parametrize("way", ["frozen", "loss"])
@pytest.mark.parametrize(("dtype", "upstream"), [(BF16, 1 / 3001), (F16, 1e-7), (F16, 1e5)], ids=str)
def test_upstream_gradients_are_not_rounded(dtype, upstream, way):
    hidden, weight, target, _ = make_inputs(1000, 16, 200, dtype=dtype)  # roundings of single dlogits average out
    weight *= 0.05 if upstream > 1 else 30
    (WAYS[way](hidden.requires_grad_(), weight, target).sum() * upstream).backward()
    exact = lambda h: reference.linear_logprob(h, weight.detach().double(), target).logprob.sum() * upstream  # noqa: E731
    (truth,) = gradients(exact, hidden.double())
    # Signed like the gradient, errors of single roundings cancel; the error of the upstream gradient does not.
    error = ((hidden.grad.double() - truth) * truth.sign()).sum() / truth.abs().sum()
    assert abs(error) < (0.02 if upstream == 1e-7 else 2e-4)
