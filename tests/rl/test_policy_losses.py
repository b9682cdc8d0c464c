"""Every policy loss against numbers worked out by hand, with its gradient in the log-probability."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.ops.packing.pack import segment_expand, segment_mean
from rlft_fast.rl import POLICY_LOSSES, PolicyLoss, needs_of

LN2 = math.log(2)
SEQUENCES = torch.tensor([0, 2, 3], dtype=torch.int32)  # two tokens, then one


def sequence_mean(values_T: Tensor) -> Tensor:
    return segment_expand(segment_mean(values_T.detach(), SEQUENCES), SEQUENCES, num_tokens=3)


def loss_and_gradient(name: str, log_ratio: list[float], advantage: list[float], **more: Any):
    """Losses and gradients where π_old is exp(-3) everywhere."""
    old_logprob_T = torch.full((len(log_ratio),), -3.0, dtype=torch.float64)
    logprob_T = (old_logprob_T + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    tensors = {"logprob_T": logprob_T, "advantage_T": torch.tensor(advantage, dtype=torch.float64)}
    if name != "reinforce":
        tensors["old_logprob_T"] = old_logprob_T
    loss_T = POLICY_LOSSES[name](**tensors, **more)
    loss_T.sum().backward()
    return loss_T.tolist(), logprob_T.grad.tolist()


# Ratios 2 and 1/2 unless said otherwise; the expected columns are loss and gradient of one token.
@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "options", "loss", "gradient"),
    [
        ("ppo", 2.0, 1.0, {}, -1.2, 0.0),
        ("ppo", 2.0, 1.0, {"clip_high": 1.5}, -2.0, -2.0),
        ("ppo", 0.5, -3.0, {"clip_low": 0.3}, 2.1, 0.0),
        ("dual-clip", 4.0, -2.0, {}, 6.0, 0.0),  # ppo has 8
        ("dual-clip", 2.0, -2.0, {}, 4.0, 4.0),
        ("dual-clip", 4.0, 2.0, {}, -2.4, 0.0),
        ("two-sided", 5.0, -2.0, {}, 8.0, 0.0),
        ("two-sided", 5.0, -2.0, {"max_ratio": 6.0}, 10.0, 10.0),
        ("two-sided", 5.0, 2.0, {}, -2.4, 0.0),
        # -sg(clip(r))·A·log π: followed at the bound, not cut.
        ("cispo", 8.0, 1.0, {}, 5 * (3 - 3 * LN2), -5.0),
        ("cispo", 0.5, -1.0, {}, 0.5 * (-3 - LN2), 0.5),
        ("cispo", 0.5, -1.0, {"clip_low": 0.2}, 0.8 * (-3 - LN2), 0.8),
        # sigmoid(1)·4 and its slope 4·s·(1 - s)·r; on policy the slope is 1, as that of r.
        ("sapo", 2.0, 1.0, {}, -4 * 0.7310585786, -4 * 0.7310585786 * 0.2689414214 * 2),
        ("sapo", 1.0, 1.0, {}, -2.0, -1.0),
        ("sapo", 1.0, -1.0, {}, 2 / 1.05, 1.0),
        ("sapo", 1.0, -1.0, {"temperature_negative": 2.0}, 1.0, 1.0),
        # π_old = exp(-3) = 0.0498, π = 0.0996: apart by 0.0498.
        ("dppo-tv", 2.0, 1.0, {}, 2 * (3 - LN2), -2.0),
        ("dppo-tv", 2.0, 1.0, {"clip_high": 0.04}, 0.0, 0.0),
        ("dppo-tv", 2.0, -1.0, {"clip_high": 0.04}, -2 * (3 - LN2), 2.0),  # a bound of the other sign
        ("dppo-tv", 0.5, -1.0, {"clip_low": 0.02}, 0.0, 0.0),
        ("dppo-tv", 2.0, 1.0, {"max_ratio": 1.5}, 1.5 * (3 - LN2), -1.5),
        ("reinforce", 2.0, 3.0, {}, 3 * (3 - LN2), -3.0),
    ],
)
def test_by_hand(name, ratio, advantage, options, loss, gradient):
    losses, gradients = loss_and_gradient(name, [math.log(ratio)], [advantage], **options)
    assert losses == pytest.approx([loss])
    assert gradients == pytest.approx([gradient])


def test_gspo_by_hand():
    # Log-ratios 0.3 and 0.1: both tokens carry exp(0.2). The one alone is beyond its bound.
    losses, gradients = loss_and_gradient(
        "gspo", [0.3, 0.1, 0.5], [2.0, 2.0, 1.0], sequence_mean=sequence_mean, clip_low=0.3, clip_high=0.3
    )
    s = math.exp(0.2)
    assert losses == pytest.approx([-2 * s, -2 * s, -1.3])
    assert gradients == pytest.approx([-2 * s, -2 * s, 0.0])


def test_gspo_has_the_gradient_of_the_sequence_level_loss():
    """-min(s·A, clip(s)·A) with s differentiated through its mean, the mean of the tokens' losses being taken."""
    log_ratio = torch.tensor([0.3, 0.1], dtype=torch.float64, requires_grad=True)
    (-log_ratio.mean().exp() * 2.0).backward()
    _, gradients = loss_and_gradient(
        "gspo", [0.3, 0.1, 0.0], [2.0, 2.0, 0.0], sequence_mean=sequence_mean, clip_high=0.3
    )
    assert [g / 2 for g in gradients[:2]] == pytest.approx(log_ratio.grad.tolist())


