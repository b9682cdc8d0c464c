"""linear_logprob under autograd, autocast and torch.compile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss, support_logprob
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.problem import Problem
from tests.ops.logprob.problems import (
    F32,
    F64,
    WAYS,
    each_backend,
    each_compiler,
    each_kernel,
    gradients,
    logprob_of,
    loss_problem,
    plain_logprob,
    ppo_clip,
    several_tiles,
)

# ---- upstream gradients, and leaves that need some ------------------------------------------------------------------


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
    """Upstream gradients of any layout; only one of the two results has a gradient."""
    hidden, weight, target, _ = make_inputs(12, 16, 300)

    def grads(function, upstream):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(train_weight)
        value = getattr(function(h, w, target, return_entropy=True), of)
        value.sum().backward() if upstream is None else value.backward(upstream)
        return [h.grad, w.grad] if train_weight else [h.grad]

    ours = grads(logprob_of(backend), upstream)
    contiguous = None if upstream is None else upstream.contiguous()
    for actual, same, plain in zip(
        ours, grads(logprob_of(backend), contiguous), grads(plain_logprob, contiguous), strict=True
    ):
        assert torch.equal(actual, same)
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)


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
    hidden, weight, target, _ = make_inputs(6, 5, 40)
    NoGradient.apply(WAYS[way](hidden.requires_grad_(), weight, target)).sum().backward()
    assert hidden.grad is None or (hidden.grad == 0).all()


@each_kernel
@pytest.mark.parametrize("upstream", ["constant", "of the input"])
@pytest.mark.parametrize("trained", ["hidden", "weight", "both"])
@pytest.mark.parametrize("way", ["logprob", "entropy", "loss", "threshold", "support"])
def test_second_derivative_raises(way, trained, upstream, backend):
    """Otherwise a gradient penalty would lack its derivative, and nothing would tell."""
    hidden, weight, target, _ = make_inputs(6, 5, 40)
    inputs = [x.requires_grad_() for name, x in (("hidden", hidden), ("weight", weight)) if trained in (name, "both")]
    if way == "loss":
        value = linear_logprob_loss(hidden, weight, target, lambda x, _: -x, backend=backend).loss
    elif way == "support":
        value = support_logprob(hidden, weight, target, support_TK=torch.arange(40).expand(6, 40)).logprob.sum()
    else:
        threshold = torch.full((6,), -1e3) if way == "threshold" else None
        result = linear_logprob(
            hidden, weight, target, return_entropy=way == "entropy", threshold_T=threshold, backend=backend
        )
        value = (result.entropy if way == "entropy" else result.logprob).sum()
    value = value.exp() if upstream == "of the input" else value
    grads = torch.autograd.grad(value, inputs, create_graph=True)
    penalty = value + sum(grad.square().sum() for grad in grads) + hidden.pow(3).sum() + weight.pow(3).sum()
    with pytest.raises((RuntimeError, NotImplementedError)):
        penalty.backward()


@each_backend
def test_tied_embedding(backend):
    """A weight that is embedding and head gets the sum of both gradients."""
    _, weight, target, _ = make_inputs(12, 16, 300)
    ids = torch.arange(12) % 5
    ours, truth = (
        gradients(lambda w, f=function: f(w[ids].tanh(), w, target).logprob.sum(), weight.to(dtype))[0].double()
        for function, dtype in ((logprob_of(backend), F32), (plain_logprob, F64))
    )
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


@each_backend
def test_each_gradient_is_the_same_alone(backend):
    """Frozen hidden states or a frozen weight change nothing in the other gradient but rounding."""
    hidden, weight, target, _ = make_inputs(*several_tiles(backend))
    logprob = lambda h, w: logprob_of(backend)(h, w, target).logprob.square().sum()  # noqa: E731
    both = gradients(logprob, hidden, weight)
    (only_hidden,) = gradients(lambda h: logprob(h, weight), hidden)
    (only_weight,) = gradients(lambda w: logprob(hidden, w), weight)
    torch.testing.assert_close(only_hidden, both[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(only_weight, both[1])


# ---- torch's own checks ---------------------------------------------------------------------------------------------


def small_problem(requires_grad: bool, **fields: Any) -> Problem:
    hidden, weight, target, _ = make_inputs(6, 8, 64)  # V is a multiple of 64: padding columns would hold any value
    return Problem(
        hidden_TD=hidden.requires_grad_(requires_grad), weight_VD=weight.requires_grad_(requires_grad), target_T=target,
        active_index=torch.arange(6), bias_V=None, inv_temperature=torch.ones(1), softcap=0.0, scale=1.0,
        backend="native", workspace_mib=64, dtype=F32, ignore_index=-100, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    namespace = torch.ops.rlft_fast
    above = small_problem(requires_grad, threshold_T=torch.zeros(6))
    torch.library.opcheck(namespace.linear_logprob, (*above.flat(), *[True] * 5), test_utils=tests)
    adapted = small_problem(requires_grad, adapter_VE=torch.ones(64, 3, requires_grad=requires_grad))
    for columns in (5, 8):  # the adapter beside the weight, and both joined
        whole = replace(adapted, weight_VD=adapted.weight_VD.detach()[:, :columns])
        torch.library.opcheck(namespace.linear_logprob, (*whole.flat(), *[True] * 5), test_utils=tests)
    torch.library.opcheck(namespace.linear_logprob_frozen, small_problem(requires_grad).flat(), test_utils=tests)
    torch.library.opcheck(namespace.linear_logprob_frozen_backward, (torch.ones(6, 8), torch.ones(6)))


def test_opcheck_epilogues():
    z, row = torch.randn(4, 9), torch.zeros(4)
    common = (z, torch.tensor([0, 3, 8, 1]), 0, None, torch.ones(1), 0.0, 1.0)
    stats = (torch.full((4,), -torch.inf), row.clone(), row.clone(), row.clone(), row.clone())
    torch.library.opcheck(torch.ops.rlft_fast.logprob_stats_, (*common, *stats))
    torch.library.opcheck(torch.ops.rlft_fast.logprob_stats_, (*common, *stats, row.double()))
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
    frozen, adapter = weight.detach()[:, :2], weight.detach()[:, 2:].clone().requires_grad_()
    adapted = lambda h, a: linear_logprob(h, frozen, target, adapter_VE=a).logprob  # noqa: E731
    assert torch.autograd.gradcheck(adapted, [hidden, adapter])


@each_compiler
def test_compiles_to_one_graph(compiler):
    hidden, weight, target, old, advantage = loss_problem(T=40, V=300)

    def step(h: Tensor, w: Tensor) -> Tensor:
        result = linear_logprob(h * 1.0, w, target, return_entropy=True)
        frozen = linear_logprob(h * 1.0, weight, target)
        fused = linear_logprob_loss(h * 1.0, w, target, ppo_clip, old, advantage)
        return ((result.logprob + frozen.logprob) * advantage).sum() + result.entropy.sum() + 2 * fused.loss

    compiled = gradients(torch.compile(step, fullgraph=True, backend=compiler), hidden, weight)
    torch.testing.assert_close(compiled, gradients(step, hidden, weight))
