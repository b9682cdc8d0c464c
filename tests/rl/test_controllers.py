import pytest

from rlft_fast.rl import AdaptiveEntropy, AdaptiveKL


def test_adaptive_kl_by_hand():
    controller = AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
    controller.update(kl=0.055, num_sequences=100)  # a tenth too much, for a tenth of the horizon
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(kl=5.0, num_sequences=1000)  # at most a fifth
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2)
    controller.update(kl=0.0, num_sequences=500)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2 * 0.9)
    controller.update(kl=0.05, num_sequences=1000)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.2 * 0.9)


def test_adaptive_kl_stays_positive_where_a_step_has_many_horizons():
    controller = AdaptiveKL(coef=0.1, target=0.05, horizon=50)
    controller.update(kl=0.0, num_sequences=512)
    assert controller.coef == pytest.approx(0.08)


def test_adaptive_entropy_by_hand():
    controller = AdaptiveEntropy(coef=0.01, target=0.5, step=0.005)
    coefficients = []
    for entropy in (0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6, 0.4):
        controller.update(entropy)
        coefficients.append(controller.coef)
    # Grows below the target; above it falls unseen, to 0 and no further.
    assert coefficients == pytest.approx([0.015, 0.02, 0, 0, 0, 0, 0, 0.005])
