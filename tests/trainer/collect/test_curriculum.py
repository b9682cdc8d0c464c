"""Prompts that are drawn again, and samples that are left out where the first ones of a prompt are equal."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlft_fast.rl import ADVANTAGES
from rlft_fast.trainer import PPOTrainer, Prompts, train
from rlft_fast.trainer.collect.curriculum import Curriculum
from rlft_fast.trainer.collect.experience import early_stop_metrics, rows_with_signal
from tests.support.runs.samples import samples_of
from tests.trainer.toy import HERE, comparable, read_lines, toy_config, write_rows


def curriculum(tmp_path, num_prompts: int = 40, **changes) -> Curriculum:
    changes = {"algorithm__curriculum": 0.5, "rollout__prompts_per_step": 8} | changes
    texts = [str(row) for row in range(num_prompts)]
    return Curriculum(Prompts(texts, [[1]] * num_prompts, {}), toy_config(tmp_path, tmp_path, **changes))


def with_rates(curriculum: Curriculum, rates: dict[int, float]) -> Curriculum:
    """After a group of eight samples of each of these rows."""
    groups = [[1.0] * round(8 * rate) + [0.0] * round(8 * (1 - rate)) for rate in rates.values()]
    curriculum.learn([*rates], samples_of(groups))
    return curriculum


# ---- estimates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e9])  # of rewards: their differences count
def test_each_group_halves_the_weight_of_earlier_groups(offset, tmp_path):
    groups = [[0.0, 1.0, 1.0, 1.0], [0.5, 0.25], [1.0] * 4]
    found = curriculum(tmp_path)
    for group in groups:
        found.learn([7], samples_of([[offset + reward for reward in group]]))
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 0.5**age) for age, group in zip((2, 1, 0), groups, strict=True)])
    mean = np.average(values, weights=weights)
    assert found.mean_N[7] - offset == pytest.approx(mean, abs=1e-6)
    assert found.squares_N[7] / found.count_N[7] == pytest.approx(np.average((values - mean) ** 2, weights=weights))
    assert found.count_N.nonzero()[0].tolist() == [7]


def test_the_estimate_is_of_the_part_that_is_compared(tmp_path):
    """Without the samples that lack it, or have no reward at all."""
    samples = samples_of([[5.0, 5.0, math.nan, 5.0]])
    samples = samples.replace(parts={"m:f": torch.tensor([1.0, 0.0, 1.0, math.nan], dtype=torch.float64)})
    changes = {"algorithm__filter_by": "m:f", "reward__function": {"m:f": 1.0, "m:g": 1.0}}
    found = curriculum(tmp_path, **changes)
    found.learn([3], samples)
    assert (found.count_N[3], found.mean_N[3], found.squares_N[3]) == (2.0, 0.5, 0.5)


def test_equal_rewards_have_no_variance(tmp_path):
    """To the bit, or prompts that teach nothing would be drawn. The mean of three times 0.1 is not 0.1 to the bit."""
    found = curriculum(tmp_path)
    for _ in range(3):
        found.learn([0, 1], samples_of([[0.1] * 3, [0.7] * 7]))
    assert not found.squares_N.any()
    assert found.metrics()["pass_rate_estimate"] == pytest.approx(0.4)
    assert len(found.choose(3, 0).rows) == found.choose(3, 0).num_streamed == 8


# ---- choices --------------------------------------------------------------------------------------------------------


def test_prompts_are_drawn_in_proportion_to_p_times_1_minus_p(tmp_path):
    rates = {20: 0.5, 25: 0.75, 30: 0.875, 35: 1.0, 39: 0.0}
    found = with_rates(curriculum(tmp_path, algorithm__curriculum=0.125, rollout__prompts_per_step=8), rates)
    found.prompts = prompts_in_order(found.prompts)
    drawn = [found.choose(step, 0).rows[-1] for step in range(4000)]
    learnability = {row: rate * (1 - rate) for row, rate in rates.items()}
    for row, weight in learnability.items():
        share = weight / sum(learnability.values())
        assert abs(drawn.count(row) / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000) + 1e-9


def prompts_in_order(prompts: Prompts) -> Prompts:
    class InOrder(Prompts):
        def order(self, start, count, seed):
            return [row % len(self) for row in range(start, start + count)]

    return InOrder(prompts.texts, prompts.token_ids, prompts.columns)


def test_the_stream_has_no_gaps_and_no_step_has_a_prompt_twice(tmp_path):
    """Whatever is drawn again, refills included."""
    found, streamed, again = curriculum(tmp_path), [], 0
    rng = np.random.default_rng(0)
    for step in range(12):
        rows: list[int] = []
        for _ in range(2):
            chosen = found.choose(step, len(streamed), rows)
            streamed += chosen.rows[: chosen.num_streamed]
            rows += chosen.rows
            again += len(chosen.rows) - chosen.num_streamed
        assert len(rows) == 16
        assert len({*rows}) == 16 or len(streamed) % 40 < 16  # a new pass over the data began
        found.learn(rows, samples_of(rng.integers(0, 2, (16, 4)).astype(float).tolist()))
    assert streamed == found.prompts.order(0, len(streamed), found.config.seed)
    assert again == pytest.approx(12 * 8, abs=12)  # half; the first rollout knew no prompt


def test_choices_survive_as_json(tmp_path):
    found, other = with_rates(curriculum(tmp_path), {row: row / 48 for row in range(1, 40)}), curriculum(tmp_path)
    other.load_state(json.loads(json.dumps(found.state())))
    for rates in ({}, {3: 0.25, 17: 1.0}):
        with_rates(found, rates)
        with_rates(other, rates)
        assert [found.choose(step, 8 * step) for step in range(9)] == [
            other.choose(step, 8 * step) for step in range(9)
        ]
    other.load_state({})
    assert other.state() == curriculum(tmp_path).state()


def test_a_plan_of_steps_of_another_size_is_forgotten(tmp_path):
    """As the prompts of its samples ahead: the stream goes on without a gap."""
    ahead = {"rollout__max_staleness": 2, "rollout__backend": "vllm", "rollout__vllm__process": "separate"}
    found, other = (curriculum(tmp_path, **ahead, rollout__prompts_per_step=size) for size in (8, 4))
    with_rates(found, {row: row / 40 for row in range(1, 40)})
    found.plan(2, 16, 4)
    same = curriculum(tmp_path, **ahead)
    for each in (same, other):
        each.load_state(json.loads(json.dumps(found.state())))
        each.plan(2, 16, 4)
    assert [same.planned(step) for step in (2, 3, 4)] == [found.planned(step) for step in (2, 3, 4)]
    chosen = [other.planned(step) for step in (2, 3, 4)]
    assert [len(own.rows) for own in chosen] == [4, 4, 4]
    streamed = [row for own in chosen for row in own.rows[: own.num_streamed]]
    assert streamed == other.prompts.order(16, len(streamed), other.config.seed)


def test_estimates_of_more_data_are_refused(tmp_path):
    state = with_rates(curriculum(tmp_path), {39: 0.5}).state()
    with pytest.raises(ValueError, match=r"row 39 of the training data, which now has 30 rows: give the data that"):
        curriculum(tmp_path, num_prompts=30).load_state(state)
    without = curriculum(tmp_path, num_prompts=30, algorithm__curriculum=0.0)
    without.load_state(state)  # as the message says
    assert without.choose(0, 0).num_streamed == 8


def test_a_run_that_is_refused_keeps_its_folder(tiny_model, tmp_path):
    """Fewer rows are refused in spite of --force. The run then goes on with its own, without --force."""
    rows = {"data__path": str(write_rows(tmp_path / "few.jsonl", [{"prompt": "sun", "answer": 3}] * 2))}
    config = lambda **changes: toy_config(tiny_model("shallow"), tmp_path, algorithm__curriculum=0.5, **changes)  # noqa: E731
    train(config(steps=1))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"of the training data, which now has 2 rows"):
        train(config(steps=2, **rows), resume=True, force=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert train(config(steps=2), resume=True)["steps"] == 2


# ---- the first samples ----------------------------------------------------------------------------------------------


def weight_of_a_prompt(p: float, first: int, count: int) -> float:
    """docs/methods.md: what a prompt's gradient is multiplied by, with rewards of 0 and 1 and RLOO's advantages."""
    rest, both = (count - first) / (count - 1), p ** (first - 1) * (1 - p) + (1 - p) ** (first - 1) * p
    return first / count * (1 - rest * both) + (1 - first / count) * (1 - p**first - (1 - p) ** first)


@pytest.mark.parametrize(("first", "count"), [(2, 4), (3, 7)])
@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_stopping_early_gives_a_prompt_another_weight_and_no_other_direction(p, first, count):
    """All outcomes, each with its probability: Σ P·Σ A_i·d log P(r_i)/dp / k, which without a stop is dp/dp = 1."""
    group_B, whole, stopped = torch.zeros(count, dtype=torch.int64), 0.0, 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=count):
        reward_B = torch.tensor(outcome, dtype=torch.float64)
        probability = math.prod(p if reward else 1 - p for reward in outcome)
        score_B = torch.tensor([1 / p if reward else -1 / (1 - p) for reward in outcome], dtype=torch.float64)
        gradient = probability * (ADVANTAGES["rloo"](reward_B, group_B) * score_B).mean().item()
        whole += gradient
        stopped += gradient * bool(rows_with_signal(samples_of([[*outcome[:first]]])))
    assert whole == pytest.approx(1.0)
    assert stopped == pytest.approx(weight_of_a_prompt(p, first, count))
    assert first / count <= stopped < 1


def test_what_an_early_stop_saves():
    """Two of three prompts stop, with answers of 5 and 2 tokens on average."""
    samples = samples_of([[0.0, 0.0], [0.0, 1.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0]], lengths=[4, 6, *range(1, 7), 1, 3])
    metrics = early_stop_metrics(samples, 6)
    assert metrics == {"stopped_early_share": pytest.approx(2 / 3), "saved_tokens": 4 * 5.0 + 4 * 2.0}


# ---- in a run -------------------------------------------------------------------------------------------------------

OPTIONS = {
    "algorithm": {"skip_equal_groups": True, "max_refills": 1, "epochs": 2, "curriculum": 0.5, "first_samples": 2},
    "reward__function": f"{HERE}:mostly_even",
}  # fmt: skip


def test_the_rest_of_a_group_is_drawn_where_its_first_samples_differ(tiny_model, tmp_path):
    """With the draws that it would have had at once."""
    algorithm = {**OPTIONS["algorithm"], "max_refills": 0}
    found, whole = (
        PPOTrainer(toy_config(tiny_model("shallow"), tmp_path / str(first), **OPTIONS | {"algorithm": algorithm | own}))
        for first, own in (("first", {}), ("all", {"first_samples": None}))
    )
    for trainer in (found, whole):
        trainer.start(0)
    samples, expected = found.collect(0), whole.collect(0).samples
    samples, taught = samples.samples, samples.taught
    kept = []
    for row in range(4):
        own = (expected.row_B == row).nonzero().squeeze(1)
        assert expected.number_B[own].tolist() == [0, 1, 2, 3]
        kept += own.tolist() if len(expected.reward_B[own[:2]].unique()) > 1 else own[:2].tolist()
    assert 8 < len(kept) < 16
    expected = expected.select(torch.tensor(kept))
    for name in ("row_B", "number_B", "reward_B", "token_ids_T", "is_sampled_T"):
        assert torch.equal(getattr(samples, name), getattr(expected, name)), name
    torch.testing.assert_close(samples.logprob_T, expected.logprob_T, rtol=0, atol=1e-5)
    assert samples.texts == expected.texts
    assert taught.row_B.tolist() == [row for row in samples.row_B.tolist() if samples.row_B.tolist().count(row) == 4]


@pytest.mark.parametrize("clip", [None, (-2.0, -1.0)])  # all rewards lie in [0, 1)
def test_a_step_compares_rewards_within_their_bounds(clip, tiny_model, tmp_path):
    """Prompts whose clipped rewards are equal get no further samples, are replaced, and are not drawn again."""
    options = OPTIONS | {"reward__function": f"{HERE}:spread", "reward__clip": clip}
    trainer = PPOTrainer(toy_config(tiny_model("shallow"), tmp_path, **options))
    trainer.start(0)
    found = trainer.collect(0)
    (seen,) = trainer.curriculum.count_N.nonzero()
    num_prompts, num_samples, num_taught = (4, 16, 16) if clip is None else (8, 16, 0)
    assert (len(found.prompts), len(found.samples), len(found.taught)) == (num_prompts, num_samples, num_taught)
    assert len(seen) == num_prompts
    assert trainer.curriculum.squares_N[seen].all() == (clip is None)
    assert trainer.curriculum.squares_N.any() == (clip is None)
    assert found.metrics["zero_std_group_share"] == float(clip is not None)
    trainer.close()


def test_a_resumed_run_has_the_same_bits(tiny_model, tmp_path):
    for name, all_steps in (("whole", [4]), ("resumed", [2, 4])):
        for steps in all_steps:
            train(
                toy_config(tiny_model("shallow"), tmp_path / name, steps=steps, **OPTIONS), resume=steps != all_steps[0]
            )
    whole, resumed = (tmp_path / name / "run" for name in ("whole", "resumed"))
    assert comparable(resumed) == comparable(whole)
    assert read_lines(resumed / "samples.jsonl") == read_lines(whole / "samples.jsonl")
    weights, expected = (load_file(run / "hf" / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    rows = comparable(whole)
    assert rows[0]["drawn_again_share"] == 0.0
    assert max(row["drawn_again_share"] for row in rows[2:]) > 0.2
    assert all(0 < row["pass_rate_estimate"] < 1 for row in rows)
    assert all(0 < row["stopped_early_share"] <= row["zero_std_group_share"] for row in rows)
    assert all(row["saved_tokens"] > 0 for row in rows)
