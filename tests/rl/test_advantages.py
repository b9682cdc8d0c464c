import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.rl import gae, grpo_advantage, whiten
from tests.support.machine.memory import peak_allocated_bytes


def grpo_reference(rewards: list[float], groups: list[int], scale_by_std: bool, eps: float) -> list[float]:
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            advantages.append(0.0)
        else:
            scale = statistics.stdev(members) + eps if scale_by_std else 1.0
            advantages.append((reward - statistics.mean(members)) / scale)
    return advantages


def gae_reference(rewards, values, mask, cu_seqlens, gamma, lam) -> tuple[list[float], list[float]]:
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for start, end in itertools.pairwise(cu_seqlens):
        next_value = accumulator = 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                accumulator = delta + gamma * lam * accumulator
                next_value = values[t]
                advantages[t], returns[t] = accumulator, accumulator + values[t]
    return advantages, returns


def test_grpo_by_hand():
    # Groups interleaved, ids neither contiguous nor sorted. Group 7: mean 1, sample std 1. Group -3: mean 1/2, √(1/2).
    reward_B = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    group_B = torch.tensor([7, -3, 7, -3, 7])
    expected = torch.tensor([-1.0, math.sqrt(0.5), 0.0, -math.sqrt(0.5), 1.0], dtype=torch.float64)
    torch.testing.assert_close(grpo_advantage(reward_B, group_B, eps=0.0), expected)
    unscaled = torch.tensor([-1.0, 0.5, 0.0, -0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(grpo_advantage(reward_B, group_B, scale_by_std=False), unscaled)


@given(
    samples=st.lists(
        st.tuples(st.floats(-100, 100).map(lambda x: round(x, 3)), st.sampled_from([-5, 0, 3, 10**12])), max_size=20
    ),
    scale_by_std=st.booleans(),
)
def test_grpo_matches_loops(samples, scale_by_std):
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    reward_B = torch.tensor(rewards, dtype=torch.float64)
    result_B = grpo_advantage(reward_B, torch.tensor(groups, dtype=torch.int64), scale_by_std=scale_by_std)
    expected_B = torch.tensor(grpo_reference(rewards, groups, scale_by_std, 1e-6), dtype=torch.float64)
    torch.testing.assert_close(result_B, expected_B, rtol=1e-9, atol=1e-9)


# 0.1: the mean of three fp32 0.1 is not 0.1, and that error over eps would pass for a signal. 1e8: large and equal.
@pytest.mark.parametrize("reward", [0.0, 0.1, -0.3, 1e8])
# 1: a prompt sampled once, 3: a sum that rounds, 7: odd and larger.
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_grpo_equal_rewards_give_exact_zero(reward, size, scale_by_std):
    advantage_B = grpo_advantage(
        torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), scale_by_std=scale_by_std
    )
    assert torch.equal(advantage_B, torch.zeros(size))


def test_grpo_follows_a_permutation():
    generator = torch.Generator().manual_seed(1)
    reward_B, group_B = torch.rand(32, generator=generator), torch.randint(0, 5, (32,), generator=generator)
    order = torch.randperm(32, generator=generator)
    torch.testing.assert_close(
        grpo_advantage(reward_B[order], group_B[order]), grpo_advantage(reward_B, group_B)[order]
    )


def test_grpo_refuses_bad_input():
    with pytest.raises(ValueError, match=r"not finite for sequences \[1\]"):
        grpo_advantage(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"group_B has shape \(3,\), expected \(2,\)"):
        grpo_advantage(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"reward_B has dtype torch\.int64"):
        grpo_advantage(torch.tensor([0, 1]), torch.tensor([0, 0]))
    with pytest.raises(TypeError, match=r"group_B has dtype torch\.float32"):
        grpo_advantage(torch.zeros(2), torch.zeros(2))


def test_gae_by_hand():
    # gamma = lam = 1/2. Last response token: 1 - 2 = -1. First: 0 + 1/2 * 2 - 4 = -3, plus 1/4 * -1 = -3.25.
    # A tool's output stands between them; its reward and value are not read.
    nan = torch.nan
    result = gae(
        torch.tensor([nan, 0.0, nan, 1.0, nan], dtype=torch.float64),
        torch.tensor([nan, 4.0, nan, 2.0, nan], dtype=torch.float64),
        torch.tensor([False, True, False, True, False]),
        torch.tensor([0, 5], dtype=torch.int32),
        gamma=0.5,
        lam=0.5,
    )
    torch.testing.assert_close(result.advantage_T, torch.tensor([0, -3.25, 0, -1, 0], dtype=torch.float64))
    torch.testing.assert_close(result.return_T, torch.tensor([0, 0.75, 0, 1, 0], dtype=torch.float64))


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=6),
    # The ends are special cases: no look-ahead, one-step TD, Monte Carlo.
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_matches_loops(masks, gamma, lam, seed):
    cu_seqlens = torch.tensor([0, *map(len, masks)]).cumsum(0).int()
    mask_T = torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    reward_T, value_T = torch.randn(2, len(mask_T), generator=generator, dtype=torch.float64)
    result = gae(reward_T, value_T, mask_T, cu_seqlens, gamma=gamma, lam=lam)
    expected = gae_reference(reward_T.tolist(), value_T.tolist(), mask_T.tolist(), cu_seqlens.tolist(), gamma, lam)
    for got_T, expected_T in zip(result, expected, strict=True):
        torch.testing.assert_close(got_T, torch.tensor(expected_T, dtype=torch.float64))


