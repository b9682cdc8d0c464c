"""Runs whose samples are collected while earlier steps train. The generator is a copy of the policy that takes time."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlft_fast.trainer.collect.overlap
import rlft_fast.trainer.models
from rlft_fast.config import Config
from rlft_fast.data import Samples
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import RewardError
from rlft_fast.rollout import RolloutError, build_rollout
from rlft_fast.run import read_rollout, read_timeline
from rlft_fast.trainer import train
from rlft_fast.trainer.collect.curriculum import Curriculum
from rlft_fast.trainer.collect.judge import Judge
from rlft_fast.trainer.collect.overlap import Overlap
from rlft_fast.trainer.collect.schedule import Schedule
from rlft_fast.trainer.prompts import load_training
from tests.support.runs.copied_generator import copied_rollout
from tests.trainer.struck import FEWER_OPTIONS, assert_same_result, write_config
from tests.trainer.toy import HERE, comparable, read_lines, toy_config, toy_values

APART = {"rollout__backend": "vllm", "rollout__vllm": {"process": "separate"}}


@pytest.fixture
def copied(monkeypatch):
    """Has runs sample by a copy of the policy, whose calls have these latencies."""

    def sample(seconds=lambda number: 0.0) -> None:
        build = lambda engine, *_: copied_rollout(engine, seconds)  # noqa: E731
        monkeypatch.setattr(rlft_fast.trainer.models, "build_rollout", build)

    return sample


@pytest.fixture
def overlapped(copied, tiny_model, tmp_path):
    """Trains a toy with a latency for each call of the generator; returns its folder."""

    def run(name: str, max_staleness: int, seconds=lambda number: 0.0, **changes) -> Path:
        copied(seconds)
        train(
            toy_config(
                tiny_model("shallow"), tmp_path / name, rollout__max_staleness=max_staleness, **{**APART, **changes}
            )
        )
        return tmp_path / name / "run"

    return run


def test_latencies_change_no_number(overlapped):
    """Fast and slow generators give the same run, in which the weights of a step are as old as the schedule says."""
    fast = overlapped("fast", 2, steps=6)
    slow = overlapped("slow", 2, lambda number: (0.15, 0.0, 0.05)[number % 3], steps=6)
    assert comparable(slow) == comparable(fast)
    assert read_lines(slow / "samples.jsonl") == read_lines(fast / "samples.jsonl")
    lines = read_lines(fast / "metrics.jsonl")
    assert [row["staleness_max"] for row in lines] == [0, 1, 2, 1, 2, 1]
    assert [[row[f"staleness_share_{age}"] for age in range(3)].index(1.0) for row in lines] == [0, 1, 2, 1, 2, 1]
    rows = read_lines(fast / "samples.jsonl")
    assert [row["weight_version"] for row in rows[::16]] == [1, 1, 1, 3, 3, 5]


def test_a_run_without_correction_says_so(overlapped):
    """The configuration of a run in turn names no correction, and is taken for a run beside the training."""
    with pytest.warns(UserWarning, match=r"rollout_correction is none.*up to 2 updates.*token-truncate does"):
        overlapped("plain", 2, steps=1, algorithm__rollout_correction="none")


def test_staleness_0_is_the_loop_in_turn(overlapped, tiny_model, tmp_path):
    """Its numbers are those of the policy that samples itself."""
    train(toy_config(tiny_model("shallow"), tmp_path / "hf"))
    assert comparable(overlapped("copied", 0)) == comparable(tmp_path / "hf/run")


@pytest.mark.parametrize("how", ["die 8 0", "SIGTERM 6 0"])
def test_resuming(how, copied, tiny_model, tmp_path):
    """A run that ended at once, or after a step, goes on with the samples of its checkpoint: nothing changes."""
    copied()
    for name in ("whole", "struck"):
        path = write_config(
            tiny_model("shallow"), tmp_path / name, FEWER_OPTIONS | APART | {"rollout__max_staleness": 2}
        )
        config = Config.parse(yaml.safe_load(path.read_text()))
        if name == "struck":
            (tmp_path / name / "strike").write_text(how)
            with pytest.raises(KeyboardInterrupt):
                train(config)
            assert not (tmp_path / name / "strike").exists()
        train(config, resume=name == "struck")
    assert_same_result(tmp_path / "struck/run", tmp_path / "whole/run")
    rows = read_lines(tmp_path / "struck/run/samples.jsonl")
    assert [row["weight_version"] for row in rows[::16]] == [1, 1, 1, 3, 3, 5]


def test_groups_go_on_across_updates(overlapped, copied, tiny_model, monkeypatch, tmp_path):
    """Each prompt once, in the order of a run in turn, by weights no older than the bound; also after a stop.

    Reward functions get the samples of each prompt once, together.
    """
    in_turn = overlapped("in turn", 0, steps=6)
    slow = lambda number: (0.0, 0.04, 0.1)[number % 3]  # noqa: E731
    scored: list[list[str]] = []

    def noting(judge, prompts, samples, score=Judge.score):
        scored.append([prompts.texts[row] for row in samples.row_B])
        return score(judge, prompts, samples)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "score", noting)
        run = overlapped("in flight", 2, slow, steps=6, rollout__update="in-flight", evaluation=None)
    asked = [row["prompt"] for row in read_lines(run / "samples.jsonl")]
    size = len(scored[0])
    assert size > 1
    assert sorted(scored) == sorted(asked[i : i + size] for i in range(0, len(asked), size))

    def stopping(number: int) -> float:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return slow(number)

    with pytest.raises(KeyboardInterrupt):
        overlapped("cut", 2, stopping, steps=6, rollout__update="in-flight")
    copied(slow)
    changes = {"steps": 6, "rollout__max_staleness": 2, "rollout__update": "in-flight", **APART}
    train(toy_config(tiny_model("shallow"), tmp_path / "cut", **changes), resume=True)
    prompts = lambda run: [(row["step"], row["prompt"]) for row in read_lines(run / "samples.jsonl")]  # noqa: E731
    parts = [row.name for row in read_timeline(run).rows]
    assert parts == ["generation", "rewards", "training", "sync"]
    for found in (run, tmp_path / "cut/run"):
        assert prompts(found) == prompts(in_turn)
        rows = read_lines(found / "samples.jsonl")
        assert {row["step"] - row["weight_version"] for row in rows} <= {0, 1, 2}
        assert [row["staleness_max"] <= 2 for row in read_lines(found / "metrics.jsonl")] == [True] * 6


ELSEWHERE = {
    "rollout__servers": ["http://127.0.0.1:9"], "rollout__dtype": "float32", "actor__compute_dtype": "bfloat16",
}  # fmt: skip
"""A generator that no replay can have: nothing answers at this port, and the policy does not sample in float32."""


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__update": "in-flight", **ELSEWHERE},
        pytest.param({"algorithm__advantage": "remax", "algorithm__epochs": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_replay_repeats_the_training_bit_for_bit(changes, overlapped, monkeypatch, tiny_model, tmp_path):
    """From the samples alone: neither its generator, which may be wider than the policy, nor a reward function runs."""
    slow = lambda number: (0.0, 0.04, 0.1)[number % 3]  # noqa: E731
    changes = {"steps": 4, "log_samples": True, **APART, **changes}
    run = overlapped("recorded", 2, slow, **changes)
    kept = sorted((run / "rollouts").iterdir())
    assert [path.name for path in kept] == [f"step_{step:08d}.safetensors" for step in range(1, 5)]

    def by_the_policy(engine, tokenizer, config, longest):
        assert config.backend == "hf"
        return build_rollout(engine, tokenizer, config, longest)

    monkeypatch.setattr(rlft_fast.trainer.models, "build_rollout", by_the_policy)
    monkeypatch.setattr(Judge, "score", None)
    config = toy_config(tiny_model("shallow"), tmp_path / "again", rollout__max_staleness=2, **changes)
    train(config, replay=run)
    again = tmp_path / "again/run"
    assert numbers(again) == numbers(run)
    assert (again / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()
    for name in ("hf/model.safetensors", *(f"rollouts/{path.name}" for path in kept)):
        assert (again / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("num_frozen", [0, 1])
def test_a_replay_of_the_first_steps_has_the_learning_rates_of_the_run(num_frozen, tiny_model, tmp_path):
    falling = {"learning_rate": 1e-2, "schedule": "linear"}
    changes: dict[str, Any] = {"actor__optimizer": falling, "log_samples": True}
    if num_frozen:  # steps in which the critic learns alone
        changes |= {"algorithm__advantage": "gae", "critic": {"max_tokens": 128, "freeze_actor_steps": num_frozen}}
    steps = 3 + num_frozen
    train(toy_config(tiny_model("shallow"), tmp_path / "recorded", steps=steps, **changes))
    again = toy_config(tiny_model("shallow"), tmp_path / "again", steps=steps - 1, **changes)
    train(again, replay=tmp_path / "recorded/run")
    recorded = comparable(tmp_path / "recorded/run")
    rates = [row["learning_rate"] for row in recorded if "learning_rate" in row]
    assert rates == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert comparable(tmp_path / "again/run") == recorded[:-1]


def numbers(run: Path) -> list[dict]:
    """Without the times of waits."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in comparable(run)]


