import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.config import AlgorithmConfig, RewardConfig
from rlft_fast.data import Batch, Samples, cat_samples
from rlft_fast.rl import ADVANTAGES, reward_with_kl
from rlft_fast.rollout import Completion, to_samples
from rlft_fast.trainer.collect.collector import Collector
from rlft_fast.trainer.collect.experience import (
    build_batch,
    merge_metrics,
    mini_batch_rows,
    mismatch,
    penalize_length,
    rollout_metrics,
    rows_with_signal,
    scored_samples,
    with_rewards,
)
from rlft_fast.trainer.learn.objective import Objective
from rlft_fast.world import World
from tests.support.machine.distributed import run_distributed
from tests.support.runs.samples import ANSWERS, PROMPTS, REWARDS, SAMPLES, UNMASKED, samples_of
from tests.trainer.toy import toy_config


def assert_same(found: Samples, expected: Samples) -> None:
    assert found._tensors().keys() == expected._tensors().keys()
    for name, tensor in expected._tensors().items():
        torch.testing.assert_close(getattr(found, name), tensor, rtol=0, atol=0, equal_nan=True)
    assert (found.texts, [*found.parts]) == (expected.texts, [*expected.parts])
    for name, part in expected.parts.items():
        torch.testing.assert_close(found.parts[name], part, rtol=0, atol=0, equal_nan=True)


def gather(rank: int) -> None:
    """In the order of rows and numbers, whichever rank made them; every rank has the names of all parts."""
    world = World.current()
    parts = [{"b": reward, "a": 0.25 * i} for i, reward in enumerate(REWARDS)]
    texts = ["a\0", "", "ä€😀", "\ud800", "e"]
    whole = with_rewards(to_samples(ANSWERS), REWARDS, parts, ["b", "a"]).replace(texts=texts)
    for first in ([3, 4], [0, 1, 2], [], [0, 1, 2, 3, 4]):  # the samples of rank 0
        own = [i for i in range(5) if (i in first) == (rank == 0)]
        mine = with_rewards(
            to_samples([ANSWERS[i] for i in own]), [REWARDS[i] for i in own], [parts[i] for i in own], ["b", "a"]
        )
        assert_same(mine.replace(texts=[texts[i] for i in own]).gather(world), whole)
    narrow, wide = sampled_among(4), sampled_among(6)
    assert_same((narrow.of_rows([0]) if rank == 0 else wide.of_rows([1])).gather(world), mixed(narrow, wide))
    assert_same((narrow if rank == 0 else SAMPLES.select(torch.arange(0))).gather(world), narrow)


@pytest.mark.dist
def test_samples_of_two_ranks_are_gathered():
    run_distributed(gather, 2)


def sampled_among(width: int) -> Samples:
    """Each token among itself and others, as many as there are columns before the last."""

    def completion(i: int, given: Completion) -> Completion:
        others = 100 * i + torch.arange(len(given.token_ids))[:, None] + torch.arange(width - 2)
        token, filler = torch.tensor(given.token_ids)[:, None], torch.full((len(given.token_ids), 1), -1)
        return given._replace(support=torch.cat([token, others, filler], 1).int())

    return with_rewards(to_samples([(row, completion(i, given)) for i, (row, given) in enumerate(ANSWERS)]), REWARDS)


def mixed(narrow: Samples, wide: Samples) -> Samples:
    """Row 0 of one, row 1 of the other; all supports are as wide as the widest."""
    both = cat_samples([narrow.of_rows([0]), wide.of_rows([1])])
    assert both.support_TK.shape == (9, 6)
    assert (both.support_TK[:6, 4:] == -1).all()
    return both


def test_supports_of_different_widths():
    mixed(sampled_among(4), sampled_among(6))
    batch = build_batch(scored_samples(sampled_among(5)), PROMPTS)
    assert batch.support_TK[1].tolist() == [5, 0, 1, 2]
    assert (batch.support_TK[:, 0] >= 0).tolist() == batch.loss_mask_T.tolist()


def test_samples_in_another_order_are_the_same_when_gathered():
    """The order of rows and numbers, whichever came first."""
    for order in ([3, 4, 0, 1, 2], [2, 1, 0, 4, 3]):
        assert_same(SAMPLES.select(torch.tensor(order)).gather(World()), SAMPLES)
    assert len(to_samples([]).gather(World())) == 0


def test_texts_go_with_their_samples():
    named = SAMPLES.replace(texts=[*"abcde"])
    assert named.select(torch.tensor([3, 1, 3])).texts == [*"dbd"]
    assert cat_samples([named.of_rows([1]), named.of_rows([0])]).texts == [*"deabc"]


