"""A head of another dtype than the hidden states, or under autocast: each gradient has the digits of its own input."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss, support_logprob
from tests.ops.logprob.problems import BF16, F16, F32, F64, each_backend, gradients, loss_problem, ppo_clip
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.numerics import assert_no_further_from_truth

# (hidden, weight and bias, autocast): TRL's default, an accelerate run, a float32 head of a narrow model, and two
# narrow dtypes neither of which holds the other.
DTYPES = [(F32, F32, BF16), (BF16, F32, None), (F32, BF16, None), (BF16, F16, None)]
each_mix = pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "autocast"), DTYPES, ids=["autocast", "wide-head", "narrow-head", "two-narrow"]
)
E = 5  # trained columns of an adapter


def trained(h: Tensor, w: Tensor, b: Tensor, y: Tensor, u: Tensor, **options) -> Tensor:
    return (linear_logprob(h, w, y, bias_V=b, **options).logprob * u).sum()


def frozen(h: Tensor, w: Tensor, b: Tensor, *others: Tensor, **options) -> Tensor:
    return trained(h, w.detach(), b.detach(), *others, **options)


def fused(h: Tensor, w: Tensor, b: Tensor, y: Tensor, u: Tensor, **options) -> Tensor:
    return linear_logprob_loss(h, w, y, lambda x, _, u: x * u, u, bias_V=b, **options).loss


def above(h: Tensor, w: Tensor, b: Tensor, y: Tensor, u: Tensor, **options) -> Tensor:
    return trained(h, w, b, y, u, threshold_T=torch.full_like(u, -1e3), **options)


def over_ids(h: Tensor, w: Tensor, b: Tensor, y: Tensor, u: Tensor, **_) -> Tensor:
    return (support_logprob(h, w, y, support_of(y, w), bias_V=b).logprob * u).sum()


def support_of(y: Tensor, w: Tensor) -> Tensor:
    return (y[:, None] + 7 * torch.arange(12)) % len(w)


def with_adapter(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda h, w, *others, **options: op(h, w[:, :-E].detach(), *others, adapter_VE=w[:, -E:], **options)


OPS: dict[str, Callable[..., Tensor]] = {
    "logits kept": trained,
    "recomputed": partial(trained, workspace_mib=1),
    "frozen": frozen,
    "adapter": with_adapter(trained),
    "threshold": above,
    "support": over_ids,
    "loss": fused,
    "loss of an adapter": with_adapter(fused),
}


def plain(op: str, h: Tensor, w: Tensor, b: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """In one dtype, without a fused op."""
    if op == "frozen":
        w, b = w.detach(), b.detach()
    if "adapter" in op:
        w = torch.cat([w[:, :-E].detach(), w[:, -E:]], -1)
    z = linear(h, w, b)
    if op == "support":
        z = z + torch.full_like(z, -torch.inf).scatter(1, support_of(y, w), 0.0)
    return (z.log_softmax(-1).gather(-1, y[:, None])[:, 0] * u).sum()


def value_and_gradients(op: Callable[..., Tensor], leaves: list[Tensor], *others: Tensor) -> list[Tensor]:
    """[value, dhidden, dweight, dbias] without the gradients of frozen inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = op(*leaves, *others)
    return [value.detach(), *(x for x in torch.autograd.grad(value, leaves, allow_unused=True) if x is not None)]


@each_mix
@each_backend
@pytest.mark.parametrize("op", OPS)
def test_gradients_have_the_digits_of_their_inputs(op, backend, hidden_dtype, weight_dtype, autocast):
    """Beside plain PyTorch in float32, of hidden states and a weight that are rounded to the dtype of the product."""
    T, D, V = (20, 16, 1100) if backend == "triton" else (67, 24, 2100)
    hidden, weight, target, _ = make_inputs(T, D, V)
    inputs = [hidden.to(hidden_dtype), weight.to(weight_dtype), torch.linspace(-1, 1, V).to(weight_dtype)]
    upstream = torch.randn(T, generator=torch.Generator().manual_seed(1))
    casting = partial(torch.autocast, "cpu", autocast or BF16, enabled=autocast is not None)

    def fused_op(*arguments: Tensor) -> Tensor:
        with casting():
            return OPS[op](*arguments, backend=backend)

    # Backward runs under autocast, too, which would narrow the products of the reference's.
    with casting() if backend != "reference" else nullcontext():
        ours = value_and_gradients(fused_op, inputs, target, upstream)
    rounded = [x.to(autocast or hidden_dtype) for x in inputs[:2]] + inputs[2:]
    eager, truth = (
        value_and_gradients(partial(plain, op), [x.to(dtype) for x in rounded], target, upstream.to(dtype))
        for dtype in (F32, F64)
    )
    trained_inputs = inputs[:1] if op == "frozen" else inputs
    for actual, like, plainly, exactly in zip(ours[1:], trained_inputs, eager[1:], truth[1:], strict=True):
        assert actual.dtype == like.dtype
        assert_no_further_from_truth(actual, plainly.to(like.dtype), exactly)
    assert abs(ours[0] - truth[0]) < 1e-5 * upstream.abs().sum()


@pytest.mark.parametrize(("hidden_dtype", "autocast"), [(F32, BF16), (BF16, None)], ids=["autocast", "wide-head"])
@pytest.mark.parametrize("op", ["logprob", "frozen", "support", "loss"])
def test_no_copy_of_the_head(op, hidden_dtype, autocast):
    """A bfloat16 copy of it would take 16 MB; the largest tile takes 3 MB, and all logits take 2 MB."""
    T, D, V = 16, 256, 32_000
    hidden, weight, target, _ = make_inputs(T, D, V)
    h, w, u = hidden.to(hidden_dtype).requires_grad_(), weight.requires_grad_(op != "frozen"), torch.ones(T)

    def step() -> None:
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            if op == "loss":
                value = linear_logprob_loss(h, w, target, lambda x, _: x, workspace_mib=2).loss
            elif op == "support":
                value = support_logprob(h, w, target, target[:, None], workspace_mib=1).logprob
            else:
                value = linear_logprob(h, w, target, workspace_mib=1).logprob
        torch.autograd.grad(value, [x for x in (h, w) if x.requires_grad], u.sum() if op == "loss" else u)

    gradient = 0 if op == "frozen" else 4 * V * D
    assert peak_allocated_bytes(step) - gradient < 8e6


def test_compiles_to_one_graph_under_autocast():
    hidden, weight, target, old, advantage = loss_problem(T=20, D=16, V=300)

    def step(h: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            logprob = linear_logprob(h, w, target).logprob
            return logprob.sum() + linear_logprob_loss(h, w, target, ppo_clip, old, advantage).loss

    compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), hidden, weight)
    for actual, expected in zip(compiled, gradients(step, hidden, weight), strict=True):
        assert actual.dtype == F32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_autocast_leaves_float64_as_it_is():
    """As it does for a linear layer."""
    hidden, weight, target, _ = make_inputs(6, 5, 40, dtype=F64)
    with torch.autocast("cpu", BF16):
        logprob = linear_logprob(hidden, weight, target).logprob
    assert torch.equal(logprob, linear_logprob(hidden, weight, target).logprob)
