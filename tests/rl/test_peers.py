"""Advantages, divergences, corrections and controllers beside the code of verl and OpenRLHF: make test-peers.

Where a number differs on purpose, the difference is what is tested.
"""

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.rewards import overlong_penalty
from rlft_fast.rl import (
    ADVANTAGES,
    AdaptiveKL,
    AdvantageReturn,
    ValueLoss,
    correction_weights,
    discounted_returns,
    gae,
    kl_estimate,
    loss_scale,
    loss_weights,
    mismatch_metrics,
    reward_with_kl,
)
from tests.rl.peers import AGGREGATIONS, MARKS, Rollout, import_openrlhf, value_and_gradient

pytestmark = MARKS
SEEDS = range(5)
GAMMA, LAM = 0.9, 0.8


def call(function: Callable, pool: dict[str, Any]) -> Any:
    """What the function returns for those of the arguments that it takes."""
    return function(**{name: value for name, value in pool.items() if name in inspect.signature(function).parameters})


class Fields:
    """What advantages are made of, by the names of both sides."""

    def __init__(self, rollout: Rollout) -> None:
        logprobs = torch.log_softmax(2 * rollout.normal(*rollout.mask.shape, 7), dim=-1)
        values, rewards = rollout.normal(), rollout.normal() * rollout.mask
        baselines = rollout.normal(len(rollout.mask))
        old, squares = logprobs[..., 0], logprobs.exp().square().sum(-1)
        pack, mask = rollout.pack, rollout.mask.double()
        outcomes = torch.zeros_like(mask)
        last = (mask * torch.arange(1, 1 + mask.shape[1])).argmax(1)
        outcomes[torch.arange(len(mask)), last] = rollout.reward
        common = {"gamma": GAMMA, "lam": LAM}
        self.ours = common | {
            "reward_T": pack(rewards), "value_T": pack(values), "loss_mask_T": rollout.mask_T,
            "cu_seqlens": rollout.cu_seqlens, "reward_B": rollout.reward, "group_B": rollout.group,
            "baseline_B": baselines, "old_logprob_T": pack(old), "sum_prob_squared_T": pack(squares),
        }  # fmt: skip
        self.verl = common | {
            "values": values, "response_mask": mask, "index": rollout.group.numpy(), "reward_baselines": baselines,
            "old_log_probs": old, "sum_pi_squared": squares, "config": SimpleNamespace(gamma=GAMMA),
        }  # fmt: skip
        self.rewards, self.outcomes = rewards, outcomes


def advantages(name: str, rollout: Rollout, fields: Fields) -> Tensor:
    result = call(ADVANTAGES[name], fields.ours)
    advantage = result.advantage_T if isinstance(result, AdvantageReturn) else result
    if len(advantage) == len(rollout.mask):
        return advantage[:, None] * rollout.mask
    return rollout.unpack(advantage)


def verl_advantages(name: str, fields: Fields, rewards: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    pool = fields.verl | {"token_level_rewards": rewards.clone()} | options
    return tuple(each * fields.verl["response_mask"] for each in call(get_adv_estimator_fn(name), pool))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("grpo", "grpo", {}),
        ("dr-grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}),
        ("rloo", "rloo_vectorized", {}),
        ("reinforce++-baseline", "reinforce_plus_plus_baseline", {}),
        ("opo", "opo", {}),
        ("gpg", "gpg", {}),  # equal rewards are 0 here, which is what verl counts
    ],
)
def test_advantages_from_outcomes_are_those_of_verl(name, theirs, options, seed):
    fields = Fields(rollout := Rollout(seed))
    expected, _ = verl_advantages(theirs, fields, fields.outcomes, **options)
    torch.testing.assert_close(advantages(name, rollout, fields), expected, rtol=1e-6, atol=1e-7)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs"), [("gae", "gae"), ("reinforce++", "reinforce_plus_plus"), ("remax", "remax")]
)
def test_advantages_from_token_rewards_are_those_of_verl(name, theirs, seed):
    fields = Fields(rollout := Rollout(seed))
    expected, returns = verl_advantages(theirs, fields, fields.rewards)
    torch.testing.assert_close(advantages(name, rollout, fields), expected, rtol=1e-6, atol=1e-7)
    if name == "gae":
        ours = rollout.unpack(call(ADVANTAGES["gae"], fields.ours).return_T)
        torch.testing.assert_close(ours, returns)