def test_tokens_as_lists():
    assert SAMPLES.token_ids() == [completion.token_ids for _, completion in ANSWERS]


def test_build_batch_leaves_out_samples_without_a_reward():
    batch = build_batch(scored_samples(SAMPLES), PROMPTS)
    assert batch.input_ids_T.tolist() == [1, 2, 5, 6, 9, 1, 2, 7, 8, 3, 4, 3, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 11, 14]
    assert batch.reward_B.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert batch.group_B.tolist() == [0, 0, 1, 1]


def test_masks_and_versions_reach_the_batch():
    """At the position that predicts the token; tokens that an environment wrote teach nothing."""
    batch = build_batch(scored_samples(SAMPLES), PROMPTS)
    assert batch.loss_mask_T.nonzero().squeeze(1).tolist() == [1, 3, 6, 7, 9, 11, 12]
    assert batch.rollout_logprob_T.tolist() == [0, -0.5, 0, -0.125, 0, 0, -1, -3, 0, -0.75, 0, -0.75, -0.25, 0]
    assert batch.weight_version_T.tolist() == [0, 3, 0, 4, 0, 0, 4, 4, 0, 4, 0, 0, 0, 0]
    assert batch.select([1, 0]).weight_version_T.tolist() == [0, 4, 4, 0, 0, 3, 0, 4, 0]


@pytest.mark.parametrize(("greedy", "expected"), [(None, [1.0, 0.0, 0.5, 0.5]), ([math.nan, 0.25], [0.5, 0.5])])
def test_a_sample_without_a_baseline_is_left_out(greedy, expected):
    baselines = None if greedy is None else torch.tensor(greedy).double()
    batch = build_batch(scored_samples(SAMPLES, baselines), PROMPTS, baselines)
    assert batch.reward_B.tolist() == expected
    assert greedy is None or batch.baseline_B.tolist() == [0.25, 0.25]


def rewards_of(samples: Samples) -> list[float | None]:
    return [None if reward != reward else reward for reward in samples.reward_B.tolist()]


def test_penalty_takes_from_what_was_cut_off():
    penalized = penalize_length(SAMPLES, RewardConfig(truncation_penalty=0.25), 8)
    assert rewards_of(penalized) == [1.0, None, -0.25, 0.5, 0.25]
    assert_same(penalize_length(SAMPLES, RewardConfig(), 8), SAMPLES)


def test_rewards_are_clipped_before_they_are_penalized():
    before = rewards_of(SAMPLES)
    clipped = penalize_length(SAMPLES, RewardConfig(clip=(0.2, 0.6)), 8)
    assert rewards_of(clipped) == [None if x is None else pytest.approx(min(max(x, 0.2), 0.6)) for x in before]
    both = penalize_length(SAMPLES, RewardConfig(clip=(0.2, 0.6), truncation_penalty=0.25), 8)
    assert min(x for x in rewards_of(both) if x is not None) == pytest.approx(0.2 - 0.25)
    with pytest.raises(ValueError, match=r"clip is \[1, 0\], expected the lowest reward before the highest"):
        RewardConfig(clip=(1.0, 0.0))


def test_turns_earn_nothing_beyond_the_bounds(tmp_path):
    """What a turn earns beyond is taken from its own reward, and not from that of the last turn."""
    turns = [[3.0, 0.0, 0.5], [1.0, -3.0, 1.0], [0.1, 0.2, 0.3]]
    completion = Completion([5] * 5, [-1.0] * 5, "stop", mask=[True, False] * 2 + [True])
    reward_T = torch.tensor([[a, 0, b, 0, c] for a, b, c in turns], dtype=torch.float64).flatten()
    samples = with_rewards(to_samples([(0, completion)] * 3), [*map(sum, turns)]).replace(reward_T=reward_T)
    for clip, expected in [
        (None, turns),
        ([-1.0, 1.0], [[1.0, 0.0, 0.0], [1.0, -2.0, 0.0], turns[2]]),
        ([0.5, 9.0], [[2.5, 0.0, 1.0], [0.5, -0.5, 0.5], [0.0, 0.0, 0.6]]),
    ]:
        collector = Collector(toy_config(tmp_path / "model", tmp_path, reward__clip=clip), World(), *[None] * 5)
        taught = collector.taught(collector.penalize_length(samples), [0])
        batch = build_batch(taught, [[1, 2]])
        found_T = reward_with_kl(batch.reward_B, None, batch.loss_mask_T, batch.cu_seqlens, 0.0, batch.reward_T)
        assert found_T[batch.loss_mask_T].view(3, 3).tolist() == [pytest.approx(own) for own in expected]
        assert len(collector.taught(samples.of_rows([]), [])) == 0
    assert taught.reward_T[10:].tolist() == pytest.approx([0, 0, 0, 0, 0.1])
    assert samples.reward_T is reward_T  # as the environment gave it, for the log


