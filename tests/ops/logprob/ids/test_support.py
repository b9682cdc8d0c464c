"""Log-probabilities over a sampling support, against plain masking of all logits."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, support_logprob, support_logprob_loss
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.reference import transform_logits
from tests.ops.logprob.problems import INTERPRETED, each_compiler, ppo_clip
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.numerics import assert_no_further_from_truth

T, D, V = 30, 16, 200
INF = torch.inf
# A threshold is for users of the op: seconds of Triton's interpreter are not for every run of the tests.
of_a_threshold = pytest.mark.parametrize(
    "backend", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in INTERPRETED)]
)


def support_problem(seed: int = 0, top_k: int = 12, V: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Targets drawn from top-k or fewer tokens; supports of different sizes, in any order."""
    hidden, weight, *_ = make_inputs(T, D, V, seed=seed)
    weight *= 2
    g = torch.Generator().manual_seed(seed)
    support = (hidden @ weight.T).topk(top_k).indices
    sizes = torch.randint(1, top_k + 1, (T, 1), generator=g)
    target = support[:, 0].clone()
    support[torch.arange(top_k) >= sizes] = -1
    return hidden, weight, target, support[:, torch.randperm(top_k, generator=g)]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 20), top_k=st.integers(1, 40), softcap=st.sampled_from([None, 3.0]), bias=st.booleans(),
    per_token=st.booleans(),
)  # fmt: skip
def test_equals_masking_all_logits(seed, top_k, softcap, bias, per_token):
    hidden, weight, target, support = support_problem(seed, top_k)
    temperature = torch.linspace(0.5, 2, T) if per_token else 0.7
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, V))]
        h, w, b = inputs
        b = b if bias else None
        if dtype == torch.float32:
            out = support_logprob(
                h, w, target, support, bias_V=b, softcap=softcap, logit_scale=0.8, temperature=temperature,
                return_entropy=True, return_sum_prob_squared=True,
            )[:3]  # fmt: skip
        else:
            out = reference.support_logprob(
                h, w, target, support, bias_V=b, softcap=softcap, logit_scale=0.8, temperature=temperature
            )[:3]
        (out[0].sum() + (out[1] * torch.linspace(-1, 1, T)).sum()).backward()
        results.append([*(x.detach() for x in out), *(x.grad for x in inputs if x.grad is not None)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_whole_vocabulary_is_linear_logprob():
    hidden, weight, target, _ = support_problem()
    asked = {"return_entropy": True, "return_sum_prob_squared": True}
    expected = linear_logprob(hidden, weight, target, **asked)
    everything = {"support_TK": torch.arange(V).expand(T, V), "threshold_T": torch.full((T,), -INF)}
    for name, support in everything.items():
        actual = support_logprob(hidden, weight, target, **{name: support}, **asked, workspace_mib=1)
        torch.testing.assert_close(actual.logprob, expected.logprob)
        torch.testing.assert_close(actual.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual.sum_prob_squared, expected.sum_prob_squared, rtol=1e-5, atol=1e-6)


# Beyond a tile of columns, so that whole tiles hold no token that is kept; 40 rows of a mebibyte are two chunks.
@of_a_threshold
@pytest.mark.parametrize("V", [37, 4100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threshold_no_further_from_truth_than_masking(dtype, softcap, V, backend):
    """Thresholds lie half-way between two logits, where rounding decides nothing."""
    hidden, weight, target, _ = support_problem(1, 12, V=V)
    target[0] = -100
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = {"softcap": softcap, "logit_scale": 0.8, "temperature": torch.linspace(0.5, 2, T)}
    z = transform_logits(hidden.double() @ weight.double().T, **options)
    threshold = z.topk(13).values[:, 11:].mean(-1).float()
    threshold[1], target[1] = INF, 3  # nothing but the target
    threshold[2] = -INF

    def results(function, dtype) -> list[Tensor]:
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        out = function(h, w, target, threshold_T=threshold.to(dtype), return_entropy=True, **options)
        ((out.logprob * torch.linspace(0, 1, T)).sum() + out.entropy.sum()).backward()
        return [out.logprob.detach(), out.entropy.detach(), h.grad, w.grad]

    ours = results(partial(linear_logprob, backend=backend, workspace_mib=1), dtype)
    assert ours[0][1] == 0
    eager, truth = (results(reference.linear_logprob, d) for d in (dtype, torch.float64))
    for actual, plain, exact in zip(ours, eager, truth, strict=True):
        assert actual.isfinite().all()
        assert_no_further_from_truth(actual, plain, exact)


@of_a_threshold
@pytest.mark.parametrize("train_hidden", [False, True])
def test_threshold_of_a_frozen_weight(train_hidden, backend):
    """A frozen weight takes other ways: no gradient at all, and a gradient of the hidden states alone."""
    hidden, weight, target, _ = support_problem()
    threshold = (hidden @ weight.T).topk(12).values[:, -2:].mean(-1)

    def results(function) -> list[Tensor]:
        h = hidden.clone().requires_grad_(train_hidden)
        logprob = function(h, weight, target, threshold_T=threshold).logprob
        return [logprob.detach(), *(torch.autograd.grad(logprob.sum(), h) if train_hidden else [])]

    ours = results(partial(linear_logprob, backend=backend))
    for actual, expected in zip(ours, results(reference.linear_logprob), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_threshold_agrees_with_ids():
    """The k-th largest logit as threshold keeps k tokens for any sampled target, and both tokens of a tie."""
    hidden, weight, _, _ = support_problem()
    weight[-2:] = weight[0]  # ties
    z = (hidden @ weight.T).double()
    values, support = z.topk(12)
    tied = (z == values[:, -1:]).sum(-1) > 1
    hidden.requires_grad_(), weight.requires_grad_()
    by_ids = support_logprob(hidden, weight, support[:, 5], support, return_entropy=True)
    threshold = (values[:, -1] - 1e-5).float()
    by_threshold = support_logprob(hidden, weight, support[:, 5], threshold_T=threshold, return_entropy=True)
    for actual, expected in zip(by_threshold[:2], by_ids[:2], strict=True):
        torch.testing.assert_close(actual[~tied], expected[~tied], rtol=1e-5, atol=1e-5)


def test_target_below_the_threshold_is_kept():
    hidden, weight, _, _ = support_problem()
    z = hidden @ weight.T
    target, top = z.argmin(-1), z.amax(-1)
    logprob = support_logprob(hidden, weight, target, threshold_T=(top + z.topk(2).values[:, 1]) / 2).logprob
    expected = torch.stack([z.amin(-1), top], -1).log_softmax(-1)[:, 0]
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)


@of_a_threshold
def test_threshold_with_bad_rows_and_silent_rows(backend):
    """A row of nan changes no other row, and adds nothing to a gradient if the loss does not see it."""
    hidden, weight, target, _ = support_problem()
    hidden[3], hidden[5] = torch.nan, torch.inf
    leaves = hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(V, requires_grad=True)
    options = {"bias_V": leaves[2], "threshold_T": torch.zeros(T), "softcap": 3.0, "backend": backend}
    result = linear_logprob(hidden, weight, target, return_entropy=True, **options)
    seen = torch.ones(T)
    seen[[3, 5]] = 0
    assert (result.logprob.isnan() == (seen == 0)).all()
    grads = torch.autograd.grad(result.logprob, leaves, seen)
    assert (grads[0][[3, 5]] == 0).all()
    assert grads[1].isfinite().all()
    assert grads[2].isfinite().all()


def support_gradients(problem: tuple[Tensor, ...], seen: Tensor, **options) -> list[Tensor]:
    """(dhidden, dweight, dbias) of logprob and entropy, with an upstream gradient that no row may cancel."""
    hidden, weight, target, support = problem
    bias = options.pop("bias_V", torch.linspace(-1, 1, V))
    inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    result = support_logprob(*inputs[:2], target, support, bias_V=inputs[2], return_entropy=True, **options)
    torch.autograd.backward([result.logprob, result.entropy], [seen, -seen])
    return [x.grad for x in inputs]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_ids_with_bad_rows_and_silent_rows(bad, softcap):
    """Bad rows without weight in the loss add nothing to a gradient. A bad row with weight makes gradients nan."""
    hidden, weight, target, support = support_problem()
    seen, temperature = torch.linspace(0.5, 2, T), torch.linspace(0.5, 2, T)
    target[3], seen[5] = -100, 0
    expected = support_gradients(support_problem(), seen.index_fill(0, torch.tensor([3, 5]), 0), softcap=softcap,
                                 temperature=temperature)  # fmt: skip
    hidden[[3, 5]], temperature[3] = bad, 0
    actual = support_gradients((hidden, weight, target, support), seen, softcap=softcap, temperature=temperature)
    for gradient, same in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, same)
    seen[5] = 1
    for gradient in support_gradients((hidden, weight, target, support), seen, temperature=temperature):
        assert gradient.isnan().any()


def test_entropy_alone_is_a_loss():
    hidden, weight, target, support = support_problem()
    hidden.requires_grad_()
    entropy = support_logprob(hidden, weight, target, support, return_entropy=True).entropy
    expected = torch.autograd.grad(reference.support_logprob(hidden, weight, target, support).entropy.sum(), hidden)[0]
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), hidden)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_bias_may_forbid_tokens():
    """It may forbid some of a row's ids, all ids of an ignored row, and all ids of a row that counts."""
    hidden, weight, target, support = support_problem()
    support[:3] = torch.stack([torch.arange(12) + 12 * i for i in range(3)])
    target[:3] = torch.tensor([1, -100, 30])
    bias = torch.linspace(-1, 1, V)
    bias[0] = bias[2:4] = bias[12:36] = -INF  # padding has the logit of token 0
    without = torch.where(bias[support.clamp(min=0)] == -INF, -1, support)
    options = {"return_entropy": True, "return_sum_prob_squared": True}
    results = [support_logprob(hidden, weight, target, s, bias_V=bias, **options)[:3] for s in (support, without)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert results[0][0][2] == -INF
    problems = [(hidden, weight, target, s) for s in (support, without)]
    gradients = [support_gradients(problem, torch.ones(T), bias_V=bias) for problem in problems]
    for actual, expected in zip(*gradients, strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected)


class LargestResult(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_a_frozen_head_costs_nothing_of_the_vocabularys_size():
    hidden, weight, target, support = support_problem()
    both = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    support_logprob(*both, target, support).logprob.sum().backward()
    for frozen in (False, True):
        inputs = hidden.clone().requires_grad_(frozen), weight.clone().requires_grad_(not frozen)
        logprob = support_logprob(*inputs, target, support).logprob.sum()
        with LargestResult() as largest:
            logprob.backward()
        assert (largest.numel < V * D) == frozen
        for x, full in zip(inputs, both, strict=True):
            assert x.grad is None if not x.requires_grad else torch.equal(x.grad, full.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_bounds_the_memory_of_the_gathered_rows(dtype):
    sizes = (200, 256), (100, 256)
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    support = torch.arange(100).expand(200, 100)  # gathered, 20 MiB in float32

    def step():
        logprob = support_logprob(*inputs, support[:, 0], support, workspace_mib=4).logprob
        return torch.autograd.grad(logprob.sum(), inputs)

    assert peak_allocated_bytes(step) < 5.2 * 2**20  # also gradients, and tensors of the size of the support


@pytest.mark.parametrize("threshold", [False, True])
def test_an_adapter_beside_a_frozen_weight(threshold):
    """Its gradient, hidden's and the log-probabilities are those of both joined, which are never copied."""
    hidden, weight, target, support = support_problem()
    frozen, adapter, h = weight[:, :-4], weight[:, -4:].clone().requires_grad_(), hidden.clone().requires_grad_()
    how = {"support_TK": None, "threshold_T": torch.zeros(T)} if threshold else {"support_TK": support}
    out = support_logprob(h, frozen, target, adapter_VE=adapter, **how, return_entropy=True)
    ours = [*out[:2], *torch.autograd.grad((out.logprob + out.entropy).sum(), [h, adapter])]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    if threshold:
        truth = reference.linear_logprob(*exact, target, threshold_T=torch.zeros(T).double(), return_entropy=True)
    else:
        truth = reference.support_logprob(*exact, target, support)
    dhidden, dweight = torch.autograd.grad((truth.logprob + truth.entropy).sum(), exact)
    for actual, expected in zip(ours, [*truth[:2], dhidden, dweight[:, -4:]], strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_adapted_weight_is_neither_copied_nor_given_a_gradient():
    hidden, weight, target, support = support_problem(V=100_000)
    frozen, adapter = weight[:, :-1], weight[:, -1:].clone().requires_grad_()

    def step():
        logprob = support_logprob(hidden, frozen, target, support, adapter_VE=adapter).logprob
        return torch.autograd.grad(logprob.sum(), adapter)

    assert peak_allocated_bytes(step) < 2 * 2**20  # of 100,000 x 16 numbers, a copy would take 6.1 MiB


@pytest.mark.parametrize("threshold", [False, True])
def test_a_loss_over_a_support(threshold):
    """PPO's loss and its gradients, by the float64 reference; ignored rows add nothing."""
    hidden, weight, target, support = support_problem()
    target[::7] = -100
    old, advantage = torch.randn(2, T, generator=torch.Generator().manual_seed(1))
    how = {"threshold_T": torch.zeros(T)} if threshold else {"support_TK": support}
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = support_logprob_loss(*inputs, target, ppo_clip, old, advantage, return_entropy=True, **how)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    if threshold:
        truth = reference.linear_logprob(*exact, target, threshold_T=torch.zeros(T).double(), return_entropy=True)
    else:
        truth = reference.support_logprob(*exact, target, support)
    loss = ppo_clip(*truth[:2], old, advantage)[target != -100].sum()
    assert not any(x.requires_grad for x in (out.logprob, out.entropy))
    results = [*out[:3], *torch.autograd.grad(out.loss, inputs)]
    for actual, expected in zip(results, [loss, *truth[:2], *torch.autograd.grad(loss, exact)], strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_loss_over_a_support_refuses_what_is_no_loss_per_token():
    *problem, support = support_problem()
    call = partial(support_logprob_loss, *problem, support_TK=support)
    with pytest.raises(ValueError, match=r"loss_fn must return one loss per token, a \(30,\) tensor; got \(\)"):
        call(lambda logprob, _: logprob.sum())
    with pytest.raises(ValueError, match=r"per_token\[0\] must have 30 rows, one per token"):
        call(lambda logprob, _, x: logprob * x, torch.ones(1))


def test_the_temperature_has_no_gradient():
    temperature = torch.full((T,), 0.7, requires_grad=True)
    hidden, weight, target, support = support_problem()
    result = support_logprob(hidden, weight, target, support, temperature=temperature, return_entropy=True)
    assert not result.logprob.requires_grad
    assert not result.entropy.requires_grad


def test_ratio_of_an_unchanged_policy_averages_one():
    """Importance weights of top-k samples: 1 over the support, and less on average over the whole vocabulary."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4000, D, generator=g), torch.randn(V, D, generator=g) / 2
    drifted = weight + 0.05 * torch.randn(V, D, generator=g)
    top, support = (hidden @ weight.T).topk(5)
    sampled = top.softmax(-1).multinomial(1, generator=g)
    target = support.gather(1, sampled).squeeze(1)
    new, old = (support_logprob(hidden, w, target, support).logprob for w in (drifted, weight))
    assert abs((new - old).exp().mean() - 1) < 0.02
    # By threshold the supports of two policies differ a little. The supports of one policy are equal.
    by_threshold = partial(support_logprob, hidden, target_T=target, threshold_T=top[:, -1])
    new, old = (by_threshold(weight_VD=w).logprob for w in (drifted, weight))
    assert abs((new - old).exp().mean() - 1) < 0.1
    torch.testing.assert_close(old, top.log_softmax(-1).gather(1, sampled).squeeze(1), rtol=1e-4, atol=1e-4)
    grown = by_threshold(weight_VD=weight.clone().requires_grad_()).logprob
    assert ((grown - old).exp() == 1).all()
    biased = linear_logprob(hidden, weight, target).logprob - top.log_softmax(-1).gather(1, sampled).squeeze(1)
    assert biased.exp().mean() < 0.8


def test_ignored_rows_empty_supports_and_targets_outside():
    hidden, weight, target, support = support_problem()
    target[0], support[1], support[2] = -100, -1, torch.arange(12)
    target[2] = 150
    hidden.requires_grad_(), weight.requires_grad_()
    options = {"return_entropy": True, "return_sum_prob_squared": True}
    result = support_logprob(hidden, weight, target, support, **options)
    assert result.logprob[0] == 0
    assert (result.entropy[:2] == 0).all()
    assert (result.sum_prob_squared[:2] == 0).all()
    assert (result.logprob[1:3] == -INF).all()
    (result.logprob[3:].sum() + result.entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_bfloat16_statistics_are_float32():
    hidden, weight, target, support = support_problem()
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    bias = torch.zeros(V, dtype=torch.bfloat16, requires_grad=True)
    result = support_logprob(hidden, weight, target, support, bias_V=bias)
    assert result.logprob.dtype == torch.float32
    result.logprob.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_gradients_of_a_bfloat16_bias_are_rounded_once():
    """In bfloat16 a sum of halves would stop growing at 128."""
    hidden, weight = torch.zeros(1000, D, dtype=torch.bfloat16), torch.zeros(V, D, dtype=torch.bfloat16)
    bias = torch.zeros(V, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1000, dtype=torch.int64)
    support_logprob(hidden, weight, target, torch.arange(2).expand(1000, 2), bias_V=bias).logprob.sum().backward()
    assert bias.grad[:3].tolist() == [500, -500, 0]


@each_compiler
def test_opcheck_and_compile(compiler):
    hidden, weight, target, support = support_problem()
    hidden.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(torch.ops.rlft_fast.support_logits, (hidden, weight, support.clamp(min=0), 1, torch.float32))
    constant = [torch.ones(support.shape), hidden.detach(), weight.detach(), support.clamp(min=0), 1, torch.float32]
    torch.library.opcheck(torch.ops.rlft_fast.support_logits_backward, (*constant, [True, False]))
    results = []
    for function in (support_logprob, torch.compile(support_logprob, fullgraph=True, backend=compiler)):
        logprob = function(hidden, weight, target, support).logprob
        results.append([logprob, *torch.autograd.grad(logprob.square().sum(), [hidden, weight])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"support_TK": torch.full((T, 3), V)}, ValueError, "outside the vocabulary of 200"),
        ({"support_TK": torch.tensor([[5, -1, 5, -1]]).expand(T, 4)}, ValueError, "holds the id 5 twice in row 0"),
        ({"support_TK": torch.full((T, 3), -2)}, ValueError, "ids from -2 to -2"),
        ({"support_TK": torch.zeros(T - 1, 3, dtype=torch.int64)}, ValueError, r"support_TK \(30, K\)"),
        ({"support_TK": torch.zeros(T, 3)}, TypeError, "int64"),
        ({"weight_VD": torch.zeros(V, D + 1)}, ValueError, r"weight_VD \(V, D\)"),
        ({"weight_VD": torch.zeros(V, D, dtype=torch.int64)}, TypeError, "must be float32, bfloat16 or float16"),
        ({"target_T": torch.full((T,), V)}, ValueError, r"target_T\[0\] is 200"),
        ({"support_TK": torch.zeros(T, 3, dtype=torch.int64, device="meta")}, ValueError, "support_TK is on meta"),
        ({"support_TK": torch.zeros(T, 20_000, dtype=torch.int64), "workspace_mib": 1}, ValueError, "at least 2"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"bias_V": torch.zeros(V + 1)}, ValueError, r"bias_V of shape \(200,\)"),
        ({"support_TK": None}, ValueError, "got neither"),
        ({"threshold_T": torch.zeros(T)}, ValueError, "got both"),
        ({"support_TK": None, "threshold_T": torch.zeros(T + 1)}, ValueError, "threshold_T must have one value"),
        ({"support_TK": None, "threshold_T": torch.zeros(T, dtype=torch.int64)}, TypeError, "threshold_T"),
    ],
)
def test_bad_input(change, error, message):
    names = ("hidden_TD", "weight_VD", "target_T", "support_TK")
    arguments = dict(zip(names, support_problem(), strict=True)) | change
    with pytest.raises(error, match=message):
        support_logprob(**arguments)
