import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.config import AlgorithmConfig, RewardConfig
from rlft_fast.data import Batch
from rlft_fast.rollout import Completion
from rlft_fast.trainer.experience import (
    Sample,
    build_batch,
    gather_samples,
    leave_out_truncated,
    merge_metrics,
    mini_batches,
    mismatch,
    penalize_length,
    rollout_metrics,
    rows_with_signal,
)
from rlft_fast.trainer.objective import Objective
from rlft_fast.world.collectives import any_rank

# Two prompts in the order of two ranks: no reward, a cut-off one, a completion of one token.
SAMPLES = [
    Sample(0, Completion([5, 6, 9], [-0.5, -1.25, -0.125], "stop"), 1.0),
    Sample(0, Completion([7], [-2.0], "stop"), None),
    Sample(0, Completion([7, 8], [-1.0, -3.0], "length"), 0.0),
    Sample(1, Completion([4], [-0.75], "stop"), 0.5),
    Sample(1, Completion([4, 4], [-0.75, -0.25], "length"), 0.5),
]
PROMPTS = {0: [1, 2], 1: [3]}


def check_gathering_on_two_ranks(rank: int) -> None:  # called by test_resume, which starts processes anyway
    own = {0: SAMPLES[:3], 1: SAMPLES[3:]}[rank]
    assert gather_samples(own) == SAMPLES
    assert gather_samples(own if rank == 0 else []) == SAMPLES[:3]  # fewer prompts than ranks
    check_supports(gather_samples(sampled_among(4)[:3] if rank == 0 else sampled_among(6)[3:]), widths=(4, 6))
    check_supports(gather_samples(sampled_among(4) if rank == 0 else []), widths=(4, 4))
    assert any_rank(rank == 1)
    assert not any_rank(False)


def sampled_among(width: int) -> list[Sample]:
    """Each token among itself and others, as many as there are columns before the last; under weights of their own."""

    def completion(i: int, given: Completion) -> Completion:
        others = 100 * i + torch.arange(len(given.token_ids))[:, None] + torch.arange(width - 2)
        token, filler = torch.tensor(given.token_ids)[:, None], torch.full((len(given.token_ids), 1), -1)
        return given._replace(weight_version=3 + i, support=torch.cat([token, others, filler], 1).int())

    return [replace(sample, completion=completion(i, sample.completion)) for i, sample in enumerate(SAMPLES)]


def check_supports(gathered: list[Sample], widths: tuple[int, int]) -> None:
    """All are as wide as the widest: the first three samples had one width, the others another."""
    expected = sampled_among(widths[0])[:3] + sampled_among(widths[1])[3:]
    for sample, wanted in zip(gathered, expected, strict=True):
        assert sample.completion[:4] == wanted.completion[:4]
        support = wanted.completion.support
        filler = torch.full((len(support), max(widths) - support.shape[1]), -1)
        assert torch.equal(sample.completion.support, torch.cat([support, filler], 1).int())


def test_supports_survive_the_way_through_tensors():
    check_supports(gather_samples(sampled_among(5)), widths=(5, 5))
    batch = build_batch(sampled_among(5), PROMPTS)
    assert batch.support_TK[2].tolist() == [6, 1, 2, 3]
    assert (batch.support_TK[:, 0] >= 0).tolist() == batch.loss_mask_T.tolist()


def test_samples_survive_the_way_through_tensors():
    assert gather_samples(SAMPLES) == SAMPLES
    assert gather_samples([]) == []


def test_any_rank_alone():
    assert any_rank(True)
    assert not any_rank(False)


def test_build_batch_leaves_out_samples_without_a_reward():
    batch = build_batch(SAMPLES, PROMPTS)
    assert batch.input_ids_T.tolist() == [1, 2, 5, 6, 9, 1, 2, 7, 8, 3, 4, 3, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 11, 14]
    assert batch.reward_B.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert batch.group_B.tolist() == [0, 0, 1, 1]
    sampled = batch.rollout_logprob_T[batch.loss_mask_T]
    assert sampled.tolist() == [-0.5, -1.25, -0.125, -1.0, -3.0, -0.75, -0.75, -0.25]


@pytest.mark.parametrize(("greedy", "expected"), [(None, [1.0, 0.5]), ({1: 0.25}, [0.5])])
def test_what_was_cut_off_is_left_out_of_what_was_built(greedy, expected):
    """A sample without a reward, and one without a baseline, are no rows of the batch."""
    batch = leave_out_truncated(build_batch(SAMPLES, PROMPTS, greedy), SAMPLES, greedy)
    assert batch.reward_B.tolist() == expected
    assert batch.lengths.tolist() == [5, 2][-len(expected) :]


def test_parts_of_rewards_travel_too():
    samples = [replace(s, parts={"own": s.reward, "other": 0.5}) for s in SAMPLES]
    assert gather_samples(samples, ["own", "other"]) == samples