def test_gmpo_by_hand():
    # A > 0: 1.0 is held at 0.4, -0.8 is followed; mean -0.2. A < 0: -1 is held at -0.4.
    losses, gradients = loss_and_gradient("gmpo", [1.0, -0.8, -1.0], [3.0, 3.0, -2.0], sequence_mean=sequence_mean)
    assert losses == pytest.approx([-3 * math.exp(-0.2), -3 * math.exp(-0.2), 2 * math.exp(-0.4)])
    assert gradients == pytest.approx([0.0, -3 * math.exp(-0.2), 0.0])


def test_covariance_losses_by_hand():
    selected_T = torch.tensor([1.0, 0.0, 1.0])
    log_ratio, advantage = [0.1, 0.1, -0.1], [1.0, 2.0, -1.0]
    r, q = math.exp(0.1), math.exp(-0.1)
    losses, gradients = loss_and_gradient("clip-cov", log_ratio, advantage, selected_T=selected_T)
    assert losses == pytest.approx([0.0, -2 * r, 0.0])
    assert gradients == pytest.approx([0.0, -2 * r, 0.0])
    losses, gradients = loss_and_gradient("kl-cov", log_ratio, advantage, selected_T=selected_T, penalty=0.5)
    assert losses == pytest.approx([-r + 0.05, -2 * r, q + 0.05])
    assert gradients == pytest.approx([-r + 0.5, -2 * r, q - 0.5])


# The first update starts where all are plain policy gradient: losses differ in what they do away from there.
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    more: dict[str, Any] = {"sequence_mean": sequence_mean} if name in ("gspo", "gmpo") else {}
    if name.endswith("-cov"):
        more = {"selected_T": torch.zeros(3)}
    advantage = [1.5, -0.5, 2.0]
    _, gradients = loss_and_gradient(name, [0.0, 0.0, 0.0], advantage, **more)
    assert gradients == pytest.approx([-a for a in advantage])


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"kl-cov"}))
def test_a_factor_on_the_advantage_is_one_on_the_loss(name):
    more: dict[str, Any] = {"sequence_mean": sequence_mean} if name in ("gspo", "gmpo") else {}
    if name.endswith("-cov"):
        more = {"selected_T": torch.tensor([0.0, 1.0, 0.0])}
    log_ratio, advantage, weight = [0.5, -0.6, 1.2], [1.5, -0.5, -2.0], [2.0, 0.5, 0.0]
    plain, plain_gradient = loss_and_gradient(name, log_ratio, advantage, **more)
    scaled, gradient = loss_and_gradient(
        name, log_ratio, [a * w for a, w in zip(advantage, weight, strict=True)], **more
    )
    assert scaled == pytest.approx([loss * w for loss, w in zip(plain, weight, strict=True)])
    assert gradient == pytest.approx([g * w for g, w in zip(plain_gradient, weight, strict=True)])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_that_needs_an_advantage_is_nothing_without_one(name):
    more: dict[str, Any] = {"sequence_mean": sequence_mean} if name in ("gspo", "gmpo") else {}
    if name.endswith("-cov"):
        more = {"selected_T": torch.tensor([0.0, 1.0, 0.0])}
    losses, gradients = loss_and_gradient(name, [0.5, -0.6, 1.2], [0.0, 0.0, 0.0], **more)
    is_nothing = not any(losses) and not any(gradients)
    assert PolicyLoss(loss=name).needs_advantage == is_nothing == (name != "kl-cov")


def test_a_wrapper_does_not_inherit_the_promise():
    @functools.wraps(POLICY_LOSSES["clip-cov"])
    def with_bonus(*args, logprob_T, **options):
        return POLICY_LOSSES["clip-cov"](*args, logprob_T=logprob_T, **options) - 0.1 * logprob_T

    assert needs_of(POLICY_LOSSES["clip-cov"]).advantage
    assert not needs_of(with_bonus).advantage
    assert needs_of(with_bonus).selection is not None


