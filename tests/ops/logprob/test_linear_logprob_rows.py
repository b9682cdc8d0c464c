"""Rows and tokens that do not count in linear_logprob: ignored, absent, impossible, or not a number."""

import pytest
import torch
from torch import Tensor

from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from tests.ops.logprob.problems import make_problem


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


def test_more_rows_than_logits_in_the_workspace():
    """Backward takes a tile of all rows: a single column is more than its memory, and still has to do."""
    hidden, weight, target, _ = make_problem(2**18 + 1, 2, 3)
    results = {}
    for dtype, function in ((torch.float32, linear_logprob), (torch.float64, reference.linear_logprob)):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        options = {"workspace_mib": 1} if dtype == torch.float32 else {}
        results[dtype] = torch.autograd.grad(function(*inputs, target, **options).logprob.sum(), inputs)
    for actual, expected in zip(results[torch.float32], results[torch.float64], strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_numbers_stay_in_their_row(bad):
    hidden, weight, target, _ = make_problem(8, 16, 300)
    clean = linear_logprob(hidden, weight, target).logprob
    hidden[3, 2] = bad
    broken = linear_logprob(hidden, weight, target).logprob
    assert not broken[3].isfinite()
    others = torch.arange(8) != 3
    assert torch.equal(broken[others], clean[others])


# Few tokens; and a vocabulary of several tiles, of which some hold impossible tokens alone, behind the others or first.
@pytest.mark.parametrize(("V", "possible"), [(40, slice(0, 20)), (4500, slice(0, 20)), (4500, slice(4480, 4500))])
@pytest.mark.parametrize("train_weight", [True, False])
def test_impossible_tokens(V, possible, train_weight):
    """A logit of -inf has probability 0, adds nothing to the entropy, and gets no gradient."""
    hidden, weight, target, _ = make_problem(6, 16, V)
    target = target % 20
    bias = torch.full((V,), -torch.inf)
    bias[possible] = 0
    hidden.requires_grad_(), weight.requires_grad_(train_weight)

    def gradients(weight: Tensor, target: Tensor, **options) -> list[Tensor]:
        results = [linear_logprob(hidden, weight, target, **options).logprob]  # a frozen weight has a way of its own
        results.append(linear_logprob(hidden, weight, target, return_entropy=True, **options).entropy)
        return [x for y in results for x in (y.detach(), *torch.autograd.grad(y.sum(), hidden))]

    ours = gradients(weight, target + possible.start, bias_V=bias)
    for actual, expected in zip(ours, gradients(weight[possible], target), strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradients_of_certain_targets_are_no_difference_of_equal_numbers():
    """The frozen head's U = (onehot - P) W where p is 1 but for 1e-6 or less, of which 1 - p has a digit at most."""
    hidden, weight, target, _ = make_problem(32, 128, 1500)
    hidden = (hidden + 30 / weight[target].square().sum(-1, keepdim=True) * weight[target]).requires_grad_()
    grad = torch.autograd.grad(linear_logprob(hidden, weight, target).logprob.sum(), hidden)[0]
    exact = reference.linear_logprob(hidden.double(), weight.double(), target)
    assert exact.logprob.mean() > -1e-5
    truth = torch.autograd.grad(exact.logprob.sum(), hidden)[0]
    assert (grad - truth).norm(dim=-1).div(truth.norm(dim=-1)).max() < 1e-4
