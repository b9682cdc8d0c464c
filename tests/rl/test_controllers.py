import math

import pytest
import torch

from rlft_fast.rl import AdaptiveEntropy, AdaptiveKL, RunningReward


def test_adaptive_kl_by_hand():
    controller = AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
    controller.update(kl=0.055, num_sequences=100)  # a tenth too much, for a tenth of the horizon
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(kl=5.0, num_sequences=1000)  # at most a fifth
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2)
    controller.update(kl=0.0, num_sequences=500)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2 * 0.9)
    for kl in (0.05, math.nan):  # of a step that is left out
        controller.update(kl=kl, num_sequences=1000)
        assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2 * 0.9)


def test_adaptive_kl_stays_positive_where_a_step_has_many_horizons():
    controller = AdaptiveKL(coef=0.1, target=0.05, horizon=50)
    controller.update(kl=0.0, num_sequences=512)
    assert controller.coef == pytest.approx(0.08)


def test_adaptive_entropy_by_hand():
    controller = AdaptiveEntropy(coef=0.01, target=0.5, step=0.005)
    coefficients = []
    for entropy in (0.4, math.nan, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6, 0.4):
        controller.update(entropy)
        coefficients.append(controller.coef)
    # Grows below the target; above it falls unseen, to 0 and no further. A step that is left out has no entropy.
    assert coefficients == pytest.approx([0.015, 0.015, 0.02, 0, 0, 0, 0, 0, 0.005])


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_moments_are_those_of_all_rewards_at_once(offset):
    reward_B = offset + torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    running = RunningReward()
    for part in reward_B.split([1, 0, 7, 300, 692]):
        running.update(part)
    assert running.count == 1000
    assert running.mean == pytest.approx(reward_B.mean().item(), rel=1e-14, abs=1e-15)
    # Rounding of the rewards' own size, 2^-53 of it, in each of 1000 differences.
    assert running.std == pytest.approx(reward_B.std(correction=0).item(), abs=1e-12 + 2**-53 * offset)


def test_equal_rewards_have_no_deviation():
    running = RunningReward()
    assert running.std == 0
    for _ in range(100):
        running.update(torch.full((7,), 0.1, dtype=torch.float64))
    assert (running.count, running.std) == (700, 0)
    assert running.mean == pytest.approx(0.1)
