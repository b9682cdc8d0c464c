"""Rewards in a run: several functions, functions in worker processes, a reward model."""

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlft_fast.config import Config, EngineConfig
from rlft_fast.rollout import Completion, to_samples
from rlft_fast.trainer import train
from rlft_fast.trainer.judge import Judge, RewardModelScorer
from rlft_fast.trainer.prompts import Prompts
from rlft_fast.world import World
from tests.support.distributed import run_distributed
from tests.trainer.toy import HERE, comparable, read_lines, toy_config, toy_values, write_rows

MISBEHAVING = HERE.parent.parent / "rewards" / "misbehaving.py"


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reward_model(tiny_model):
    return tiny_model("llama-reward")


def samples_of(model, folder, **changes) -> list[dict]:
    train(toy_config(model, folder, steps=1, **changes))
    return read_lines(folder / "run" / "samples.jsonl")


def test_several_functions_with_weights(model, tmp_path):
    parts = {f"{HERE}:even_share": 2.0, f"{HERE}:length": -0.5, f"{HERE}:not_for_sun": 0.0}
    rows = samples_of(model, tmp_path, reward__function=parts, rollout__prompts_per_step=10)
    assert len({row["reward"] for row in rows}) > 3
    for row in rows:
        even, length, other = (row["parts"][name] for name in parts)
        assert (other is None) == (row["prompt"] == "sun")
        assert row["reward"] == pytest.approx(2.0 * even - 0.5 * length)
    (metrics,) = comparable(tmp_path / "run")
    assert metrics["left_out_share"] == 0.0
    for name in parts:
        there = [row["parts"][name] for row in rows if row["parts"][name] is not None]
        assert metrics[f"reward_mean/{name}"] == pytest.approx(np.mean(there))


def test_functions_see_their_rows_and_text_without_special_tokens(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["a", "b"], [tokenizer.encode("a"), tokenizer.encode("b")], {"answer": ["AB", "CD"]})
    completion = Completion([*tokenizer.encode("CD"), tokenizer.eos_token_id], [0.0] * 3, "stop")
    judge = Judge(toy_config(model, tmp_path, reward__function="rlft_fast.rewards:exact_match"), tokenizer, World())
    samples = judge.score(prompts, to_samples([(1, completion), (0, completion)]))
    assert (samples.row_B.tolist(), samples.reward_B.tolist()) == ([0, 1], [0.0, 1.0])


def test_functions_see_the_whole_answer_where_the_model_continues_one(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["u:9*2? a:1", "a:"], [[1], [1]], {"answer": [18, 8]}, continued={0: "1"})
    completion = Completion([*tokenizer.encode("8"), tokenizer.eos_token_id], [0.0] * 2, "stop")
    judge = Judge(toy_config(model, tmp_path, reward__function="rlft_fast.rewards:last_number"), tokenizer, World())
    samples = judge.score(prompts, to_samples([(0, completion), (1, completion)]))
    assert samples.reward_B.tolist() == [1.0, 1.0]


def test_functions_in_worker_processes(model, tmp_path):
    changes = {"reward__function": f"{MISBEHAVING}:exit_for_sun", "reward__timeout_s": 20}
    with pytest.warns(UserWarning, match="its process ended with exit code 9"):
        rows = samples_of(model, tmp_path, rollout__prompts_per_step=10, **changes)
    assert all((row["reward"] is None) == (row["prompt"] == "sun") for row in rows)
    assert comparable(tmp_path / "run")[0]["left_out_share"] == pytest.approx(0.1)


def test_a_reward_model_is_a_part_with_a_weight(model, reward_model, tmp_path):
    changes = {"reward": {"model": str(reward_model), "model_weight": 0.5, "function": f"{HERE}:even_share"}}
    rows = samples_of(model, tmp_path, **changes)
    for row in rows:
        assert row["reward"] == pytest.approx(row["parts"][f"{HERE}:even_share"] + 0.5 * row["parts"]["model"])
    assert np.std([row["parts"]["model"] for row in rows]) > 0.01


# With the policy's vocabulary tokens are what they were, also where their text would be tokenized differently.
@pytest.mark.parametrize("same_vocabulary", [True, False])
def test_a_reward_model_scores_as_transformers_does(model, reward_model, same_vocabulary):
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not same_vocabulary:
        tokenizer.add_tokens(["<another>"])
    prompts = Prompts(["ab", "c"], [tokenizer.encode("ab"), tokenizer.encode("c")], {})
    scorer = RewardModelScorer(str(reward_model), EngineConfig(max_tokens=32), tokenizer, World())
    scores = scorer.score(prompts, [1, 0], [[200, 201, 256], [65, 66]]).tolist()
    sequences = [[*tokenizer.encode("c"), 200, 201, 256], [*tokenizer.encode("ab"), 65, 66]]
    if not same_vocabulary:
        own = AutoTokenizer.from_pretrained(reward_model)
        sequences = [own.encode(tokenizer.decode(ids, skip_special_tokens=True)) for ids in sequences]
    plain = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    expected = [plain(torch.tensor([ids])).logits.item() for ids in sequences]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert abs(scores[0] - scores[1]) > 0.01


