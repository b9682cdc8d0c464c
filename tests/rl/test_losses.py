import itertools
import math

import pytest
import torch
from torch import Tensor

from rlft_fast.rl import (
    PolicyLoss,
    ValueLoss,
    explained_variance,
    loss_weights,
)

LENGTHS = [5, 1, 7, 4, 3]
ALL_TERMS = PolicyLoss(clip_low=0.1, clip_high=0.3, entropy_coef=0.02, kl_coef=0.05)


def policy_batch(seed: int = 0) -> dict[str, Tensor]:
    """Five sequences in fp64, ratios on both sides of the clip, the second without response tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    logprob_T, noise_T, advantage_T, entropy_T, ref_noise_T, value_T, return_T = torch.randn(
        7, num_tokens, generator=generator, dtype=torch.float64
    )
    loss_mask_T = torch.rand(num_tokens, generator=generator) < 0.8
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    loss_mask_T[cu_seqlens[1:].long() - 1] = False
    return {
        "logprob_T": logprob_T - 3,
        "entropy_T": entropy_T.abs(),
        "old_logprob_T": logprob_T - 3 + 0.4 * noise_T,
        "ref_logprob_T": logprob_T - 3 + 0.4 * ref_noise_T,
        "advantage_T": advantage_T,
        "value_T": value_T,
        "return_T": return_T,
        "loss_mask_T": loss_mask_T,
        "cu_seqlens": cu_seqlens,
    }


def clipped_loss(log_ratio: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def weights(batch: dict[str, Tensor], mode: str) -> Tensor:
    return loss_weights(batch["loss_mask_T"], batch["cu_seqlens"], mode).double()


def named(logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor) -> dict[str, Tensor]:
    return {
        "logprob_T": logprob_T, "old_logprob_T": old_logprob_T, "advantage_T": advantage_T, "loss_weight_T": weight_T
    }  # fmt: skip


# Ratio 2 and 1/2 with bounds [0.8, 1.3]: followed where the advantage pulls back, held where it pulls further away.
@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (2.0, 1.0, -1.3, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.0, 3.0, -3.0, -3.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_hand(ratio, advantage, expected, gradient):
    logprob_T = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    old_logprob_T, advantage_T, weight_T = torch.tensor([[-1.0], [advantage], [1.0]], dtype=torch.float64)
    fields = named(logprob_T, old_logprob_T, advantage_T, weight_T)
    loss_T = PolicyLoss(clip_low=0.2, clip_high=0.3).per_token(fields)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(expected)
    assert logprob_T.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
def test_policy_loss_matches_a_loop_over_sequences(mode):
    batch = policy_batch()
    token_losses: list[list[float]] = []
    for start, end in itertools.pairwise(batch["cu_seqlens"].tolist()):
        losses = []
        for t in range(start, end):
            if batch["loss_mask_T"][t]:
                logprob, old, ref = (batch[f"{name}logprob_T"][t].item() for name in ("", "old_", "ref_"))
                x = ref - logprob
                loss = clipped_loss(logprob - old, batch["advantage_T"][t].item(), 0.1, 0.3)
                losses.append(loss - 0.02 * batch["entropy_T"][t].item() + 0.05 * (math.exp(x) - 1 - x))
        token_losses.append(losses)
    flat = [loss for losses in token_losses for loss in losses]
    means = [sum(losses) / len(losses) for losses in token_losses if losses]
    expected = sum(flat) / len(flat) if mode == "token-mean" else sum(means) / len(means)
    batch["loss_weight_T"] = weights(batch, mode)
    loss_T = ALL_TERMS.per_token(batch)
    assert loss_T.sum().item() == pytest.approx(expected, rel=1e-6)


def gradient_in_parts(loss, batch: dict[str, Tensor], parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
    """Gradient with respect to the model's output, one backward per micro-batch of whole sequences."""
    output = "new_value_T" if isinstance(loss, ValueLoss) else "logprob_T"
    leaf_T = (batch[output.removeprefix("new_")] + 0.3).requires_grad_()
    sums: dict[str, float] = {}
    for part in parts:
        index = torch.cat([torch.arange(*batch["cu_seqlens"][b : b + 2].tolist()) for b in part])
        fields = {name: batch[name][index] for name in ("entropy_T", *loss.fields)} | {output: leaf_T[index]}
        loss.per_token(fields).sum().backward()
        for name, value in loss.metrics(fields).items():
            combine = max if name.endswith("_max") else float.__add__
            sums[name] = combine(sums.get(name, 0.0), value.item())
    return leaf_T.grad, sums


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("loss", [ALL_TERMS, ValueLoss()], ids=["policy", "value"])
# One by one, uneven and out of order: a mean per micro-batch would weigh these differently.
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4]], [[4, 1], [2], [3, 0]]])
def test_gradient_and_metrics_do_not_depend_on_the_split(mode, loss, parts):
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, mode)
    whole, whole_metrics = gradient_in_parts(loss, batch, [[0, 1, 2, 3, 4]])
    split, split_metrics = gradient_in_parts(loss, batch, parts)
    assert whole.abs().max() > 0
    torch.testing.assert_close(split, whole)
    assert split_metrics == pytest.approx(whole_metrics)


