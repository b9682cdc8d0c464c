"""A loss of log-probabilities of ids beside the target, as a distillation has, against all logits."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob_loss
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.loss import hold, release
from tests.ops.logprob.problems import BF16, F32, F64, each_kernel
from tests.ops.logprob.test_autograd import small_problem
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.numerics import assert_no_further_from_truth

T, D, V, K = 67, 24, 200, 7


def distilled(logprob: Tensor, entropy: Tensor | None, ids_logprob: Tensor, q_logprob: Tensor) -> Tensor:
    """Forward divergence over a support and the rest of the mass, beside a policy's loss."""
    q, rest = q_logprob.exp(), -torch.expm1(q_logprob.logsumexp(-1))
    loss = (q * (q_logprob - ids_logprob)).sum(-1) - rest * torch.log1p(-ids_logprob.exp().sum(-1)) - 0.3 * logprob
    return loss if entropy is None else loss - 0.1 * entropy


def ids_problem(dtype: torch.dtype = F32, num_ids: int = K) -> tuple[Tensor, ...]:
    """(hidden, weight, target, ids, their log-probabilities under a teacher); targets are among the ids of half."""
    hidden, weight, target, *_ = make_inputs(T, D, V, seed=1, dtype=dtype)
    teacher, *_ = make_inputs(T, D, V, seed=2)
    logprob, ids = (hidden.float() + teacher @ torch.eye(D)).matmul(weight.float().T).log_softmax(-1).topk(num_ids)
    ids[::2, -1:] = target[::2, None]
    target[::7] = -100
    return hidden, weight, target, ids, logprob


def gradients(function, problem: tuple[Tensor, ...], dtype: torch.dtype, bias: Tensor | None = None, **options):
    """[log-probabilities of target and ids, dhidden, dweight, dbias] of twice the loss."""
    hidden, weight, target, ids, q_logprob = problem
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias) if x is not None]
    options |= {"bias_V": leaves[2]} if bias is not None else {}
    out = function(*leaves[:2], target, distilled, q_logprob.to(torch.promote_types(dtype, F32)), ids_TK=ids, **options)
    (2 * out.loss).backward()
    return [out.logprob, out.ids_logprob, *(x.grad for x in leaves)]


def check_ids(dtype: torch.dtype, backend: str, bias: Tensor | None = None, **options) -> None:
    problem = ids_problem(dtype)
    ours = gradients(partial(linear_logprob_loss, backend=backend, workspace_mib=1), problem, dtype, bias, **options)
    eager, truth = (gradients(reference.linear_logprob_loss, problem, x, bias, **options) for x in (dtype, F64))
    for actual, plain, exact in zip(ours, eager, truth, strict=True):
        # An id's log-probability is a difference of two logits more than plain PyTorch's.
        assert_no_further_from_truth(actual, plain, exact, factor=2)


@each_kernel
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_further_from_truth_than_all_logits(dtype, backend):
    check_ids(dtype, backend)


def test_transformed_logits():
    check_ids(
        F32, "native", torch.linspace(-1, 1, V), softcap=3.0, logit_scale=0.8, temperature=torch.linspace(0.5, 2, T),
        return_entropy=True,
    )  # fmt: skip


def test_gradients_of_the_reference():
    hidden, weight, target, ids, q_logprob = ids_problem(num_ids=3)
    rows = slice(1, 6)
    ids.remainder_(60), target.clamp_(max=59)
    options = {"ids_TK": ids[rows]}

    def loss(hidden, weight):
        q = q_logprob[rows].double()
        return reference.linear_logprob_loss(hidden, weight, target[rows], distilled, q, **options).loss

    leaves = [x.double().requires_grad_() for x in (hidden[rows], weight[:60])]
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("train_hidden", [True, False])
def test_an_adapter_beside_a_frozen_weight(train_hidden):
    """Its gradient and that of the hidden states are those of one weight."""
    *problem, ids, q_logprob = ids_problem()
    hidden, weight, target = problem
    h, w = hidden.clone().requires_grad_(train_hidden), weight.clone().requires_grad_()
    adapter = weight[:, -4:].clone().requires_grad_()
    call = lambda w, **how: linear_logprob_loss(h, w, target, distilled, q_logprob, ids_TK=ids, **how).loss  # noqa: E731
    inputs = [h] if train_hidden else []
    whole = torch.autograd.grad(call(w), [*inputs, w])
    parts = torch.autograd.grad(call(weight[:, :-4], adapter_VE=adapter), [*inputs, adapter])
    expected = [*whole[:-1], whole[-1][:, -4:]]
    for actual, other in zip(parts, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)


def test_a_bad_row_that_the_loss_does_not_see():
    hidden, weight, target, ids, _ = ids_problem()
    hidden[5] = torch.nan
    seen = torch.ones(T)
    seen[5] = 0
    loss = lambda _, entropy, of_ids, seen: torch.where(seen > 0, of_ids.sum(-1), 0.0)  # noqa: E731
    hidden.requires_grad_(), weight.requires_grad_()
    linear_logprob_loss(hidden, weight, target, loss, seen, ids_TK=ids).loss.backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert not hidden.grad[5].any()


def test_memory_is_that_of_the_ids():
    """Beside what the loss takes without ids; all logits have 80 times the numbers of the ids."""
    hidden, weight, target, *_ = make_inputs(1000, 8, 4000)
    ids = torch.arange(1000).unsqueeze(1) + torch.arange(50)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = lambda logprob, _, of_ids: -of_ids.sum(-1)  # noqa: E731
    options = {"workspace_mib": 1}
    without = peak_allocated_bytes(
        lambda: linear_logprob_loss(hidden, weight, target, lambda logprob, _: -logprob, **options).loss.backward()
    )
    peak = peak_allocated_bytes(
        lambda: linear_logprob_loss(hidden, weight, target, loss, ids_TK=ids, **options).loss.backward()
    )
    assert peak - without < 24 * ids.numel() * 4


@pytest.mark.parametrize("has_ids", [False, True])
def test_operator(has_ids):
    problem = small_problem(True)
    ids = torch.arange(18).view(6, 3) if has_ids else None
    handle = hold(lambda logprob, _, *of_ids: -logprob - sum(x.sum(-1) for x in of_ids))
    arguments = (*problem.flat(), [], handle, None, ids, False, [True, True, False])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    try:
        opcheck(torch.ops.rlft_fast.linear_logprob_loss, arguments, test_utils=tests)
    finally:
        release(handle)