def test_coming_near_the_limit_costs_in_proportion():
    # Lengths 3, of which the policy sampled 2, then 1, 2, 1 and 2 of 3, the last two of which are the buffer.
    config = RewardConfig(overlong_buffer=2, overlong_penalty=0.5)
    samples = penalize_length(
        with_rewards(to_samples(ANSWERS), REWARDS, [{"own": x} for x in REWARDS], ["own"]), config, 3
    )
    assert rewards_of(samples) == [0.75, None, -0.25, 0.5, 0.25]
    assert str(samples.parts["own"].tolist()) == "[1.0, nan, 0.0, 0.5, 0.5]"
    assert str(samples.parts["length"].tolist()) == "[-0.25, nan, -0.25, 0.0, -0.25]"


def test_rows_with_signal():
    assert rows_with_signal(SAMPLES) == [0]
    assert rows_with_signal(SAMPLES.select(torch.arange(1, 5))) == []  # what has no reward is not compared
    moved = SAMPLES.replace(row_B=SAMPLES.row_B + 2)
    assert rows_with_signal(cat_samples([moved, SAMPLES])) == [0, 2]


def test_a_part_decides_which_rows_have_a_signal():
    """A missing part is another value than any number, and the same value as another missing part."""
    verdicts = [1.0, 1.0, 1.0, 0.0, 1.0]
    missing = [None, 1.0, None, None, 2.0]
    columns = zip(verdicts, REWARDS, missing, strict=True)
    parts = [{"verdict": verdict, "other": other, "missing": part} for verdict, other, part in columns]
    samples = with_rewards(to_samples(ANSWERS), REWARDS, parts, ["verdict", "other", "missing"])
    assert rows_with_signal(samples, "verdict") == [1]
    assert rows_with_signal(samples, "other") == [0]
    assert rows_with_signal(samples, "missing") == [1]


def test_rewards_that_are_clipped_to_one_bound_are_no_signal():
    """Exactly the groups that the clip leaves with an advantage are found. A part is compared as it is."""
    groups = [[2.0, 3.0, 5.0, 7.0], [-4.0, 0.5, 0.5, 0.5], [-2.0, 2.0, 9.0, 9.0], [math.nan, -1.0, -8.0, -1.5]]
    samples = samples_of(groups)
    clipped = penalize_length(samples, RewardConfig(clip=(-1.0, 1.0)), 8)
    advantage_B = ADVANTAGES["grpo"](clipped.reward_B[:12], clipped.row_B[:12])
    assert [row for row in range(3) if advantage_B[4 * row : 4 * row + 4].any()] == [1, 2]
    assert rows_with_signal(samples, clip=(-1.0, 1.0)) == [1, 2]
    assert rows_with_signal(samples) == [0, 1, 2, 3]
    samples = samples.replace(parts={"own": samples.reward_B})
    assert rows_with_signal(samples, "own", (-1.0, 1.0)) == [0, 1, 2, 3]


def test_rollout_metrics_are_about_all_samples():
    some, all_scored = (build_batch(scored_samples(s), PROMPTS) for s in (SAMPLES.of_rows([0]), SAMPLES))
    assert rollout_metrics(SAMPLES, some, 1) == rollout_metrics(SAMPLES, all_scored, 1)


def test_rollout_metrics():
    batch = build_batch(scored_samples(UNMASKED), PROMPTS)
    bypassed = rollout_metrics(UNMASKED, batch.replace(old_logprob_T=batch.rollout_logprob_T), 1)
    assert not any("mismatch" in name for name in bypassed)  # the first optimizer step tells
    off_T = torch.where(batch.loss_mask_T, torch.arange(14.0) / 10, 0.0)  # positions 1-3, 6-7, 9, 11-12
    logprob_T = batch.rollout_logprob_T + off_T
    batch = batch.replace(logprob_T=logprob_T, old_logprob_T=logprob_T)
    batch = batch.replace(ref_logprob_T=batch.old_logprob_T + off_T)
    metrics = rollout_metrics(UNMASKED, batch, 1)
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