def test_a_replay_that_cannot_be_is_refused(overlapped, tiny_model, tmp_path):
    run = overlapped("recorded", 1, steps=2, log_samples=True)
    make = lambda **changes: toy_config(tiny_model("shallow"), tmp_path / "again", **changes)  # noqa: E731
    with pytest.raises(ValueError, match=r"no samples of step 3 of 4 .* replay the steps before with --steps 2, or"):
        train(make(steps=4), replay=run)
    with pytest.raises(ValueError, match=r"no samples of step 1 of 4 .* to replay a run, set log_samples in the run"):
        train(make(steps=4), replay=tmp_path)
    with pytest.raises(ValueError, match="is the run to replay, and would be overwritten: name another folder"):
        train(make(steps=2).model_copy(update={"output_dir": str(run)}), replay=run)
    with pytest.raises(ValueError, match="set cluster to null"):
        train(make(steps=2, cluster={}), replay=run)
    (run / "rollouts/step_00000002.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"step_00000002\.safetensors is damaged"):
        train(make(steps=2), replay=run)


CURRICULUM = {
    "algorithm__curriculum": 0.5, "rollout__samples_per_prompt": 4, "log_samples": True, "steps": 5,
}  # fmt: skip


def draws(run: Path, max_staleness: int) -> tuple[list[list[int]], list[list[int]]]:
    """The rows that each step asked, and those of a curriculum that knows all steps more than S before it."""
    config = Config.parse(yaml.safe_load((run / "config.yaml").read_text()))
    prompts = load_training(config, load_tokenizer(config.model), None)
    asked, expected, first_prompt = [], [], 0
    for step in range(config.steps):
        curriculum = Curriculum(prompts, config)
        for known in range(step - max_staleness):
            kept = read_rollout(run, known + 1)
            curriculum.learn(kept["prompt_rows"].tolist(), Samples.of_tensors(kept))
        chosen = curriculum.choose(step, first_prompt)
        expected.append(chosen.rows)
        kept = read_rollout(run, step + 1)
        assert kept["num_streamed"] == chosen.num_streamed
        asked.append(kept["prompt_rows"].tolist())
        first_prompt += chosen.num_streamed
    return asked, expected


@pytest.mark.parametrize("update", ["drain", pytest.param("in-flight", marks=pytest.mark.slow)])
def test_a_curriculum_draws_by_the_rewards_that_every_schedule_knows(update, overlapped, copied, tiny_model, tmp_path):
    """Of all steps more than S before, whatever the latencies, and also after a stop."""
    changes = {**CURRICULUM, **APART, "rollout__update": update}
    whole = overlapped("whole", 2, **changes)
    asked, expected = draws(whole, 2)
    assert asked == expected
    shares = [row["drawn_again_share"] for row in read_lines(whole / "metrics.jsonl")]
    assert shares[:3] == [0, 0, 0]
    assert max(shares[3:]) > 0
    slow = lambda number: (0.0, 0.03, 0.08)[number % 3]  # noqa: E731
    last = {"drain": 3, "in-flight": 1}[update]  # in flight, one call answers all groups that may start

    def stopping(number: int) -> float:
        if number == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return slow(number)

    with pytest.raises(KeyboardInterrupt):
        overlapped("cut", 2, stopping, **changes)
    cut = tmp_path / "cut/run"
    assert 0 < len(read_lines(cut / "metrics.jsonl")) < 5
    copied(slow)
    train(toy_config(tiny_model("shallow"), tmp_path / "cut", rollout__max_staleness=2, **changes), resume=True)
    asked_after, expected = draws(cut, 2)
    assert asked_after == expected
    if update == "drain":
        assert comparable(cut) == comparable(whole)


@pytest.mark.parametrize(("before", "after"), [("drain", "in-flight"), ("in-flight", "drain")])
def test_samples_that_were_grouped_otherwise_are_sampled_again(before, after, overlapped, copied, tiny_model, tmp_path):
    """A step has one group, or one of each prompt. It asks what a curriculum draws that knows the steps before."""

    def stopping(number: int) -> float:
        if number == {"drain": 3, "in-flight": 1}[before]:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    changes = {**CURRICULUM, **APART, "steps": 6}
    with pytest.raises(KeyboardInterrupt):
        overlapped("run", 2, stopping, **changes, rollout__update=before)
    copied()
    run = tmp_path / "run/run"
    done = len(read_lines(run / "metrics.jsonl"))
    assert 0 < done < 5
    config = toy_config(
        tiny_model("shallow"), tmp_path / "run", rollout__max_staleness=2, **changes, rollout__update=after
    )
    with pytest.warns(UserWarning, match=r"of the checkpoint's \d+ groups of samples .* are sampled again"):
        train(config, resume=True, force=True)
    asked, expected = draws(run, 2)
    assert asked == expected
    assert {row["step"] - row["weight_version"] for row in read_lines(run / "samples.jsonl")} <= {0, 1, 2}


@pytest.mark.parametrize("update", ["drain", "in-flight"])
def test_samples_of_other_rewards_are_sampled_again(update, overlapped, copied, tiny_model, tmp_path):
    """With --force a run goes on with other rewards, and a baseline of greedy answers, which old samples lack."""

    def stopping(number: int) -> float:
        if number == {"drain": 3, "in-flight": 1}[update]:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    changes = {**APART, "steps": 6, "rollout__update": update}
    with pytest.raises(KeyboardInterrupt):
        overlapped("run", 2, stopping, **changes)
    copied()
    rewards = {f"{HERE}:mostly_even": 1.0, f"{HERE}:even_share": 2.0}
    config = toy_config(
        tiny_model("shallow"), tmp_path / "run", rollout__max_staleness=2, reward__function=rewards,
        algorithm__advantage="remax", **changes,
    )  # fmt: skip
    run = tmp_path / "run/run"
    done = len(read_lines(run / "metrics.jsonl"))
    assert 0 < done < 5
    with pytest.warns(UserWarning, match=r"groups of samples .* whose data, models or settings have changed"):
        train(config, resume=True, force=True)
    rows = read_lines(run / "samples.jsonl")
    assert [len(row["parts"]) for row in rows] == [2 if row["step"] > done else 1 for row in rows]
    for row in (row for row in rows if row["step"] > done):
        assert row["reward"] == pytest.approx(sum(rewards[name] * part for name, part in row["parts"].items()))


def failing(*numbers: int):
    def seconds(number: int) -> float:
        if number in numbers:
            raise RuntimeError("out of order")
        return 0.0

    return seconds


def test_a_failed_generator_is_started_again_between_updates(overlapped):
    """It has the weights of the moment then. No step is left out, and none comes twice."""
    with pytest.warns(
        UserWarning, match="the copy failed: out of order. the copy is started again, and samples step 3"
    ):
        run = overlapped("failing", 1, failing(2), steps=4)
    rows = read_lines(run / "samples.jsonl")
    assert [(row["step"], row["weight_version"]) for row in rows[::16]] == [(1, 1), (2, 1), (3, 3), (4, 3)]
    assert len(rows) == 4 * 16
    with pytest.raises(RolloutError, match="failed: out of order"), pytest.warns(UserWarning, match="step 1"):
        overlapped("broken", 1, failing(0), steps=4)


def test_a_wait_is_told():
    """Of what, and for how long: a generator that is stuck does not stop a run in silence."""
    release = threading.Event()
    overlap = Overlap(Schedule(1, 3), {}, lambda step: release.wait(), lambda: None, "vLLM", 60, named_after_s=0.01)
    threading.Timer(0.1, release.set).start()
    with pytest.warns(UserWarning, match="has waited 0 s for the samples of step 1: vLLM or a reward function is slow"):
        assert overlap.take()
    overlap.close()
    overlap.join()
    assert not any(thread.name == "rollout" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore:training has waited")
def test_a_stuck_generator_ends_the_run(overlapped, tmp_path, monkeypatch):
    """With what is known, after timeout_minutes. Nothing waits for its thread."""
    monkeypatch.setattr(rlft_fast.trainer.collect.overlap, "_JOINED_WITHIN_S", 0.01)
    release = threading.Event()
    stuck = lambda number: float(number == 2 and release.wait())  # noqa: E731
    try:
        with pytest.raises(RolloutError, match="samples of step 3 did not come within 1 s: the copy or a reward funct"):
            overlapped("stuck", 1, stuck, steps=4, timeout_minutes=0.02)
        assert [thread.daemon for thread in threading.enumerate() if thread.name == "rollout"] == [True]
        assert (tmp_path / "stuck/run/checkpoints/step_00000002").is_dir()
    finally:
        release.set()
        for thread in [thread for thread in threading.enumerate() if thread.name == "rollout"]:
            thread.join(30)


def fails_in_step_2(completion_ids: list[list[int]], **_) -> list[float]:
    fails_in_step_2.calls += 1
    if fails_in_step_2.calls == 2:
        raise RuntimeError("no rubric")
    return [float(len(ids)) for ids in completion_ids]


fails_in_step_2.calls = 0


def test_a_step_that_fails_beside_a_stuck_generator_is_told_and_saved(overlapped, tmp_path, monkeypatch):
    """The samples of step 3 never come, and the run does not wait for them."""
    monkeypatch.setattr(rlft_fast.trainer.collect.overlap, "_JOINED_WITHIN_S", 0.01)
    release = threading.Event()
    stuck = lambda number: float(number == 2 and release.wait())  # noqa: E731
    own = {"reward__function": f"{__file__}:fails_in_step_2", "timeout_minutes": 0.02}
    try:
        with pytest.raises(RewardError, match="no rubric"):
            overlapped("failing", 2, stuck, steps=4, checkpoint__every=0, **own)
        assert (tmp_path / "failing/run/checkpoints/step_00000001").is_dir()
    finally:
        release.set()
        for thread in [thread for thread in threading.enumerate() if thread.name == "rollout"]:
            thread.join(30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__backend": "hf"}, "hf generates in the process that trains: set backend to vllm"),
        ({"rollout__vllm": {}}, "vllm generates in the process that trains: set backend to vllm with vllm.process"),
        ({"algorithm__max_refills": 1, "algorithm__skip_equal_groups": True}, "cannot go with algorithm.max_refills"),
        ({"reward__model": "somewhere"}, "cannot go with a reward model"),
        ({"cluster": {}}, "cannot go with a cluster whose workers generate: they train, too. Give cluster.generators"),
        ({"rollout__max_staleness": 0, "rollout__update": "in-flight"}, "update is in-flight, but max_staleness is 0"),
    ],
)
def test_refusals(changes, message, tmp_path):
    values = toy_values(Path("model"), tmp_path, **{**APART, "rollout__max_staleness": 1, **changes})
    with pytest.raises(ValueError, match=message):
        Config.parse(values)


def test_importance_weights_are_the_default_of_stale_samples(tmp_path):
    def correction(**changes) -> str:
        values = toy_values(Path("model"), tmp_path, **APART, **changes)
        return Config.parse(values).algorithm.rollout_correction

    assert correction() == correction(rollout__max_staleness=0) == "none"
    assert correction(rollout__max_staleness=1) == "token-truncate"
    assert correction(rollout__max_staleness=1, algorithm__epochs=2) == "token-truncate"
    assert correction(rollout__max_staleness=1, algorithm__rollout_correction="none") == "none"
