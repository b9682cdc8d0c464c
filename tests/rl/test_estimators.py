"""Every advantage estimator against numbers worked out by hand, and the way from a batch to one of them."""

import math

import pytest
import torch
from torch import Tensor

from rlft_fast.data import Batch
from rlft_fast.rl import ADVANTAGES, AdvantageError, AdvantageReturn, compute_advantages, discounted_returns

# Prompt 1 has rewards 3, 0, 0 with 1, 2 and 3 response tokens, prompt 0 has 1 and 1 with 1 and 2; interleaved.
LENGTHS, GROUPS, REWARDS = [1, 1, 2, 2, 3], [1, 0, 1, 0, 1], [3.0, 1.0, 0.0, 1.0, 0.0]


def make_batch(**fields: Tensor) -> Batch:
    batch = Batch.from_samples([[7]] * 5, [[8] * n for n in LENGTHS], rewards=REWARDS, groups=GROUPS)
    reward_T = torch.zeros(batch.num_tokens)
    last = torch.tensor([0, 2, 5, 8, 12])  # position of the last action of each sequence
    reward_T[last] = torch.tensor(REWARDS)
    return batch.replace(reward_T=reward_T, **fields)


def per_sequence(values: list[float]) -> list[float]:
    """At every response token, with the zero of each sequence's end."""
    return [x for value, n in zip(values, LENGTHS, strict=True) for x in [value] * n + [0.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [2 / math.sqrt(3), 0, -1 / math.sqrt(3), 0, -1 / math.sqrt(3)]),
        ("dr-grpo", [2, 0, -1, 0, -1]),
        ("rloo", [3, 0, -1.5, 0, -1.5]),
        ("opo", [2.5, 0, -0.5, 0, -0.5]),  # baseline (1·3 + 2·0 + 3·0) / 6
        ("gpg", [10 / 3, 0, -5 / 3, 0, -5 / 3]),  # 3 of 5 sequences have a signal
    ],
)
def test_group_estimators_by_hand(name, expected):
    advantage_T = compute_advantages(make_batch(), ADVANTAGES[name]).advantage_T
    assert advantage_T.tolist() == pytest.approx(per_sequence(expected), abs=1e-5)


def white(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / std for v in values]


def test_reinforce_plus_plus_baseline_by_hand():
    batch = make_batch()
    advantage_T = compute_advantages(batch, ADVANTAGES["reinforce++-baseline"]).advantage_T
    assert advantage_T[batch.loss_mask_T].tolist() == pytest.approx(white([2, 0, -1, -1, 0, 0, -1, -1, -1]), abs=1e-5)
    assert not advantage_T[~batch.loss_mask_T].any()


def test_reinforce_plus_plus_by_hand():
    batch = make_batch()
    batch = batch.replace(reward_T=batch.reward_T - 0.5 * batch.loss_mask_T)  # a penalty at each token
    returns = [2.5, 0.5, -0.75, -0.5, -0.25, 0.5, -0.875, -0.75, -0.5]
    return_T = discounted_returns(batch.reward_T, batch.loss_mask_T, batch.cu_seqlens, gamma=0.5)
    assert return_T[batch.loss_mask_T].tolist() == pytest.approx(returns)
    advantage_T = compute_advantages(batch, ADVANTAGES["reinforce++"], gamma=0.5).advantage_T
    assert advantage_T[batch.loss_mask_T].tolist() == pytest.approx(white(returns), abs=1e-5)


def test_remax_by_hand():
    batch = make_batch(baseline_B=torch.tensor([0.5, 1.0, 0.5, 1.0, 0.5]))
    advantage_T = compute_advantages(batch, ADVANTAGES["remax"]).advantage_T
    assert advantage_T.tolist() == pytest.approx(per_sequence([2.5, 0, -0.5, 0, -0.5]))


def test_optimal_token_by_hand():
    # Squared norms 1 - 2π + Σπ²: with π = 1/2 and Σπ² = 1/4 it is 1/4, with π = 1/4 and Σπ² = 1/2 it is 1.
    half, quarter = (math.log(0.5), 0.25), (math.log(0.25), 0.5)
    tokens = [[half], [half], [quarter, half], [half, half], [quarter, half, half]]
    logprob_T, squared_T = (
        torch.tensor([x for rows in tokens for x in [*(row[i] for row in rows), 9.0]]) for i in (0, 1)
    )
    batch = make_batch(old_logprob_T=logprob_T, sum_prob_squared_T=squared_T)
    advantage_T = compute_advantages(batch, ADVANTAGES["optimal-token"]).advantage_T
    # First tokens of prompt 1: weights 1/4, 1, 1 and returns 3, 0, 0. Later ones have returns of 0 alone.
    baseline = 0.75 / 2.25
    expected = [3 - baseline, 0, -baseline, 0, 0, 0, -baseline, 0, 0]
    assert advantage_T[batch.loss_mask_T].tolist() == pytest.approx(expected, abs=1e-6)
    assert not advantage_T[~batch.loss_mask_T].any()


def test_optimal_token_weights_add_up_along_the_prefix():
    batch = Batch.from_samples([[7]] * 2, [[8, 8]] * 2, groups=[0, 0])
    reward_T = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # returns (1, 1) and (0, 0)
    # Squared norms (1/4, 1) and (1, 1/4): prefixes (1/4, 5/4) and (1, 5/4).
    logprob_T = torch.tensor([0.5, 0.25, 1, 0.25, 0.5, 1]).log()
    squared_T = torch.tensor([0.25, 0.5, 0, 0.5, 0.25, 0])
    batch = batch.replace(reward_T=reward_T, old_logprob_T=logprob_T, sum_prob_squared_T=squared_T)
    advantage_T = compute_advantages(batch, ADVANTAGES["optimal-token"]).advantage_T
    assert advantage_T.tolist() == pytest.approx([0.8, 0.5, 0, -0.2, -0.5, 0], abs=1e-6)