def test_a_text_that_the_reward_model_has_no_room_for_is_left_out(model, reward_model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["ab"], [tokenizer.encode("ab")], {})
    room = 8 - len(prompts.token_ids[0]) - 1  # the last token is the one that asks
    rows, answers = [0] * 3, [[65] * length for length in (room + 1, room, 1)]
    small, large = (
        RewardModelScorer(str(reward_model), EngineConfig(max_tokens=cap), tokenizer, World()) for cap in (8, 64)
    )
    expected = large.score(prompts, rows, answers)
    with pytest.warns(UserWarning, match="more than 7 tokens .* raise actor.max_tokens"):
        scores = small.score(prompts, rows, answers)
    with pytest.warns(UserWarning, match="more than 7 tokens"):
        assert small.score(prompts, [0], answers[:1]).isnan().tolist() == [True]
    assert scores.tolist() == pytest.approx([torch.nan, *expected[1:].tolist()], abs=1e-5, nan_ok=True)
    assert len(small.score(prompts, [], [])) == 0


def test_left_out_by_the_reward_model_is_left_out(model, reward_model, tmp_path):
    """Bytes that are no text become a character of three, and another vocabulary makes three tokens of it."""
    folder = shutil.copytree(reward_model, tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)
    reward = {"model": str(folder), "function": f"{HERE}:even_share"}
    with pytest.warns(UserWarning, match="more than 14 tokens"):
        rows = samples_of(model, tmp_path, actor__max_tokens=15, reward=reward)
    assert all((row["reward"] is None) == (row["parts"]["model"] is None) for row in rows)
    assert 0 < sum(row["reward"] is None for row in rows) < len(rows)


def test_a_score_of_the_model_is_the_reward_where_no_function_judges(model, reward_model, tmp_path):
    reward = {"model": str(reward_model), "function": f"{HERE}:not_for_sun"}
    rows = samples_of(model, tmp_path, reward=reward, rollout__prompts_per_step=10)
    for row in rows:
        own, score = row["parts"].values()
        assert (own is None) == (row["prompt"] == "sun")
        assert row["reward"] == pytest.approx((own or 0.0) + score)


def test_a_reward_model_alone(model, reward_model, tmp_path):
    config = toy_config(model, tmp_path, steps=12, rollout__samples_per_prompt=8, reward={"model": str(reward_model)})
    train(config)
    rewards = [row["reward_mean"] for row in comparable(tmp_path / "run")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])


def test_evaluation_by_another_function_than_the_reward(model, reward_model, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}, {"prompt": "ice", "answer": 3}])
    evaluation = {"path": str(held_out), "max_new_tokens": 6}
    accuracy = {}
    for name, reward, function in (
        ("by reward", {"function": f"{HERE}:even_share"}, None),
        ("by function", {"model": str(reward_model), "truncation_penalty": 0.5}, f"{HERE}:even_share"),
        ("by model", {"model": str(reward_model)}, None),
        ("in a worker process", {"model": str(reward_model), "timeout_s": 60, "workers": 1}, f"{HERE}:even_share"),
    ):
        changes = {"reward": reward, "evaluation": evaluation | {"function": function}}
        accuracy[name] = train(toy_config(model, tmp_path / name, steps=1, **changes))["accuracy_before"]
        rows = read_lines(tmp_path / name / "run" / "samples.jsonl")
        assert ("model" in reward) == any(row["reward"] < 0 for row in rows)  # what is learned from stays the reward
    assert accuracy["by function"] == accuracy["by reward"] != accuracy["by model"]
    assert accuracy["in a worker process"] == accuracy["by function"]
    assert not multiprocessing.active_children()  # the worker has ended with its run


def on_two_processes(rank: int, *folders: Path) -> None:
    torch.set_num_threads(1)
    for folder in folders:
        train(Config.load(folder / "config.yaml"))


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes(model, reward_model, tmp_path):
    """Greedy baselines, a reward model and worker processes; refills, of which both processes need the same number.

    Of the one held-out prompt the second process has none.
    """
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "lake", "answer": 3}])
    weights = {f"{MISBEHAVING}:even_share": 2.0, f"{MISBEHAVING}:count_tokens": -0.5}
    runs = {
        "remax": {
            "reward": {"function": weights, "model": str(reward_model), "timeout_s": 60, "workers": 1},
            "algorithm": {"advantage": "remax", "kl_coef": 0.01, "kl_in": "reward"},
        },
        "refills": {
            "reward__function": f"{HERE}:even_share_of_some",
            "algorithm": {"skip_equal_groups": True, "max_refills": 2, "rollout_correction": "sequence-mask"},
            "evaluation": {"path": str(held_out), "max_new_tokens": 6},
        },
    }
    for name, changes in runs.items():
        values = toy_values(model, tmp_path / name, steps=2, **changes)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(values))
    run_distributed(on_two_processes, 2, *(tmp_path / name for name in runs))

    samples = read_lines(tmp_path / "remax" / "run" / "samples.jsonl")
    assert len(samples) == 2 * 16
    for row in samples:
        even, length, score = (row["parts"][name] for name in (*weights, "model"))
        assert row["reward"] == pytest.approx(2.0 * even - 0.5 * length + score)
    for name in runs:
        rows = [row for row in comparable(tmp_path / name / "run") if "grad_norm" in row]
        assert [row["step"] for row in rows] == [1, 2]
        assert all(row["grad_norm"] > 0 and row["mismatch_max"] < 1e-4 for row in rows)
        assert rows[0]["ratio_max"] == 1.0
    evaluations = [row for row in comparable(tmp_path / "refills" / "run") if "accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 2]