def test_gae_of_a_sequence_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(2)
    reward_T, value_T = torch.randn(2, 12, generator=generator)
    mask_T = torch.tensor([False, True, True, True, True, True, False, True, True, True, True, False])
    together = gae(reward_T, value_T, mask_T, torch.tensor([0, 7, 12], dtype=torch.int32), gamma=0.9, lam=0.8)
    for part in (slice(0, 7), slice(7, 12)):
        cu_seqlens = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        alone = gae(reward_T[part], value_T[part], mask_T[part], cu_seqlens, gamma=0.9, lam=0.8)
        assert torch.equal(alone.advantage_T, together.advantage_T[part])
        assert torch.equal(alone.return_T, together.return_T[part])


def test_gae_takes_the_memory_of_the_tokens():
    lengths = torch.tensor([0, 5_000] + [20] * 2_000)
    cu_seqlens = lengths.cumsum(0).int()
    reward_T = torch.ones(45_000)
    mask_T = torch.ones(45_000, dtype=torch.bool)
    peak = peak_allocated_bytes(lambda: gae(reward_T, reward_T, mask_T, cu_seqlens, gamma=1.0, lam=1.0))
    assert peak < 7.5e6  # a matrix with a row for each step of the longest sequence takes 40e6


def test_gae_refuses_other_shapes():
    mask_T, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"value_T has shape \(2,\), expected \(3,\)"):
        gae(torch.zeros(3), torch.zeros(2), mask_T, cu_seqlens, gamma=1.0, lam=1.0)


def test_whiten_matches_moments():
    values_T = torch.tensor([3.0, torch.nan, 5.0, 10.0], dtype=torch.float64)
    result_T = whiten(values_T, torch.tensor([True, False, True, True]))
    std = math.sqrt((9 + 1 + 16) / 2)
    torch.testing.assert_close(result_T, torch.tensor([-3 / std, 0, -1 / std, 4 / std], dtype=torch.float64))


def test_whiten_twice_is_whiten_once():
    values_T = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 7 + 100
    mask_T = torch.arange(50) % 3 > 0
    once_T = whiten(values_T, mask_T)
    assert once_T[mask_T].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert once_T[mask_T].std().item() == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(whiten(once_T, mask_T), once_T)


# None, one, and eleven equal active values (0.1: their mean in fp64 is not 0.1): there is no spread to divide by.
@pytest.mark.parametrize("num_active", [0, 1, 11])
def test_whiten_without_spread_is_zero(num_active):
    values_T = torch.full((12,), 0.1, dtype=torch.float64)
    assert torch.equal(whiten(values_T, torch.arange(12) < num_active), torch.zeros_like(values_T))


def test_whiten_refuses_bad_input():
    with pytest.raises(TypeError, match=r"mask_T has dtype torch\.float32"):
        whiten(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"mask_T has shape \(3,\), expected \(2,\)"):
        whiten(torch.zeros(2), torch.ones(3, dtype=torch.bool))