# A group of one, and equal rewards of a value whose mean rounds: no signal, and no noise in its place.
@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "none"])  # which reads no rewards
def test_a_constant_beside_all_rewards_changes_nothing(name):
    """Every estimator subtracts a mean or a baseline. Near 1e9 the numbers of float32 are 64 apart."""

    def advantages(constant: float) -> Tensor:
        batch = Batch.from_samples(
            [[7]] * 6, [[8]] * 6, rewards=[constant + x for x in (3, 0, 1, 5, 6, 5)], groups=[0, 1] * 3
        )
        rewards = batch.loss_mask_T.double().masked_scatter(batch.loss_mask_T, batch.reward_B)
        batch = batch.replace(
            reward_T=rewards, baseline_B=torch.full((6,), constant, dtype=torch.float64),
            value_T=torch.zeros(12), old_logprob_T=torch.full((12,), -1.0), sum_prob_squared_T=torch.full((12,), 0.5),
        )  # fmt: skip
        return compute_advantages(batch, ADVANTAGES[name]).advantage_T

    assert advantages(0.0).abs().max() > 0.5
    torch.testing.assert_close(advantages(1e9), advantages(0.0), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "opo", "gpg", "reinforce++-baseline", "optimal-token"])
@pytest.mark.parametrize("groups", [[0, 1, 2], [0, 0, 0]])
def test_without_a_signal_the_advantage_is_exactly_zero(name, groups):
    batch = Batch.from_samples([[7]] * 3, [[8], [8, 8], [8, 8, 8]], rewards=[0.1] * 3, groups=groups)
    reward_T = torch.zeros(batch.num_tokens)
    reward_T[[0, 3, 7]] = 0.1
    logprob_T, squared_T = torch.linspace(-2, -1, batch.num_tokens), torch.full((batch.num_tokens,), 0.3)
    batch = batch.replace(reward_T=reward_T, old_logprob_T=logprob_T, sum_prob_squared_T=squared_T)
    assert not compute_advantages(batch, ADVANTAGES[name]).advantage_T.any()


def test_a_function_of_ones_own_need_not_think_of_no_sequences():
    """A step in which all groups are equal and left out."""
    empty = make_batch().select([])
    result = compute_advantages(empty, lambda reward_B, group_B: reward_B - reward_B.max() * group_B.max())
    assert result.advantage_T.shape == result.return_T.shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_sequences_does_not_matter(name):
    generator = torch.Generator().manual_seed(0)
    tokens = {
        name: torch.randn(14, generator=generator)
        for name in ("value_T", "old_logprob_T", "sum_prob_squared_T")
    }  # fmt: skip
    batch = make_batch(baseline_B=torch.tensor([0.5, 1.0, 0.5, 1.0, 0.5]), **{k: -v.abs() for k, v in tokens.items()})
    batch = batch.replace(sum_prob_squared_T=batch.sum_prob_squared_T.exp())
    order = [3, 0, 4, 2, 1]
    straight = compute_advantages(batch, ADVANTAGES[name], gamma=0.9, lam=0.8).select(order)
    shuffled = compute_advantages(batch.select(order), ADVANTAGES[name], gamma=0.9, lam=0.8)
    torch.testing.assert_close(shuffled.advantage_T, straight.advantage_T)


def test_an_estimator_of_your_own():
    def per_token(reward_T: Tensor, loss_mask_T: Tensor, *, gamma: float, threshold: float = 0.5) -> Tensor:
        return torch.where(loss_mask_T, gamma * (reward_T > threshold), torch.nan)  # outside the mask nothing is read

    def with_returns(reward_B: Tensor, reward_T: Tensor) -> AdvantageReturn:
        return AdvantageReturn(2 * reward_B, reward_T)

    batch = compute_advantages(make_batch(), per_token, gamma=0.25)
    assert batch.advantage_T.tolist() == [0.25, 0, 0.25, 0, 0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0]
    batch = compute_advantages(make_batch(), with_returns)
    assert batch.advantage_T.tolist() == per_sequence([6, 2, 0, 2, 0])
    assert torch.equal(batch.return_T, make_batch().reward_T)


def returning(value):
    def own(reward_B):
        return value

    return own


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (ADVANTAGES["remax"], "remax_advantage reads baseline_B, which this batch does not have"),
        (returning(torch.zeros(3)), r"own returned \(3,\), expected one per token \(14,\) or sequence \(5,\)"),
        (returning([1.0]), "own returned list, expected"),
        (returning(torch.full((5,), torch.nan)), "own returned numbers that are not finite"),
    ],
)
def test_unusable_estimators_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(make_batch(), function)


def test_an_advantage_of_ones_own_that_exits_is_named_and_changes_nothing():
    def leaves(reward_B):
        torch.set_grad_enabled(False)
        raise SystemExit(3)

    message = "advantage .*leaves changes the process of the run: gradient mode"
    with pytest.warns(UserWarning, match=message), pytest.raises(AdvantageError, match="leaves raised SystemExit: 3"):
        compute_advantages(make_batch(), leaves)
    assert torch.is_grad_enabled()
