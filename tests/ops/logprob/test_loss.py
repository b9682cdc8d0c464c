"""linear_logprob_loss beside its float64 definition, its scratch memory, and its treatment of loss functions."""

import contextlib
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob.loss import loss_functions
from rlft_fast.ops.logprob.tiles import padded_columns
from rlft_fast.ops.logprob.workspace import default_workspace_mib, forward_bytes, group_limits, scratch_bytes
from tests.ops.logprob.problems import BF16, F32, check_loss, interpreted, loss_problem, ppo_clip
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.machine.threads import num_threads


# Six chunks, one, and a tall one.
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("num_tokens", "workspace_mib"), [(300, 1), (300, 64), (1300, 64)])
def test_loss_no_further_from_truth_than_pytorch(num_tokens, workspace_mib, entropy, dtype):
    problem = loss_problem(T=num_tokens, D=24, V=5003 if num_tokens == 300 else 2503, dtype=dtype)
    check_loss(problem, dtype, {"workspace_mib": workspace_mib}, temperature=0.8, return_entropy=entropy)


@interpreted
@pytest.mark.parametrize("workspace_mib", [1, 64])  # two chunks, and one
def test_loss_from_odds_in_triton(workspace_mib, backend):
    T, V = (100, 4000) if workspace_mib == 1 else (100, 300)
    options = {"temperature": torch.linspace(0.5, 2, T), "logit_scale": 1.2}
    check_loss(loss_problem(T=T, V=V), F32, {"workspace_mib": workspace_mib, "backend": backend}, **options)


# One chunk, and two, which take the interpreter seconds.
@interpreted
@pytest.mark.parametrize(
    ("workspace_mib", "V"), [(64, 500), pytest.param(1, 4000, marks=[pytest.mark.slow, pytest.mark.long])]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_loss_with_an_entropy_in_triton(has_bias, workspace_mib, V, backend):
    bias_V = torch.linspace(-1, 1, V) if has_bias else None
    how = {"workspace_mib": workspace_mib, "backend": backend}
    check_loss(loss_problem(T=100, V=V), F32, how, bias_V=bias_V, return_entropy=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("workspace_mib", [1, 64])  # chunks of few rows, and a tall one
@pytest.mark.parametrize(("softcap", "shift"), [(5.0, 0), (None, -100)])  # a maximum that starts at 0 would underflow
def test_every_option_in_any_number_of_threads(softcap, shift, workspace_mib, threads):
    """Tiles and blocks of columns find their part of the bias, and threads find their tiles."""
    bias, temperature = shift + torch.linspace(-3, 3, 1500), torch.linspace(0.5, 2, 1300)
    options = {"softcap": softcap, "logit_scale": 0.8, "temperature": temperature, "return_entropy": True}
    with num_threads(threads):
        check_loss(loss_problem(T=1300, D=16, V=1500), F32, {"workspace_mib": workspace_mib}, bias_V=bias, **options)


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


def test_entropy_alone_is_a_loss():
    """The upstream gradient of the entropy is an expanded scalar."""
    hidden, weight, target, *_ = loss_problem()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_logprob_loss(*inputs, target, lambda _, entropy: entropy, return_entropy=True).loss
    entropy = linear_logprob(*inputs, target, return_entropy=True).entropy
    for actual, expected in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (loss, entropy)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_constant_loss_has_zero_gradient():
    hidden, weight, target, *_ = loss_problem()
    weight.requires_grad_()
    linear_logprob_loss(hidden, weight, target, lambda logprob, _: torch.ones_like(logprob)).loss.backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_on_cpu])  # autograd looks at no version under hooks
def test_second_backward_is_an_error_not_a_wrong_number(hooks):
    hidden, weight, target, old, advantage = loss_problem()
    with hooks():
        loss = 3 * linear_logprob_loss(hidden, weight.requires_grad_(), target, ppo_clip, old, advantage).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_second_backward_of_a_loss_that_is_computed_again():
    hidden, weight, target, old, advantage = loss_problem()
    weight.requires_grad_()

    def total() -> Tensor:
        return 3 * linear_logprob_loss(hidden, weight, target, ppo_clip, old, advantage).loss

    (expected,) = torch.autograd.grad(total(), weight)
    loss = checkpoint(total, use_reentrant=False)
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert torch.equal(found, expected)


# ---- loss functions under torch.compile and in threads -----------------------------------------------------------


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
    """A graph must not keep the first function if the same code comes with another closure, default or attribute."""
    hidden, weight, target, _ = make_inputs(20, 8, 50)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(h: Tensor, loss_fn) -> Tensor:
        return linear_logprob_loss(h, weight, target, loss_fn).loss

    for loss_fn in map(make, (1.0, 2.0, 3.0)):
        expected = linear_logprob_loss(hidden, weight, target, loss_fn).loss
        for _ in range(2):  # an eager call in between does not disturb the graph
            torch.testing.assert_close(step(hidden, loss_fn), expected)
            linear_logprob_loss(hidden, weight, target, loss_fn)


def wrapped(loss_fn):
    @functools.wraps(loss_fn)
    def loss(logprob: Tensor, entropy) -> Tensor:
        return 3 * loss_fn(logprob, entropy)

    return loss


def reweighted(loss_fn):
    other = copy.copy(loss_fn)
    other.weight = 3.0
    return other