@pytest.mark.parametrize("options", [{"advantage": "grpo"}, {"advantage": "remax"}, {"advantage": "gae", "lam": 1.0}])
def test_large_rewards_keep_their_differences(options):
    """From the judge's rewards to advantages, with the divergence in the reward."""

    def advantages(constant: float) -> torch.Tensor:
        samples = with_rewards(to_samples(ANSWERS), [constant + x for x in (1.0, 3.0, 0.0, 0.5, 0.25)])
        greedy = torch.tensor([constant, constant], dtype=torch.float64) if options["advantage"] == "remax" else None
        batch = build_batch(scored_samples(samples, greedy), PROMPTS, greedy)
        old_logprob_T = batch.rollout_logprob_T.clone()
        batch = batch.replace(old_logprob_T=old_logprob_T, ref_logprob_T=old_logprob_T - 0.25 * batch.loss_mask_T)
        if options["advantage"] == "gae":
            batch = batch.replace(value_T=torch.zeros(batch.num_tokens))
        config = AlgorithmConfig(kl_coef=0.5, kl_in="reward", kl_estimator="k1", **options)
        return Objective(config, 2, has_critic=batch.value_T is not None).prepare(batch).advantage_T

    assert advantages(0.0).abs().max() > 0.5
    torch.testing.assert_close(advantages(1e9), advantages(0.0), rtol=0, atol=1e-6)  # float64 has 1.2e-7 near 1e9


def test_rollout_metrics_of_nothing_have_no_reward():
    nothing = to_samples(ANSWERS)
    batch = build_batch(scored_samples(nothing), PROMPTS)
    batch = batch.replace(old_logprob_T=batch.rollout_logprob_T.clone(), ref_logprob_T=batch.rollout_logprob_T)
    metrics = rollout_metrics(nothing, batch, 0)
    assert metrics["left_out_share"] == 1.0
    unknown = {name for name, value in metrics.items() if math.isnan(value)}
    assert unknown == {"reward_mean", "reward_std", "zero_std_group_share"}


def prepare(batch: Batch, config: AlgorithmConfig) -> Batch:
    return Objective(config, max_new_tokens=8, has_critic=config.advantage == "gae").prepare(batch)


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo"])
def test_grpo_advantages_stand_at_sampled_positions(advantage):
    batch = prepare(build_batch(scored_samples(UNMASKED), PROMPTS), AlgorithmConfig(advantage=advantage))
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
    batch = build_batch(scored_samples(UNMASKED), PROMPTS)
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
    parts = [part.tolist() for part in mini_batch_rows(batch, config, seed)]
    assert all(parts)
    per_epoch = min(count, num_sequences)
    assert len(parts) == epochs * per_epoch
    for epoch in range(epochs if num_sequences else 0):
        cut = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain.from_iterable(cut)) == list(range(num_sequences))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert parts == [part.tolist() for part in mini_batch_rows(batch, config, seed)]


def test_samples_of_a_prompt_stay_together():
    batch = numbered_batch(24, samples_per_prompt=4)
    parts = mini_batch_rows(batch, AlgorithmConfig(mini_batches=3), seed=5)
    assert [len(batch.group_B[part].unique()) for part in parts] == [2, 2, 2]


def test_epochs_and_seeds_shuffle_differently():
    config = AlgorithmConfig(epochs=2)
    orders = [part.tolist() for seed in (0, 1) for part in mini_batch_rows(numbered_batch(30), config, seed)]
    assert len({tuple(order) for order in orders}) == 4


def test_merge_metrics():
    steps = [{"loss": 1.0, "ratio_max": 3.0, "skipped_steps": 0}, {"loss": 2.0, "ratio_max": 2.0, "skipped_steps": 1}]
    assert merge_metrics(steps) == {"loss": 1.5, "ratio_max": 3.0, "skipped_steps": 1}
    assert merge_metrics([]) == {}


def test_a_step_may_lack_a_metric():
    steps = [{"loss": 1.0}, {"loss": 3.0, "entropy": 0.5}]
    assert merge_metrics(steps) == {"loss": 2.0, "entropy": 0.5}


def test_the_mismatch_needs_log_probabilities_of_both():
    batch = Batch.from_samples([[1]], [[2, 3]], rollout_logprobs=[[-1.0, -2.0]])
    assert mismatch(batch) == {}
    policy = batch.replace(logprob_T=torch.tensor([-1.5, -2.0, 9.0]))
    assert mismatch(policy)["mismatch_mean"] == 0.25
    assert mismatch(policy)["mismatch_max"] == 0.5
    assert mismatch(policy.replace(rollout_logprob_T=None)) == mismatch(policy.select([])) == {}