@pytest.mark.parametrize("seed", SEEDS)
# The first counts columns, the second response tokens, as here.
@pytest.mark.parametrize(("theirs", "holes"), [("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)])
def test_optimal_token_advantages_are_those_of_verl_where_there_is_a_baseline(theirs, holes, seed):
    """A token that no other sample reaches has no advantage here, and its whole return there."""
    fields = Fields(rollout := Rollout(seed, sizes=(3, 4, 1, 2), holes=holes))
    expected, returns = verl_advantages(theirs, fields, fields.rewards)
    step = rollout.mask.cumsum(1) - 1
    reaching = (rollout.mask.sum(1)[None, :, None] > step[:, None]) & (rollout.group[:, None] == rollout.group)[
        ..., None
    ]
    alone = rollout.mask & (reaching.sum(1) == 1)
    assert alone.any()
    torch.testing.assert_close(
        advantages("optimal-token", rollout, fields), expected.where(~alone, 0.0), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(expected[alone], returns[alone])


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "opo", "gpg"])
def test_a_group_of_one_teaches_nothing_here_and_its_bare_reward_in_verl(name):
    fields = Fields(rollout := Rollout(0, sizes=(3, 1)))
    alone = rollout.mask & (rollout.group == 1)[:, None]
    assert not advantages(name, rollout, fields)[alone].any()
    theirs, _ = verl_advantages(name.removeprefix("dr-"), fields, fields.outcomes)
    assert (theirs[alone].abs() > 1e-3).all()


def test_a_constant_on_all_rewards_changes_gpg_in_verl_alone():
    fields = Fields(rollout := Rollout(0))
    ours, theirs = advantages("gpg", rollout, fields), verl_advantages("gpg", fields, fields.outcomes)[0]
    fields.ours["reward_B"] = rollout.reward + 1
    torch.testing.assert_close(advantages("gpg", rollout, fields), ours)
    moved = fields.outcomes + torch.nn.functional.one_hot(torch.zeros(len(rollout.mask)).long(), rollout.mask.shape[1])
    assert (verl_advantages("gpg", fields, moved)[0] - theirs).abs().max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("grpo", "group_norm"),
        ("dr-grpo", "dr_grpo"),
        ("rloo", "rloo"),
        ("reinforce++-baseline", "reinforce_baseline"),
        ("reinforce++", "reinforce"),
        ("gae", "gae"),
    ],
)
def test_advantages_are_those_of_openrlhf(name, theirs, seed):
    """Without holes, see below."""
    maker = import_openrlhf("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    fields = Fields(rollout := Rollout(seed, sizes=(4, 4), holes=False))
    kl = rollout.normal()
    beta = 0.3 if name in ("reinforce++", "gae") else 0.0
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator=theirs, gamma=1.0, lambd=LAM, no_std_norm=False))
    settings = SimpleNamespace(
        algo=algo, rollout=SimpleNamespace(n_samples_per_prompt=4), reward=SimpleNamespace(clip_range=None)
    )
    order = rollout.group.argsort(stable=True)
    experience = SimpleNamespace(
        rewards=rollout.reward, index=order.argsort().tolist(), kl=kl, values=fields.verl["values"], info={},
        action_mask=rollout.mask, returns=None,
    )  # fmt: skip
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(args=settings), kl_ctl=SimpleNamespace(value=beta), advantage_estimator=theirs,
        get_cumulative_returns=lambda *args: maker.get_cumulative_returns(None, *args),
        get_advantages_and_returns=lambda *args: maker.get_advantages_and_returns(None, *args),
    )  # fmt: skip
    maker.compute_advantages_and_returns(trainer, [experience])

    fields.ours["reward_T"] = reward_with_kl(rollout.reward, rollout.pack(kl), rollout.mask_T, rollout.cu_seqlens, beta)
    fields.ours["gamma"] = 1.0
    expected = experience.advantages * rollout.mask
    if name in ("reinforce++-baseline", "reinforce++", "gae"):  # it whitens by the standard deviation with n, not n - 1
        expected = expected * math.sqrt(1 - 1 / rollout.mask.sum())
    torch.testing.assert_close(advantages(name, rollout, fields), expected, rtol=1e-5, atol=2e-6)
    if name == "gae":
        ours = rollout.unpack(call(gae, fields.ours).return_T)
        torch.testing.assert_close(ours, experience.returns * rollout.mask)