def test_penalty_takes_from_what_was_cut_off():
    penalized = [sample.reward for sample in penalize_length(SAMPLES, RewardConfig(truncation_penalty=0.25), 8)]
    assert penalized == [1.0, None, -0.25, 0.5, 0.25]
    assert penalize_length(SAMPLES, RewardConfig(), 8) == SAMPLES


def test_coming_near_the_limit_costs_in_proportion():
    # Lengths 3, 2, 1 and 2 of 3, the last two of which are the buffer.
    config = RewardConfig(overlong_buffer=2, overlong_penalty=0.5)
    samples = [replace(sample, parts={"own": sample.reward}) for sample in SAMPLES]
    penalized = penalize_length(samples, config, 3)
    assert [sample.reward for sample in penalized] == [0.5, None, -0.25, 0.5, 0.25]
    assert [sample.parts for sample in penalized] == [
        {"own": 1.0, "length": -0.5}, {"own": None}, {"own": 0.0, "length": -0.25}, {"own": 0.5},
        {"own": 0.5, "length": -0.25},
    ]  # fmt: skip


def test_rows_with_signal():
    assert rows_with_signal(SAMPLES) == [0]
    assert rows_with_signal(SAMPLES[1:]) == []  # what has no reward is not compared
    moved = [replace(sample, row=sample.row + 2) for sample in SAMPLES]
    assert rows_with_signal(moved + SAMPLES) == [0, 2]


def test_a_part_decides_which_rows_have_a_signal():
    verdicts = [1.0, 1.0, 1.0, 0.0, 1.0]
    samples = [replace(s, parts={"verdict": v, "other": s.reward}) for s, v in zip(SAMPLES, verdicts, strict=True)]
    assert rows_with_signal(samples, "verdict") == [1]
    assert rows_with_signal(samples, "other") == [0]


def test_rollout_metrics_are_about_all_samples():
    metrics = rollout_metrics(SAMPLES, build_batch(SAMPLES[:3], PROMPTS), 1)
    assert metrics == rollout_metrics(SAMPLES, build_batch(SAMPLES, PROMPTS), 1)


def test_rollout_metrics():
    batch = build_batch(SAMPLES, PROMPTS)
    bypassed = rollout_metrics(SAMPLES, batch.replace(old_logprob_T=batch.rollout_logprob_T), 1)
    assert not any("mismatch" in name for name in bypassed)  # the first optimizer step tells
    off_T = torch.where(batch.loss_mask_T, torch.arange(14.0) / 10, 0.0)  # positions 1-3, 6-7, 9, 11-12
    logprob_T = batch.rollout_logprob_T + off_T
    batch = batch.replace(logprob_T=logprob_T, old_logprob_T=logprob_T)
    batch = batch.replace(ref_logprob_T=batch.old_logprob_T + off_T)
    metrics = rollout_metrics(SAMPLES, batch, 1)
    off = np.array([1, 2, 3, 6, 7, 9, 11, 12]) / 10
    assert metrics == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": np.std([1.0, 0.0, 0.5, 0.5]),
            "completion_length_mean": 9 / 5,
            "truncated_share": 2 / 5,
            "left_out_share": 1 / 5,
            "zero_std_group_share": 1 / 2,
            "mismatch_mean": off.mean(),
            "mismatch_max": 1.2,
            "mismatch_k1": -off.mean(),
            "mismatch_k3": (np.exp(off) - off - 1).mean(),
            "effective_sample_share": np.exp(off).sum() ** 2 / (8 * np.exp(2 * off).sum()),
            "ref_kl": (np.exp(off) - off - 1).mean(),  # k3
        },
        rel=1e-5,
    )


def test_rollout_metrics_of_nothing_have_no_reward():
    nothing = [Sample(s.row, s.completion, None) for s in SAMPLES]
    batch = build_batch(nothing, PROMPTS)
    batch = batch.replace(old_logprob_T=batch.rollout_logprob_T.clone(), ref_logprob_T=batch.rollout_logprob_T)
    metrics = rollout_metrics(nothing, batch, 0)
    assert metrics["left_out_share"] == 1.0
    assert {name for name, value in metrics.items() if math.isnan(value)} == {"reward_mean", "reward_std"}


def prepare(batch: Batch, config: AlgorithmConfig) -> Batch:
    return Objective(config, max_new_tokens=8, has_critic=config.advantage == "gae").prepare(batch)


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo"])
def test_grpo_advantages_stand_at_sampled_positions(advantage):
    batch = prepare(build_batch(SAMPLES, PROMPTS), AlgorithmConfig(advantage=advantage))
    scale = 1 / math.sqrt(0.5) if advantage == "grpo" else 1.0  # the sample deviation of 1 and 0
    expected = [0, 1, 1, 1, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0]
    assert batch.advantage_T.tolist() == pytest.approx([0.5 * scale * x for x in expected], abs=1e-5)