def test_ratio_is_exactly_one_on_policy():
    logprob_T = torch.randn(100, generator=torch.Generator().manual_seed(4)) * 20
    advantage_T, weight_T = torch.full((100,), 0.3), torch.full((100,), 0.01)
    fields = named(logprob_T, logprob_T.clone(), advantage_T, weight_T)
    metrics = PolicyLoss().metrics(fields)
    assert metrics["ratio_max"].item() == 1.0
    assert metrics["approx_kl"].item() == 0.0
    assert metrics["clip_share"].item() == 0.0
    loss_T = PolicyLoss().per_token(fields)
    assert torch.equal(loss_T, -weight_T * advantage_T)


def test_on_policy_the_old_policy_is_the_new_one():
    """Loss, gradient and metrics as with its own log-probabilities for the old ones."""
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, "sequence-mean")
    terms = {"entropy_coef": 0.02, "kl_coef": 0.05, "kl_estimator": "unbiased"}
    gradient, metrics = gradient_in_parts(PolicyLoss(on_policy=True, **terms), batch, [[4, 1], [2], [3, 0]])
    batch["old_logprob_T"] = batch["logprob_T"] + 0.3  # which is where gradients are taken
    expected_gradient, expected = gradient_in_parts(PolicyLoss(**terms), batch, [[4, 1], [2], [3, 0]])
    assert torch.equal(gradient, expected_gradient)
    assert metrics == expected


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_tokens_of_weight_zero_contribute_nothing(garbage):
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, "token-mean")
    clean = gradient_in_parts(ALL_TERMS, batch, [[0, 1, 2, 3, 4]])
    clean_value = gradient_in_parts(ValueLoss(), batch, [[0, 1, 2, 3, 4]])
    for name in ("logprob_T", "entropy_T", "old_logprob_T", "ref_logprob_T", "advantage_T", "value_T", "return_T"):
        batch[name][~batch["loss_mask_T"]] = garbage
    dirty = gradient_in_parts(ALL_TERMS, batch, [[0, 1, 2, 3, 4]])
    dirty_value = gradient_in_parts(ValueLoss(), batch, [[0, 1, 2, 3, 4]])
    for (gradient, metrics), (expected, expected_metrics) in [(dirty, clean), (dirty_value, clean_value)]:
        assert torch.equal(gradient, expected)
        assert torch.equal(gradient[~batch["loss_mask_T"]], torch.zeros_like(gradient[~batch["loss_mask_T"]]))
        assert metrics == expected_metrics


# A damaged log-probability on either side, at an active token: the sum must not overflow.
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_ratio_stays_finite_in_fp32(log_ratio, advantage):
    logprob_T = torch.zeros(1, requires_grad=True)
    fields = named(logprob_T, torch.tensor([-log_ratio]), torch.tensor([advantage]), torch.ones(1))
    loss_T = PolicyLoss().per_token(fields)
    loss_T.sum().backward()
    assert loss_T.isfinite().all()
    assert logprob_T.grad.isfinite().all()


