import math

import pytest
import torch

from rlft_fast.rl import kl_estimate, reward_with_kl


# ln 2 apart in both directions: k3 = 1/2 - 1 + ln 2 and 2 - 1 - ln 2.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [math.log(2), -math.log(2), 0.0]),
        ("k2", [0.5 * math.log(2) ** 2, 0.5 * math.log(2) ** 2, 0.0]),
        ("k3", [math.log(2) - 0.5, 1 - math.log(2), 0.0]),
        ("k3+", [math.log(2) - 0.5, 1 - math.log(2), 0.0]),
        ("unbiased", [math.log(2) - 0.5, 1 - math.log(2), 0.0]),
    ],
)
def test_estimators_by_hand(kind, expected):
    logprob_T = torch.tensor([-1.0, -3.0, -2.0], dtype=torch.float64)
    ref_logprob_T = logprob_T + torch.tensor([-math.log(2), math.log(2), 0.0], dtype=torch.float64)
    result_T = kl_estimate(logprob_T, ref_logprob_T, kind)
    torch.testing.assert_close(result_T, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+", "unbiased"])
def test_unbiased_estimators_have_the_exact_kl_as_mean(kind):
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    expectation = (policy.exp() * kl_estimate(policy, reference, kind)).sum()
    torch.testing.assert_close(expectation, (policy.exp() * (policy - reference)).sum())


def mean_gradients(kind: str, off_policy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient in the logits of the exact divergence, and the mean over all tokens of the estimate's."""
    generator = torch.Generator().manual_seed(1)
    logits, reference, other = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), reference.log_softmax(-1)
    sampler = (logits + other if off_policy else logits).detach().log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    estimate = (sampler.exp() * kl_estimate(policy, reference, kind, sampler)).sum()
    return exact, torch.autograd.grad(estimate, logits)[0]


# k1 has a gradient of mean zero, k3 that of the reverse divergence; away from the sampler only ratios help.
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+", "unbiased"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_which_estimators_have_the_exact_gradient_as_mean(kind, off_policy):
    exact, mean = mean_gradients(kind, off_policy)
    unbiased = {"unbiased"} if off_policy else {"k2", "k3+", "unbiased"}
    assert torch.allclose(mean, exact, rtol=1e-9, atol=1e-12) == (kind in unbiased)


def test_unbiased_by_hand():
    # Ratio 2 to the sampler: twice k3, and its gradient is that of the product.
    logprob_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old_T, ref_T = logprob_T.detach() - math.log(2), logprob_T.detach() - math.log(2)
    kl_T = kl_estimate(logprob_T, ref_T, "unbiased", old_T)
    kl_T.sum().backward()
    k3 = 0.5 - 1 + math.log(2)
    assert kl_T.item() == pytest.approx(2 * k3)
    assert logprob_T.grad.item() == pytest.approx(2 * k3 + 2 * (1 - 0.5))


def test_k3_is_precise_for_close_policies():
    # exp(x) - 1 - x is off by a tenth in fp32 at x = 1e-3: the value, x²/2, is close to the rounding of exp(x).
    logprob_T, ref_logprob_T = torch.tensor([0.0]), torch.tensor([1e-3])
    expected = math.expm1(1e-3) - 1e-3
    assert kl_estimate(logprob_T, ref_logprob_T, "k3").item() == pytest.approx(expected, rel=1e-3)


# x = log-ratio to the reference. +15 and -30: one clamp at 10 or at ±20 would give no gradient there. +50: beyond the
# clamp the gradient must be 0, never the -1 of the linear term, which pushes away from the reference.
@pytest.mark.parametrize(
    ("x", "gradient"), [(15.0, 1 - math.exp(15)), (-15.0, 1 - math.exp(-15)), (-30.0, 1.0), (50.0, 0.0)]
)
def test_k3_gradient_of_far_policies(x, gradient):
    logprob_T = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    kl_estimate(logprob_T, torch.full((1,), x, dtype=torch.float64), "k3").sum().backward()
    assert logprob_T.grad.item() == pytest.approx(gradient)


def test_k3_stays_finite_in_fp32():
    far_T = kl_estimate(torch.tensor([-100.0, -1.0, -torch.inf]), torch.tensor([-1.0, -100.0, -1.0]), "k3")
    assert far_T.isfinite().all()


def test_reward_with_kl_by_hand():
    # Second sequence: no response token. Third: two turns, the reward belongs to the last one.
    loss_mask_T = torch.tensor([False, True, True, False, False, False, True, False, True, False])
    cu_seqlens = torch.tensor([0, 4, 6, 10], dtype=torch.int32)
    kl_T = torch.arange(10.0)
    kl_T[~loss_mask_T] = torch.nan
    reward_T = reward_with_kl(torch.tensor([1.0, 7.0, -2.0]), kl_T, loss_mask_T, cu_seqlens, 0.1)
    torch.testing.assert_close(reward_T, torch.tensor([0, -0.1, 0.8, 0, 0, 0, -0.6, 0, -2.8, 0]))


def test_turns_have_their_own_rewards():
    """What they do not explain of the sequence's reward, such as another part, stands at its last token."""
    loss_mask_T = torch.tensor([False, True, True, False, True, False, False, True, False, True, False])
    cu_seqlens = torch.tensor([0, 6, 11], dtype=torch.int32)
    turn_reward_T = torch.tensor([9, 0, 0.5, 9, 0.25, 9, 9, -1, 9, 3, 9], dtype=torch.float64)
    reward_B = torch.tensor([0.75, 1.0], dtype=torch.float64)
    reward_T = reward_with_kl(reward_B, torch.ones(11), loss_mask_T, cu_seqlens, 0.1, turn_reward_T)
    expected = torch.tensor([0, -0.1, 0.4, 0, 0.15, 0, 0, -1.1, 0, 1.9, 0], dtype=torch.float64)
    torch.testing.assert_close(reward_T, expected, atol=1e-8, rtol=0)  # the divergence is float32


def test_reward_with_kl_without_response_tokens():
    reward_T = reward_with_kl(
        torch.ones(1), torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 3], dtype=torch.int32), 0.1
    )
    assert torch.equal(reward_T, torch.zeros(3))


def test_reward_with_kl_does_not_touch_its_inputs():
    kl_T, reward_B = torch.ones(2), torch.ones(1)
    reward_with_kl(reward_B, kl_T, torch.tensor([True, False]), torch.tensor([0, 2], dtype=torch.int32), 0.5)
    assert torch.equal(kl_T, torch.ones(2))
    assert torch.equal(reward_B, torch.ones(1))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'k4', expected one of k1, k2, k3"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(ValueError, match=r"old_logprob_T has shape \(3,\), expected \(2,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "unbiased", torch.zeros(3))
    with pytest.raises(ValueError, match=r"ref_logprob_T has shape \(2, 1\), expected \(2,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(2, 1), "k1")
    mask_T, cu_seqlens = torch.tensor([True, False]), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"reward_B has shape \(2,\), expected \(1,\)"):
        reward_with_kl(torch.zeros(2), torch.zeros(2), mask_T, cu_seqlens, 0.1)