def test_a_masked_token_is_no_action_here_and_one_without_reward_in_openrlhf():
    maker = import_openrlhf("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    mask, reward, value = torch.tensor([[True, False, True], [0, 0, 1], [4, 0, 0]])
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    fields = {"loss_mask_T": mask.bool(), "cu_seqlens": cu_seqlens, "gamma": 0.5}
    assert discounted_returns(reward.double(), **fields).tolist() == [0.5, 0.0, 1.0]
    assert maker.get_cumulative_returns(None, reward[None].double(), mask[None], 0.5).tolist() == [[0.25, 0.5, 1.0]]
    assert gae(reward.double(), value.double(), **fields, lam=1.0).advantage_T.tolist() == [-3.5, 0.0, 1.0]
    theirs, _ = maker.get_advantages_and_returns(
        None, value[None].double(), reward[None].double(), mask[None], 0.5, 1.0
    )
    assert theirs.tolist() == [[-3.75, 0.5, 1.0]]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_divergences_are_those_of_verl_and_openrlhf(kind):
    from verl.trainer.ppo.core_algos import kl_penalty

    compute_approx_kl = import_openrlhf("models.utils").compute_approx_kl
    rollout = Rollout(0)
    logprob, ref = (x.float() for x in rollout.logprobs())
    ours = value_and_gradient(lambda x: kl_estimate(x, ref, kind), logprob)
    options = {"kl_estimator": kind.removesuffix("+"), "unbiased_gradient": kind == "k3+"}
    for theirs in (lambda x: kl_penalty(x, ref, kind), lambda x: compute_approx_kl(x, ref, **options)):
        torch.testing.assert_close(ours, value_and_gradient(theirs, logprob), rtol=1e-5, atol=1e-6)


def test_k3_goes_on_where_others_cut_it_off():
    """At 10, with its gradient."""
    from verl.trainer.ppo.core_algos import kl_penalty

    compute_approx_kl = import_openrlhf("models.utils").compute_approx_kl
    logprob, ref = torch.tensor([-6.0]), torch.tensor([-2.0])
    value, gradient = value_and_gradient(lambda x: kl_estimate(x, ref, "k3"), logprob)
    assert value.item() == pytest.approx(math.exp(4) - 5)
    assert gradient.item() == pytest.approx(1 - math.exp(4))
    for theirs in (lambda x: kl_penalty(x, ref, "k3"), lambda x: compute_approx_kl(x, ref, kl_estimator="k3")):
        assert [x.item() for x in value_and_gradient(theirs, logprob)] == [10.0, 0.0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_loss_is_that_of_verl_and_openrlhf(mode, seed):
    from verl.trainer.ppo.core_algos import compute_value_loss

    rollout, most = Rollout(seed), 20
    new, old, returns = (rollout.normal() for _ in range(3))
    loss = ValueLoss(clip=0.3, aggregation=mode, max_response_tokens=most)
    scale = loss_scale(rollout.mask_T, rollout.cu_seqlens, mode, most)
    weight_T = loss_weights(rollout.mask_T, rollout.cu_seqlens, mode).double() * scale
    fields = {"value_T": rollout.pack(old), "return_T": rollout.pack(returns), "loss_weight_T": weight_T}
    value, gradient = value_and_gradient(lambda x: loss.per_token({"new_value_T": rollout.pack(x)} | fields).sum(), new)
    options = {"cliprange_value": 0.3, "loss_agg_mode": AGGREGATIONS[mode], "loss_scale_factor": most}
    expected = value_and_gradient(lambda x: compute_value_loss(x, returns, old, rollout.mask, **options)[0], new)
    torch.testing.assert_close((value, gradient), expected, rtol=1e-6, atol=1e-7)
    if mode in ("token-mean", "sequence-mean"):
        theirs = import_openrlhf("models.loss").ValueLoss(0.3, token_level_loss=mode == "token-mean")
        expected = value_and_gradient(lambda x: theirs(x, old, returns, rollout.mask), new)
        torch.testing.assert_close((value, gradient), expected, rtol=1e-6, atol=1e-7)


# Of the last, some are beyond the clamp at 20, and so are sums over sequences.
@pytest.mark.parametrize("distance", [0.1, 1.0, 12.0])
@pytest.mark.parametrize(
    ("name", "bounds", "level", "threshold"),
    [
        ("token-truncate", {"high": 2.0}, "token", 2.0),
        ("token-mask", {"low": 0.5, "high": 5.0}, "token", "0.5_5"),
        ("sequence-truncate", {"high": 3.0}, "sequence", 3.0),
    ],
)
def test_corrections_are_those_of_verl(name, bounds, level, threshold, distance):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    rollout = Rollout(1)
    old, sampler = rollout.logprobs(distance)
    ours = correction_weights(
        name, rollout.pack(old), rollout.pack(sampler), rollout.mask_T, rollout.cu_seqlens, **bounds
    )
    theirs, _ = compute_rollout_correction_weights(old - sampler, rollout.mask.double(), level, threshold)
    torch.testing.assert_close(rollout.unpack(ours), theirs)


@pytest.mark.parametrize("distance", [0.01, 1.0, 30.0])
def test_sequences_that_verl_rejects_are_masked(distance):
    """Its bounds are on μ/π_old, the inverse of ours."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    rollout = Rollout(1)
    old, sampler = rollout.logprobs(distance)
    logprobs_T = rollout.pack(old), rollout.pack(sampler)
    bounds = {"low": 0.999, "high": 1.25}
    ours = correction_weights("sequence-mask", *logprobs_T, rollout.mask_T, rollout.cu_seqlens, **bounds)
    kept, _ = compute_rollout_rejection_mask(
        old - sampler, rollout.mask.double(), "seq_mean_k1", f"{1 / 1.25}_{1 / 0.999}"
    )
    torch.testing.assert_close(rollout.unpack(ours), (old - sampler).clamp(-20, 20).exp() * kept)


def test_mismatch_is_that_of_verl():
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights

    rollout = Rollout(2)
    old, sampler = rollout.logprobs()
    mask = rollout.mask.double()
    ours = mismatch_metrics(rollout.pack(old), rollout.pack(sampler), rollout.mask_T)
    theirs = compute_offpolicy_metrics(old, sampler, mask)
    _, more = compute_rollout_correction_weights(old - sampler, mask, "token", 1e9)
    assert ours["mismatch_k1"] == pytest.approx(theirs["kl"])
    assert ours["mismatch_k3"] == pytest.approx(theirs["k3_kl"])
    assert ours["effective_sample_share"] == pytest.approx(more["rollout_is_eff_sample_size"])


def test_the_controller_is_that_of_verl_and_openrlhf():
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    openrlhf = import_openrlhf("trainer.ppo_utils.kl_controller").AdaptiveKLController
    ours, theirs = AdaptiveKL(0.1, 0.05, 1000), [each(0.1, 0.05, 1000) for each in (AdaptiveKLController, openrlhf)]
    for kl in (0.055, 5.0, 0.0, 0.05, -1.0):
        ours.update(kl, 64)
        for each in theirs:
            each.update(kl, 64)
            assert ours.coef == pytest.approx(each.value)


def test_the_reward_with_its_divergence_is_that_of_openrlhf():
    rollout = Rollout(3)
    kl = rollout.normal()
    expected = import_openrlhf("models.utils").compute_reward(rollout.reward, 0.3, kl, rollout.mask)
    reward_T = reward_with_kl(rollout.reward, rollout.pack(kl), rollout.mask_T, rollout.cu_seqlens, 0.3)
    torch.testing.assert_close(rollout.unpack(reward_T), expected * rollout.mask)


def test_the_price_of_length_is_that_of_trl_and_openrlhf():
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(21))
    ours = [-overlong_penalty(length, 20, 8) for length in lengths]
    assert get_soft_overlong_punishment(20, 8)([[0] * length for length in lengths]) == ours
    experience = SimpleNamespace(response_length=torch.tensor(lengths), rewards=torch.zeros(21))
    import_openrlhf("trainer.ppo_utils.length_penalty").apply_overlong_penalty([experience], 20, 8)
    assert experience.rewards.tolist() == ours