def test_policy_metrics_by_hand():
    # Ratios 2, 1/2, 2, 1/2, 1: the first and fourth lose their gradient to the clip.
    ratio_T = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.0], dtype=torch.float64)
    old_logprob_T = torch.full_like(ratio_T, -2.0)
    advantage_T = torch.tensor([1.0, 1.0, -1.0, -3.0, 5.0], dtype=torch.float64)
    weight_T = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    entropy_T, ref_logprob_T = torch.arange(5.0).double(), old_logprob_T + ratio_T.log() - 1.0
    fields = named(old_logprob_T + ratio_T.log(), old_logprob_T, advantage_T, weight_T)
    fields |= {"entropy_T": entropy_T, "ref_logprob_T": ref_logprob_T}
    metrics = PolicyLoss(kl_coef=0.1, kl_estimator="k1").metrics(fields)
    ln2 = math.log(2)
    expected = {
        "policy_loss": 0.1 * -1.2 + 0.2 * -0.5 + 0.3 * 2.0 + 0.15 * 2.4 + 0.25 * -5.0,
        "clip_share": 0.1 + 0.15,
        "clip_share_low": 0.15,
        "clip_share_high": 0.1,
        "approx_kl": (0.1 + 0.3) * (1 - ln2) + (0.2 + 0.15) * (ln2 - 0.5),
        "entropy": 0.2 * 1 + 0.3 * 2 + 0.15 * 3 + 0.25 * 4,
        "ref_kl": 1.0,
        "ratio_max": 2.0,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)
    assert all(value.dim() == 0 for value in metrics.values())


def test_ratio_max_is_over_active_tokens():
    # Both active ratios are below 1, the ratio of what a zeroed token would show.
    logprob_T, weight_T = torch.tensor([0.5, 0.25, 3.0]).log(), torch.tensor([0.5, 0.5, 0.0])
    metrics = PolicyLoss().metrics(named(logprob_T, torch.zeros(3), torch.ones(3), weight_T))
    assert metrics["ratio_max"].item() == pytest.approx(0.5)


def test_metrics_have_no_gradient_and_no_optional_keys():
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, "token-mean")
    batch["logprob_T"].requires_grad_()
    metrics = PolicyLoss().metrics({name: batch[name] for name in ("logprob_T", *PolicyLoss().fields)})
    assert not any(value.requires_grad for value in metrics.values())
    assert {"entropy", "ref_kl"}.isdisjoint(metrics)


@pytest.mark.parametrize("loss", [ALL_TERMS, ValueLoss()], ids=["policy", "value"])
def test_empty_micro_batch(loss):
    empty = torch.zeros(0, requires_grad=True)
    fields = dict.fromkeys(("logprob_T", "entropy_T", "new_value_T", *loss.fields), empty)
    loss.per_token(fields).sum().backward()
    assert torch.equal(empty.grad, torch.zeros(0))
    assert all(value.item() == 0.0 for value in loss.metrics(fields).values())


