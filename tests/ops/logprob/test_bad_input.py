"""Input that linear_logprob and linear_logprob_loss refuse, and the words of each error."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss, top_logprob
from tests.ops.logprob.problems import WAYS, each_fast_backend, ppo_clip

H, W, Y = torch.zeros(4, 8), torch.zeros(10, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((H.unsqueeze(0), W, Y), {}, ValueError, r"hidden_TD \(T, D\).*flatten"),
        ((H, torch.zeros(10, 7), Y), {}, ValueError, r"\(10, 7\)"),
        ((H, W[:0], Y), {}, ValueError, "no rows"),
        ((H, W, Y[:3]), {}, ValueError, r"target_T of shape \(4,\)"),
        ((H, W, Y.int()), {}, TypeError, "int64"),
        ((H, W.double(), Y), {}, TypeError, "weight_VD is float64 .*: pass hidden_TD in float64, or a float32 weight"),
        ((H, W.long(), Y), {}, TypeError, "must be float32, bfloat16 or float16, got torch.float32 and torch.int64"),
        ((H.int(), W.int(), Y), {}, TypeError, "int32"),
        ((H, W, Y), {"bias_V": torch.zeros(9)}, ValueError, r"bias_V of shape \(10,\)"),
        ((H, W, Y), {"temperature": 0.0}, ValueError, "temperature must be positive"),
        ((H, W, Y), {"temperature": torch.inf}, ValueError, "temperature must be positive"),
        ((H, W, Y), {"temperature": 1e-39}, ValueError, "temperature must be positive, from 1.2e-38 to 8.5e"),
        ((H, W, Y), {"temperature": None}, ValueError, "temperature must be a number, got None"),
        ((H, W, Y), {"temperature": torch.tensor(1.0)}, ValueError, r"got \(\); one for all is a float"),
        ((H, W, Y), {"temperature": torch.tensor([1, 1, 1, torch.inf])}, ValueError, "got inf in row 3"),
        ((H, W, Y), {"temperature": torch.tensor([1, 1e-40, 1, 1])}, ValueError, "positive.* in row 1"),
        ((H, W, Y), {"softcap": 1e-46}, ValueError, "softcap must be from 1.2e-38"),
        ((H, W, Y), {"softcap": "30"}, ValueError, "softcap must be a number, got '30'"),
        ((H, W, Y), {"logit_scale": None}, ValueError, "logit_scale must be a number, got None"),
        ((H, W, Y), {"logit_scale": torch.inf}, ValueError, "logit_scale must be finite, got inf"),
        ((H, W, Y), {"logit_scale": torch.nan}, ValueError, "logit_scale must be finite, got nan"),
        ((H, W, Y), {"ignore_index": None}, ValueError, "ignore_index must be an int, got None"),
        ((H, W, Y), {"workspace_mib": 2.0}, ValueError, "workspace_mib must be an int, got 2.0"),
        ((H, W, Y.numpy()), {}, TypeError, "target_T must be a torch.Tensor, got ndarray"),
        (
            (H, W, Y),
            {"vocab_group": "world"},
            TypeError,
            "vocab_group must be a torch.distributed.ProcessGroup or None",
        ),
        ((H.to_sparse(), W, Y), {}, TypeError, r"hidden_TD is a sparse_coo tensor, expected .*\.to_dense\(\)"),
        ((H, W.to_sparse_csr(), Y), {}, TypeError, "weight_VD is a sparse_csr tensor"),
        ((torch.nested.as_nested_tensor([H, H]), W, Y), {}, TypeError, "hidden_TD is a nested tensor"),
        ((H, W, Y), {"temperature": torch.ones(4).to_sparse()}, TypeError, "temperature is a sparse_coo tensor"),
        ((H, W, Y), {"bias_V": torch.zeros(10).to_sparse()}, TypeError, "bias_V is a sparse_coo tensor"),
        ((H, W, None), {}, TypeError, "target_T must be a torch.Tensor, got NoneType"),
        ((H, W, Y), {"active_index": [0, 1]}, TypeError, "active_index must be a torch.Tensor, got list"),
        ((H, W, Y), {"temperature": torch.ones(3)}, ValueError, "one value per token"),
        ((H, W, Y), {"temperature": torch.tensor([1.0, 1.0, 0.0, 1.0])}, ValueError, "positive.* got 0.0 in row 2"),
        ((H, W, Y), {"softcap": torch.inf}, ValueError, "softcap"),
        ((H, W, Y), {"bias_V": torch.zeros(10, dtype=torch.int64)}, TypeError, "bias_V must be floating point"),
        ((H[0], W, Y), {}, ValueError, r"got \(8,\)"),
        ((H, W, Y), {"active_index": torch.arange(4).int()}, TypeError, "int32"),
        ((H, W, Y), {"active_index": torch.arange(4)[None]}, ValueError, "one dimension"),
        ((H, W, Y), {"active_index": torch.arange(5)}, ValueError, "expected the 4 rows .*, got 5 rows"),
        ((H, W, Y), {"active_index": torch.arange(4).flip(0)}, ValueError, "ascending"),
        ((H, W, Y), {"active_index": torch.arange(4, device="meta")}, ValueError, "active_index is on meta"),
        ((H, W, Y), {"softcap": -1.0}, ValueError, "softcap"),
        ((H, W, Y), {"workspace_mib": 0}, ValueError, "workspace_mib"),
        ((H, W, Y), {"backend": "cuda"}, ValueError, "backend must be"),
        ((H, W.to("meta"), Y), {}, ValueError, "weight_VD is on meta"),
        (
            (H, W[:, :6], Y),
            {"adapter_VE": W[:, :3]},
            ValueError,
            "8 columns, expected the 6 of weight_VD .* 3 of adapter",
        ),
        ((H, W, Y), {"adapter_VE": W[:, :0]}, ValueError, "at least one column, got"),
        ((H, W[:, :6], Y), {"adapter_VE": W[:9, :2]}, ValueError, r"got \(4, 8\), \(10, 6\) and \(9, 2\)"),
        ((H, W[:, :6], Y), {"adapter_VE": W[0]}, ValueError, r"got \(4, 8\), \(10, 6\) and \(8,\)"),
        (
            (H, W[:, :6], Y),
            {"adapter_VE": W[:, :2].long()},
            TypeError,
            "must be floating point, got torch.int64 and torch.float32",
        ),
        ((H, W[:, :6], Y), {"adapter_VE": 2}, TypeError, "adapter_VE must be a torch.Tensor, got int"),
        (
            (H, torch.zeros(10, 6, requires_grad=True), Y),
            {"adapter_VE": W[:, :2]},
            ValueError,
            "goes with a frozen weight",
        ),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        linear_logprob(*arguments, **options)
    with pytest.raises(error, match=message):
        linear_logprob_loss(*arguments, lambda logprob, _: logprob, **options)


@pytest.mark.parametrize("loss", [lambda x, _: x.long(), lambda x, _: x > 0, lambda x, _: x + 1j])
@each_fast_backend
def test_a_loss_without_a_gradient_is_refused(loss, backend):
    with pytest.raises(TypeError, match="loss_fn must return floating-point losses, got torch"):
        linear_logprob_loss(H.clone().requires_grad_(), W, Y, loss, backend=backend)


def test_no_mean_of_logits_above_a_threshold():
    with pytest.raises(ValueError, match=r"return_mean_logits does not go with threshold_T.*leave one of them out"):
        linear_logprob(H, W, Y, threshold_T=torch.zeros(4), return_mean_logits=True)


@each_fast_backend
def test_rows_without_a_target_need_no_temperature(backend):
    hidden, weight, target, _ = make_inputs(4, 8, 30)
    target[2] = -100

    def results(temperature) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options: dict[str, Any] = {"temperature": temperature, "return_entropy": True, "backend": backend}
        out = linear_logprob(h, w, target, **options)
        fused = linear_logprob_loss(h, w, target, ppo_clip, torch.zeros(4), torch.ones(4), **options)
        return [out.logprob, *torch.autograd.grad(out.logprob.sum() + out.entropy.sum() + fused.loss, [h, w])]

    for actual, expected in zip(results(torch.tensor([1.0, 1.0, 0.0, 1.0])), results(1.0), strict=True):
        assert actual.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_temperatures_may_be_of_any_dtype(dtype):
    hidden, weight, target, _ = make_inputs(6, 8, 30)
    temperature = torch.tensor([1, 2, 3, 1, 2, 4])
    logprob = linear_logprob(hidden, weight, target, temperature=temperature.to(dtype)).logprob
    assert logprob.equal(linear_logprob(hidden, weight, target, temperature=temperature.float()).logprob)


@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_is_refused(way):
    hidden, weight, target, _ = make_inputs(4, 8, 30)
    with torch.autograd.forward_ad.dual_level():
        hidden = torch.autograd.forward_ad.make_dual(hidden, hidden)
        with pytest.raises(ValueError, match=r"\(4, 8\) input carries a tangent.*backend='reference'"):
            WAYS[way](hidden, weight, target)
        result = linear_logprob(hidden, weight, target, backend="reference")
        assert torch.autograd.forward_ad.unpack_dual(result.logprob).tangent.any()


@pytest.mark.parametrize("bad_target", [10, -1])
def test_target_outside_the_vocabulary(bad_target):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        linear_logprob(H, W, torch.tensor([0, 1, bad_target, 2]))


@pytest.mark.parametrize("way", ["no grad", *WAYS])
def test_target_outside_the_vocabulary_where_nobody_looks(way):
    """A compiled graph does not check targets, as on a GPU: the row is nan, and other rows are unchanged."""
    hidden, weight, target, _ = make_inputs(5, 8, 30)
    expected = linear_logprob(hidden, weight, target).logprob
    target[1], target[3] = 30, -1
    hidden.requires_grad_(way != "no grad"), weight.requires_grad_(way not in ("no grad", "frozen"))
    function = (lambda *x: linear_logprob_loss(*x, lambda logprob, _: logprob)) if way == "loss" else linear_logprob
    actual = torch.compile(function, backend="eager")(hidden, weight, target).logprob.detach()
    torch.testing.assert_close(actual[::2], expected[::2])
    assert actual[1::2].isnan().all()


@each_fast_backend
@pytest.mark.parametrize(
    ("loss", "got"), [(Tensor.sum, r"got \(\)"), (lambda _: 1.0, "got float"), (lambda x: (x, x), "got tuple")]
)
def test_bad_loss_function(loss, got, backend):
    with pytest.raises(ValueError, match=rf"one loss per token, a \(4,\) tensor; {got}"):
        linear_logprob_loss(H, W, Y, lambda logprob, _: loss(logprob), backend=backend)


@pytest.mark.parametrize("values", [None, [0.0] * 4])
def test_bad_values_per_token(values):
    with pytest.raises(TypeError, match=rf"per_token\[0\] must have 4 rows.*got {type(values).__name__}"):
        linear_logprob_loss(H, W, Y, lambda logprob, _, x: logprob, values)
    with pytest.raises(ValueError, match=r"per_token\[0\]"):
        linear_logprob_loss(H, W, Y, lambda logprob, _, x: logprob, torch.zeros(3))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(4, 2), TypeError, "ids_TK must hold int64 vocabulary ids, got torch.float32"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"expected ids_TK \(4, K\) on cpu like target_T, got \(4,\)"),
        (torch.full((4, 2), -1), ValueError, "ids_TK holds ids from -1 to -1, outside the vocabulary"),
    ],
)
def test_bad_ids(ids, error, message):
    with pytest.raises(error, match=message):
        linear_logprob_loss(H, W, Y, lambda logprob, _, of_ids: logprob, ids_TK=ids)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((H, W, Y, 0), {}, ValueError, "top_k is 0, expected at least 1 and at most"),
        (
            (H, W, Y, len(W) + 1),
            {},
            ValueError,
            f"at most the {len(W)} ids of the vocabulary",
        ),
        ((H, W, Y, 2), {"logit_scale": -1.0}, ValueError, "logit_scale is -1.0, expected a positive number"),
        ((H.double(), W.double(), Y, 2), {}, TypeError, "hidden_TD is float64, which no kernel takes"),
    ],
)
def test_bad_top_k(arguments, options, error, message):
    with pytest.raises(error, match=message):
        top_logprob(*arguments, **options)


def test_a_row_of_logits_must_fit_the_workspace():
    hidden, weight, target = torch.randn(2, 1), torch.randn(300_000, 1), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cannot hold one row.*at least 2"):
        linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob, workspace_mib=1)


# ---- the operators below the public face ----------------------------------------------------------------------------

R, C, D = 6, 40, 8


def operator_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments that fit, of the operators that write where they are told to."""
    logits, out = torch.randn(R, C), torch.empty(R, C)
    target, inv_temperature, bias = torch.zeros(R, dtype=torch.int64), torch.ones(R), torch.zeros(C)
    tile = (logits, target, 0, bias, inv_temperature, 0.0, 1.0)
    rows = [torch.zeros(R) for _ in range(8)]
    chunk = (torch.randn(R, D), torch.randn(C, D), torch.empty(R * C), 496, target, bias, inv_temperature, 0.0, 1.0)
    adapted = torch.randn(R, D + 2)
    gradients = (torch.empty(R, D), torch.empty(C, D), torch.empty(C), False)
    return {
        "logprob_stats_": (*tile, *rows[:5], torch.zeros(R, dtype=torch.float64)),
        "logprob_grad_": (*tile, *rows[:5], out),
        "logprob_frozen_": (*tile, *rows[:5], torch.zeros(R, D), out),
        "logprob_chunk_stats_": (*chunk, *rows[:4]),
        "logprob_chunk_stats_ of an adapter": (adapted, *chunk[1:], *rows[:4], None, torch.randn(C, 2)),
        "logprob_chunk_grad_": (*chunk, *rows[:5], *gradients),
    }


@pytest.mark.parametrize("name", operator_arguments())
def test_operators_refuse_tensors_of_another_size(name):
    """They would write behind a tensor that is too small."""
    operator, arguments = getattr(torch.ops.rlft_fast, name.split()[0]), operator_arguments()[name]
    operator(*arguments)
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            sizes = (x[:-1], x.unsqueeze(0))
            if name == "logprob_chunk_grad_":  # an adapter's gradient may have fewer columns, but some
                sizes += (x[..., :0],)
            dtypes = (x.long() if x.is_floating_point() else x.float(),)
            # A weight or an adapter, which may have any dtype.
            is_weight = name.startswith("logprob_chunk") and (i == 1 or (x.dim() == 2 and i == len(arguments) - 1))
            for wrong in sizes if is_weight else sizes + dtypes:
                with pytest.raises(RuntimeError, match="must"):
                    operator(*arguments[:i], wrong, *arguments[i + 1 :])