@pytest.mark.parametrize(
    ("loss_fn", "change"), [(weighted(2.0), wrapped), pytest.param(Weighted(2.0), reweighted, marks=takes_objects)]
)
def test_a_copy_is_another_loss_function(loss_fn, change):
    """It has the attributes of the original, and with them the label by which a graph knows a function."""
    hidden, weight, target, _ = make_inputs(20, 8, 50)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(h: Tensor, loss_fn) -> Tensor:
        return linear_logprob_loss(h, weight, target, loss_fn).loss

    step(hidden, loss_fn)
    for each in (changed := change(loss_fn), loss_fn, changed):
        torch.testing.assert_close(step(hidden, each), linear_logprob_loss(hidden, weight, target, each).loss)


@pytest.mark.parametrize("loss_fn", [partial(weighted(2.0), factor=2.0), Weighted(2.0).__call__])
def test_loss_functions_that_are_new_each_time_do_not_compile(loss_fn):
    hidden, weight, target, _ = make_inputs(20, 8, 50)

    def step(h: Tensor) -> Tensor:
        return linear_logprob_loss(h, weight, target, loss_fn).loss

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"not a functools\.partial or a bound method"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    assert torch.equal(torch.compile(step, backend="aot_eager")(hidden), step(hidden))  # outside of the graph


def test_a_loss_function_made_inside_of_a_graph_is_refused():
    hidden, weight, target, _ = make_inputs(20, 8, 50)

    def step(h: Tensor) -> Tensor:
        return linear_logprob_loss(h, weight, target, lambda logprob, _: -logprob).loss

    with pytest.raises(torch._dynamo.exc.Unsupported, match="takes a loss_fn that is made outside of the compiled"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    assert torch.equal(torch.compile(step, backend="aot_eager")(hidden), step(hidden))


@pytest.mark.parametrize("loss_fn", [lambda logprob, _: logprob, lambda logprob, _: logprob.sum()])  # valid, invalid
def test_loss_functions_are_not_held_on_to(loss_fn):
    """A closure may hold the tensors of a whole step."""
    hidden, weight, target, _ = make_inputs(6, 5, 40)
    before = dict(loss_functions)
    with contextlib.suppress(ValueError):
        linear_logprob_loss(hidden, weight, target, loss_fn)
    assert loss_functions == before


def test_threads_share_a_loss_function():
    hidden, weight, target, _ = make_inputs(6, 5, 40)
    expected = linear_logprob_loss(hidden, weight, target, weighted(1.0)).loss
    shared = weighted(1.0)
    with ThreadPoolExecutor(4) as pool:
        losses = pool.map(lambda _: linear_logprob_loss(hidden, weight, target, shared).loss, range(1000))
    assert all(loss == expected for loss in losses)


@given(num_rows=st.integers(1, 40_000), dim=st.sampled_from([64, 896, 4096]), vocab=st.sampled_from([5003, 151936]))
def test_on_a_gpu_rows_whose_dlogits_spare_the_accumulator_are_one_group(num_rows, dim, vocab):
    """Packing gives any number of rows. Two groups of rows would need an accumulator, and read and write it twice."""
    workspace_mib = default_workspace_mib(num_rows, dim, vocab, BF16, "cuda")
    limit, group_limit = group_limits(dim, vocab, BF16, "cuda", workspace_mib)
    assert (4 * limit + 2 * group_limit) * padded_columns(vocab) <= workspace_mib * 2**20
    dlogits = 2 * (num_rows + 127) * padded_columns(vocab)
    if dlogits <= max(4 * vocab * dim, 2**30):
        assert group_limit >= num_rows
        assert scratch_bytes(num_rows, dim, vocab, BF16, "cuda", None) < 2**30 + dlogits + 8 * num_rows * dim
    elif dlogits > 1.1 * max(4 * vocab * dim, 2**30):
        assert group_limit < num_rows
        assert scratch_bytes(num_rows, dim, vocab, BF16, "cuda", None) > 8 * vocab * dim


# Logits that fill the default, logits of a few rows, and few columns, beside which copies of rows count.
@pytest.mark.parametrize(("D", "V", "workspace_mib"), [(128, 20000, None), (128, 20000, 24), (512, 4096, 8)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scratch_is_what_the_loss_takes_on_a_cpu(dtype, D, V, workspace_mib):
    T = 1024
    hidden, weight, target, _ = make_inputs(T, D, V)
    h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    how = {"workspace_mib": workspace_mib}
    # In bfloat16 each thread copies the weight of its tile, which the profiler does not see in other threads.
    with num_threads(4 if dtype == F32 else 1):
        measured = peak_allocated_bytes(lambda: linear_logprob_loss(h, w, target, lambda logprob, _: logprob, **how))
        planned = scratch_bytes(T, D, V, dtype, "cpu", workspace_mib)
    assert measured == pytest.approx(planned + (T + V) * D * dtype.itemsize, rel=0.05)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_forward_pass_on_a_cpu_takes_no_more_than_planned(dtype):
    """Of 3 x 528 rows of more: the hidden states of a chunk are copied."""
    D, V, workspace_mib = 512, 4000, 4
    hidden, weight, target, _ = make_inputs(2048, D, V)
    h, w = hidden.to(dtype), weight.to(dtype)
    target[3 * 528 :] = -100
    measured = peak_allocated_bytes(lambda: linear_logprob(h, w, target, workspace_mib=workspace_mib))
    planned = forward_bytes(3 * 528, D, V, dtype, workspace_mib)
    least = 0.95 if dtype == F32 else 0.5  # some CPUs multiply bfloat16 without a copy of the weight
    assert least * planned < measured < 1.05 * planned