# Every option, away from its default: an option that nothing reads would leave the loss as it was.
@pytest.mark.parametrize(
    "option",
    [
        {"clip_low": 0.05},
        {"clip_high": 0.05},
        {"entropy_coef": 0.1},
        {"kl_coef": 0.1},
        {"aggregation": "sequence-mean"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_every_policy_option_changes_the_loss(option):
    totals = []
    for loss in (PolicyLoss(), PolicyLoss(**option)):
        batch = policy_batch()
        batch["loss_weight_T"] = weights(batch, loss.aggregation)
        totals.append(loss.per_token(batch).sum().item())
    assert totals[0] != pytest.approx(totals[1], rel=1e-6)


def test_clip_share_of_a_loss_that_drops_no_gradient():
    """Ratios 8, 1/2, 8, 1/2, 8 under bounds 0.8 and 5; the last token has no advantage."""
    ratio_T, advantage_T = torch.tensor([8.0, 0.5, 8.0, 0.5, 8.0]), torch.tensor([1.0, 1.0, -1.0, -3.0, 0.0])
    weight_T = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    metrics = PolicyLoss(loss="cispo", clip_low=0.2).metrics(named(ratio_T.log(), 0 * ratio_T, advantage_T, weight_T))
    shares = [metrics[name].item() for name in ("clip_share", "clip_share_low", "clip_share_high")]
    assert shares == pytest.approx([0.75, 0.45, 0.3])
    metrics = PolicyLoss(loss="cispo").metrics(named(ratio_T.log(), 0 * ratio_T, advantage_T, weight_T))
    assert metrics["clip_share"].item() == pytest.approx(0.4)


def test_every_kl_estimator_gives_another_loss():
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, "token-mean")
    losses = [PolicyLoss(kl_coef=1.0, kl_estimator=kind) for kind in ("k1", "k2", "k3", "unbiased")]
    totals = {round(loss.per_token(batch).sum().item(), 9) for loss in losses}
    assert len(totals) == 4


def test_fields_name_the_reference_only_when_it_is_used():
    assert PolicyLoss().fields == ("old_logprob_T", "advantage_T", "loss_weight_T")
    assert ALL_TERMS.fields == ("old_logprob_T", "advantage_T", "loss_weight_T", "ref_logprob_T")
    assert PolicyLoss(on_policy=True).fields == ("advantage_T", "loss_weight_T")


# Old value 1, clip 1/2, return 0. Moved to 2: held at 1.5, the larger error is the unclipped 2. Moved to 0.2: held at
# 0.5, which is the larger error and stops the gradient. Moved to 1.2: within the clip.
@pytest.mark.parametrize(
    ("new_value", "expected", "gradient", "clip_share"), [(2.0, 2.0, 2.0, 0), (0.2, 0.125, 0.0, 1), (1.2, 0.72, 1.2, 0)]
)
def test_value_loss_by_hand(new_value, expected, gradient, clip_share):
    new_value_T = torch.tensor([new_value], dtype=torch.float64, requires_grad=True)
    value_T, return_T, weight_T = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    fields = {"new_value_T": new_value_T, "value_T": value_T, "return_T": return_T, "loss_weight_T": weight_T}
    loss = ValueLoss(clip=0.5)
    loss_T = loss.per_token(fields)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(expected)
    assert new_value_T.grad.item() == pytest.approx(gradient)
    metrics = loss.metrics(fields)
    assert metrics["value_loss"].item() == pytest.approx(expected)
    assert metrics["value_clip_share"].item() == clip_share


def test_value_loss_with_infinite_clip_is_half_the_squared_error():
    new_value_T, value_T, return_T = torch.randn(3, 20, generator=torch.Generator().manual_seed(5)) * 10
    loss_T = ValueLoss(clip=torch.inf).per_token(
        {"new_value_T": new_value_T, "value_T": value_T, "return_T": return_T, "loss_weight_T": torch.ones(20)}
    )
    torch.testing.assert_close(loss_T, 0.5 * (new_value_T - return_T) ** 2)


def test_explained_variance():
    batch = policy_batch()
    batch["loss_weight_T"] = weights(batch, "token-mean")
    active_T = batch["loss_mask_T"]
    value_T, return_T = batch["value_T"], batch["return_T"]
    expected = 1 - (return_T - value_T)[active_T].var() / return_T[active_T].var()
    result = explained_variance(ValueLoss().metrics({"new_value_T": value_T} | batch))
    assert result.item() == pytest.approx(expected.item(), rel=1e-5)
    for constant in (1.0, 0.3):  # the float32 moments of the second leave a variance of 1e-8
        constant_T = torch.full((7,), constant)
        fields = dict.fromkeys(("new_value_T", "value_T"), torch.zeros(7)) | {"return_T": constant_T}
        metrics = ValueLoss().metrics(fields | {"loss_weight_T": torch.full((7,), 1 / 7)})
        assert explained_variance(metrics).isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_low": math.nan}, "clip_low is nan"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"entropy_coef": -1.0}, "entropy_coef is -1.0"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"kl_estimator": "k4"}, "KL estimator is 'k4'"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
    ],
)
def test_bad_policy_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**options)


def test_bad_value_options_are_refused():
    with pytest.raises(ValueError, match=r"clip is 0\.0"):
        ValueLoss(clip=0.0)
    with pytest.raises(ValueError, match="aggregation is 'mean'"):
        ValueLoss(aggregation="mean")


def test_missing_and_misshapen_tensors_are_refused():
    fields = dict.fromkeys(("logprob_T", *PolicyLoss().fields, "new_value_T", *ValueLoss().fields), torch.ones(3))
    with pytest.raises(ValueError, match="the loss reads entropy_T, which is not among its fields: logprob_T, "):
        PolicyLoss(entropy_coef=0.1).per_token(fields)
    with pytest.raises(ValueError, match="the loss reads ref_logprob_T, which is not among its fields"):
        PolicyLoss(kl_coef=0.1).per_token(fields)
    with pytest.raises(ValueError, match=r"advantage_T has shape \(3, 1\), expected \(3,\)"):
        PolicyLoss().per_token(fields | {"advantage_T": torch.ones(3, 1)})
    with pytest.raises(ValueError, match=r"return_T has shape \(1,\), expected \(3,\)"):
        ValueLoss().per_token(fields | {"return_T": torch.ones(1)})
