import math

import numpy as np
import pytest
import torch

from rlft_fast.rl import CORRECTIONS, correction_weights, mismatch_metrics
from tests.support.machine.memory import peak_allocated_bytes

# Two sequences: ratios π_old/μ of 4, 1/4 and 1, then 2; a prompt before and a tool's answer within.
CU_SEQLENS = torch.tensor([0, 6, 8], dtype=torch.int32)
MASK_T = torch.tensor([False, True, True, False, True, False, True, False])
RATIO_T = torch.tensor([1.0, 4.0, 0.25, 1.0, 1.0, 1.0, 2.0, 1.0], dtype=torch.float64)
ROLLOUT_T = torch.full((8,), -2.0, dtype=torch.float64)
OLD_T = (ROLLOUT_T + RATIO_T.log()).where(MASK_T, torch.nan)


def weights(name: str, **bounds: float) -> list[float]:
    weight_T = correction_weights(name, OLD_T, ROLLOUT_T, MASK_T, CU_SEQLENS, **bounds)
    assert not weight_T[~MASK_T].any()
    return weight_T[MASK_T].tolist()


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [
        ("token-truncate", {}, [2, 0.25, 1, 2]),
        ("token-truncate", {"high": 3.0}, [3, 0.25, 1, 2]),
        ("token-mask", {}, [4, 0, 1, 2]),
        ("token-mask", {"low": 0.2, "high": 3.0}, [0, 0.25, 1, 2]),
        # Geometric means 1 and 2: what is kept has its own ratios.
        ("sequence-mask", {}, [4, 0.25, 1, 0]),
        ("sequence-mask", {"low": 1.5, "high": 2.5}, [0, 0, 0, 2]),
        # Products 1 and 2.
        ("sequence-truncate", {}, [1, 1, 1, 2]),
        ("sequence-truncate", {"high": 1.5}, [1, 1, 1, 1.5]),
    ],
)
def test_by_hand(name, bounds, expected):
    assert weights(name, **bounds) == pytest.approx(expected)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_equal_probabilities_need_no_correction(name):
    weight_T = correction_weights(name, ROLLOUT_T, ROLLOUT_T, MASK_T, CU_SEQLENS)
    assert torch.equal(weight_T, MASK_T.double())


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("far", [300.0, -300.0])
def test_far_ratios_stay_finite(name, far):
    weight_T = correction_weights(name, torch.full((8,), far), torch.zeros(8), MASK_T, CU_SEQLENS)
    assert weight_T.isfinite().all()


def test_metrics_by_hand():
    metrics = mismatch_metrics(OLD_T, ROLLOUT_T, MASK_T)
    log4, log2 = math.log(4), math.log(2)
    assert metrics == pytest.approx(
        {
            "mismatch_mean": (2 * log4 + log2) / 4,
            "mismatch_max": log4,
            "mismatch_k1": -log2 / 4,
            "mismatch_k3": (7.25 - log2) / 4 - 1,
            "effective_sample_share": 7.25**2 / (4 * (16 + 1 / 16 + 1 + 4)),
        }
    )
    assert mismatch_metrics(ROLLOUT_T, ROLLOUT_T, MASK_T) == {
        "mismatch_mean": 0.0, "mismatch_max": 0.0, "mismatch_k1": 0.0, "mismatch_k3": 0.0,
        "effective_sample_share": 1.0,
    }  # fmt: skip


def test_a_number_that_is_none_is_in_every_metric():
    found = mismatch_metrics(OLD_T.where(torch.arange(len(OLD_T)) != MASK_T.nonzero()[0], math.nan), ROLLOUT_T, MASK_T)
    assert all(math.isnan(value) for value in found.values())


def large_rollout(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    logprob_T, noise_T = torch.randn(2, num_tokens, generator=draw)
    return logprob_T, logprob_T + 0.1 * noise_T, torch.rand(num_tokens, generator=draw) < 0.5


@pytest.mark.parametrize("num_tokens", [16_384, 16_385, 100_000])  # one chunk, one token more, several
def test_metrics_of_many_tokens(num_tokens):
    logprob_T, rollout_T, mask_T = large_rollout(num_tokens)
    log_ratio = (logprob_T.double() - rollout_T.double())[mask_T].numpy()
    weight, count = np.exp(log_ratio), len(log_ratio)
    expected = {
        "mismatch_mean": np.abs(log_ratio).mean(),
        "mismatch_max": np.abs(log_ratio).max(),
        "mismatch_k1": -log_ratio.mean(),
        "mismatch_k3": (np.expm1(log_ratio) - log_ratio).mean(),
        "effective_sample_share": weight.sum() ** 2 / (count * np.square(weight).sum()),
    }
    metrics = mismatch_metrics(logprob_T, rollout_T, mask_T)
    assert metrics == pytest.approx(expected, rel=1e-12)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert mismatch_metrics(logprob_T, rollout_T, mask_T) == metrics
    finally:
        torch.set_num_threads(num_threads)


def test_metrics_need_no_copy_of_the_rollout():
    tensors = large_rollout(1_000_000)
    assert peak_allocated_bytes(lambda: mismatch_metrics(*tensors)) < 3e6  # one float64 copy takes 8e6


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="rollout correction is 'tis', expected one of token-truncate"):
        weights("tis")
    with pytest.raises(ValueError, match="which this rollout did not report"):
        correction_weights("token-mask", OLD_T, None, MASK_T, CU_SEQLENS)
    with pytest.raises(ValueError, match=r"rollout_logprob_T has shape \(7,\)"):
        correction_weights("token-mask", OLD_T, ROLLOUT_T[1:], MASK_T, CU_SEQLENS)