@pytest.mark.parametrize("term", [{"entropy_coef": 0.01}, {"kl_coef": 0.01}, {"every_token": True}, {"loss": "kl-cov"}])
def test_terms_that_read_every_token_need_no_advantage(term):
    assert not PolicyLoss(**term).needs_advantage


# Far from the policy that sampled, also in float32: one damaged token must not end a run.
@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_ratios_stay_finite(name, log_ratio, advantage):
    loss = PolicyLoss(loss=name)
    tensors = {
        "logprob_T": (logprob_T := torch.zeros(1, requires_grad=True)), "old_logprob_T": torch.tensor([-log_ratio]),
        "advantage_T": torch.tensor([advantage]), "loss_weight_T": torch.ones(1), "selected_T": torch.ones(1),
    }  # fmt: skip
    whole = {"sequence_mean": lambda x: x.detach()} if loss.needs_sequences else {}
    loss_T = loss.per_token(tensors, **whole)
    loss_T.sum().backward()
    assert loss_T.isfinite().all()
    assert logprob_T.grad.isfinite().all()


def sets_a_default(logprob_T, advantage_T):
    torch.set_default_dtype(torch.float64)
    return -advantage_T * logprob_T


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "pppo"}, "policy loss is 'pppo', expected one of ppo, dual-clip"),
        ({"loss": "sapo", "clip_low": 0.1}, "policy loss sapo has no option 'clip_low': it has temperature_positive"),
        ({"loss": "dual-clip", "options": {"max_rate": 3.0}}, "dual_clip has no option 'max_rate'"),
        ({"loss": "dual-clip", "options": {"max_ratio": 1.0}}, r"max_ratio is 1\.0, expected a number > 1"),
        ({"loss": "two-sided", "clip_high": 4.0}, r"max_ratio is 4\.0, expected more than 1 \+ clip_high"),
        ({"loss": "sapo", "options": {"temperature_negative": 0.0}}, r"temperature_negative is 0\.0"),
        ({"loss": "kl-cov", "options": {"penalty": -1.0}}, r"penalty is -1\.0"),
        ({"loss": lambda logprob_T, advantage_T: logprob_T.sum()}, r"returned shape \(\) for one token"),
        ({"loss": lambda logprob_T, advantage_T: 3}, "returned int, expected one number per token"),
        (
            {"loss": lambda logprob_T, advantage_T: advantage_T[1]},
            "lambda> raised IndexError: index 1 is out",
        ),
        ({"loss": sets_a_default}, "sets_a_default changes the process of the run: default dtype. It runs for every"),
        ({"aggregation": "constant"}, "divides by max_response_tokens, which is None"),
    ],
)
def test_unusable_losses_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**options)
    assert torch.get_default_dtype() == torch.float32


def test_a_function_of_your_own_reads_what_its_parameters_name():
    def own(logprob_T, entropy_T, value_T, advantage_T, *, power=1.0):
        return -((advantage_T - value_T) ** power) * logprob_T * entropy_T

    loss = PolicyLoss(loss=own, options={"power": 2.0})
    assert loss.fields == ("old_logprob_T", "advantage_T", "loss_weight_T", "value_T")
    values = {
        "logprob_T": -2.0, "entropy_T": 0.5, "old_logprob_T": -2.0, "advantage_T": 5.0, "loss_weight_T": 0.25,
        "value_T": 2.0,
    }  # fmt: skip
    fields = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
    assert loss.per_token(fields).item() == pytest.approx(0.25 * 9 * 2 * 0.5)
    assert loss.metrics(fields)["policy_loss"].item() == pytest.approx(0.25 * 9)
    for missing in ("value_T", "entropy_T", "loss_weight_T"):
        with pytest.raises(ValueError, match=f"the loss reads {missing}, which is not among its fields: logprob_T, "):
            loss.per_token({name: value for name, value in fields.items() if name != missing})


def test_the_clip_share_is_that_of_tokens_without_a_gradient():
    # dual-clip: the first is clipped above, the second not, the third by the second clip, the fourth has no advantage.
    logprob_T = torch.tensor([2.0, 1.1, 4.0, 2.0], dtype=torch.float64).log()
    advantage_T = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    weight_T = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    fields = {"old_logprob_T": torch.zeros_like(logprob_T), "advantage_T": advantage_T, "loss_weight_T": weight_T}
    metrics = PolicyLoss(loss="dual-clip").metrics({"logprob_T": logprob_T} | fields)
    shares = [metrics[f"clip_share{part}"].item() for part in ("", "_low", "_high")]
    assert shares == pytest.approx([0.4, 0.3, 0.1])
