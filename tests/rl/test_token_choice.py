import pytest
import torch

from rlft_fast.rl import clip_cov_tokens, high_entropy_tokens, kl_cov_tokens

MASK_T = torch.tensor([True, True, False, True, True, True, False])


def test_high_entropy_tokens_by_hand():
    entropy_T = torch.tensor([0.1, 0.9, 9.0, 0.5, 0.9, 0.2, 9.0])
    assert high_entropy_tokens(entropy_T, MASK_T, 0.2).nonzero().flatten().tolist() == [1, 4]  # the tie stays
    assert high_entropy_tokens(entropy_T, MASK_T, 0.6).nonzero().flatten().tolist() == [1, 3, 4]
    assert torch.equal(high_entropy_tokens(entropy_T, MASK_T, 1.0), MASK_T)
    assert high_entropy_tokens(entropy_T, MASK_T, 0.01).sum() == 2  # at least one, and its tie
    assert not high_entropy_tokens(entropy_T, torch.zeros(7, dtype=torch.bool), 0.2).any()


# Covariances of the active tokens: advantages 2, 0, 0, 0, -2 and log-probabilities -1, -3, -3, -3, -5 about -3.
ADVANTAGE_T = torch.tensor([2.0, 0.0, 50.0, 0.0, 0.0, -2.0, 50.0])
LOGPROB_T = torch.tensor([-1.0, -3.0, 50.0, -3.0, -3.0, -5.0, 50.0])


def test_kl_cov_chooses_the_largest_covariance():
    assert kl_cov_tokens(LOGPROB_T, ADVANTAGE_T, MASK_T, share=0.4).tolist() == [1, 0, 0, 0, 0, 1, 0]
    assert kl_cov_tokens(LOGPROB_T, ADVANTAGE_T + 0.5 * LOGPROB_T, MASK_T).sum() == 1  # 2e-4 of five, at least one
    assert kl_cov_tokens(LOGPROB_T[:0], ADVANTAGE_T[:0], MASK_T[:0]).shape == (0,)


def test_clip_cov_chooses_at_random_within_bounds():
    chosen = {
        tuple(clip_cov_tokens(LOGPROB_T, ADVANTAGE_T, MASK_T, share=0.2, seed=seed).tolist()) for seed in range(20)
    }
    assert chosen == {(1, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1, 0)}  # both have a covariance of 4
    assert not clip_cov_tokens(LOGPROB_T, ADVANTAGE_T, MASK_T, low=4.5).any()
    assert not clip_cov_tokens(LOGPROB_T, ADVANTAGE_T, MASK_T, high=3.5).any()
    seeded = [clip_cov_tokens(LOGPROB_T, ADVANTAGE_T, MASK_T, seed=3) for _ in range(2)]
    assert torch.equal(*seeded)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"share of high-entropy tokens is 0\.0"):
        high_entropy_tokens(torch.zeros(7), MASK_T, 0.0)
    with pytest.raises(ValueError, match=r"entropy_T has shape \(6,\)"):
        high_entropy_tokens(torch.zeros(6), MASK_T, 0.5)
    with pytest.raises(ValueError, match=r"advantage_T has shape \(6,\)"):
        kl_cov_tokens(LOGPROB_T, torch.zeros(6), MASK_T)