def gae_in_fp64(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages = [0.0] * len(rewards)
    for t in reversed(range(len(rewards))):
        last = t == len(rewards) - 1
        delta = rewards[t] + (0.0 if last else gamma * values[t + 1]) - values[t]
        advantages[t] = delta + (0.0 if last else gamma * lam * advantages[t + 1])
    return advantages


# KL in the reward, KL elsewhere: only the first changes rewards.
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_gae_advantages(kl_in):
    estimator = {"reward": "k1", "loss": "k2"}[kl_in]
    config = AlgorithmConfig(
        advantage="gae", gamma=0.9, lam=0.8, kl_coef=0.5, kl_in=kl_in, kl_estimator=estimator,
    )  # fmt: skip
    batch = build_batch(SAMPLES, PROMPTS)
    generator = torch.Generator().manual_seed(0)
    value_T, old_T, ref_T = (torch.randn(14, generator=generator) * batch.loss_mask_T for _ in range(3))
    batch = prepare(batch.replace(value_T=value_T, old_logprob_T=old_T, ref_logprob_T=ref_T), config)

    kl = 0.5 * (old_T - ref_T).double() if kl_in == "reward" else torch.zeros(14)
    rewards = (-kl).tolist()
    for position, reward in ((3, 1.0), (7, 0.0), (9, 0.5), (12, 0.5)):  # the last sampled position of each
        rewards[position] += reward
    advantages = np.zeros(14)
    for positions in ([1, 2, 3], [6, 7], [9], [11, 12]):
        advantages[positions] = gae_in_fp64(
            [rewards[t] for t in positions], [value_T[t].item() for t in positions], gamma=0.9, lam=0.8
        )
    mask = batch.loss_mask_T.numpy()
    white = np.where(mask, (advantages - advantages[mask].mean()) / advantages[mask].std(ddof=1), 0.0)
    assert batch.return_T.tolist() == pytest.approx((advantages + value_T.numpy()) * mask, abs=1e-5)
    assert batch.advantage_T.tolist() == pytest.approx(white, abs=1e-5)


def numbered_batch(num_sequences: int, samples_per_prompt: int = 1) -> Batch:
    groups = [i // samples_per_prompt for i in range(num_sequences)]
    return Batch.from_samples([[i] for i in range(num_sequences)], [[0]] * num_sequences, groups=groups)


@given(
    num_sequences=st.integers(0, 12), epochs=st.integers(1, 3), count=st.integers(1, 5), seed=st.integers(0, 2**63 - 1)
)
def test_every_epoch_sees_every_sequence_once(num_sequences, epochs, count, seed):
    config = AlgorithmConfig(epochs=epochs, mini_batches=count)
    batch = numbered_batch(num_sequences)
    parts = [part.input_ids_T[::2].tolist() for part in mini_batches(batch, config, seed)]
    assert all(parts)
    per_epoch = min(count, num_sequences)
    assert len(parts) == epochs * per_epoch
    for epoch in range(epochs if num_sequences else 0):
        cut = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain.from_iterable(cut)) == list(range(num_sequences))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert parts == [part.input_ids_T[::2].tolist() for part in mini_batches(batch, config, seed)]


def test_samples_of_a_prompt_stay_together():
    parts = mini_batches(numbered_batch(24, samples_per_prompt=4), AlgorithmConfig(mini_batches=3), seed=5)
    assert [len(part.group_B.unique()) for part in parts] == [2, 2, 2]


def test_epochs_and_seeds_shuffle_differently():
    config = AlgorithmConfig(epochs=2)
    orders = [
        part.input_ids_T[::2].tolist() for seed in (0, 1) for part in mini_batches(numbered_batch(30), config, seed)
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_merge_metrics():
    steps = [{"loss": 1.0, "ratio_max": 3.0, "skipped_steps": 0}, {"loss": 2.0, "ratio_max": 2.0, "skipped_steps": 1}]
    assert merge_metrics(steps) == {"loss": 1.5, "ratio_max": 3.0, "skipped_steps": 1}
    assert merge_metrics([]) == {}


def test_the_mismatch_needs_log_probabilities_of_both():
    batch = Batch.from_samples([[1]], [[2, 3]], rollout_logprobs=[[-1.0, -2.0]])
    assert mismatch(batch) == {}
    policy = batch.replace(logprob_T=torch.tensor([-1.5, -2.0, 9.0]))
    assert mismatch(policy)["mismatch_mean"] == 0.25
    assert mismatch(policy)["mismatch_max"] == 0.5
    assert mismatch(policy.replace(rollout_logprob_T=None)) == mismatch(policy.select([])) == {}
