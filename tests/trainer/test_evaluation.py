"""Held-out sets in a run, and of a model alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlft_fast.trainer.evaluation
from rlft_fast.cli import main
from rlft_fast.rollout.factory import _sampled_model
from rlft_fast.trainer import train
from tests.support.runs.copied_generator import copied_rollout
from tests.trainer.toy import HERE, comparable, even_share, toy_config, toy_values, write_rows


def negative_or_none(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None in the first evaluation of two sets, later a number below 0; always None for one of the sets."""
    negative_or_none.calls += 1  # type: ignore[attr-defined]
    if "sand" in prompts or negative_or_none.calls <= 2:  # type: ignore[attr-defined]
        return [None] * len(prompts)
    return [(share or 0.0) - 1 for share in even_share(completion_ids)]


negative_or_none.calls = 0  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def sampled(tiny_model, tmp_path_factory) -> Path:
    """A run with two held-out sets and four sampled answers to each prompt."""
    folder = tmp_path_factory.mktemp("sampled")
    words = {"wet": ("sea", "ice", "fog"), "dry": ("sand", "mud")}
    paths = {
        name: str(write_rows(folder / f"{name}.jsonl", [{"prompt": word} for word in own]))
        for name, own in words.items()
    }
    evaluation = {"path": paths, "every": 1, "samples_per_prompt": 4, "temperature": 1.0}
    train(toy_config(tiny_model("shallow"), folder, steps=4, evaluation=evaluation, checkpoint__best="pass_at_4_wet"))
    return folder / "run"


def test_eval_writes_and_shows_the_answers(sampled, tmp_path, capsys):
    """Two sets of 3 and 2 prompts, four answers to each, one prompt in a batch."""
    file = tmp_path / "answers.jsonl"
    options = ["--samples", str(file), "--show", "1", "--rollout.batch_size", "4"]
    capsys.readouterr()
    assert main(["eval", str(sampled / "hf"), str(sampled / "config.yaml"), *options]) == 0
    captured = capsys.readouterr()
    metrics = json.loads(captured.out)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [("wet", word) for word in ("sea", "ice", "fog")] + [("dry", word) for word in ("sand", "mud")]
    assert [(row["set"], row["prompt"]) for row in rows] == [pair for pair in asked for _ in range(4)]
    for name in ("wet", "dry"):
        rewards = [row["reward"] for row in rows if row["set"] == name]
        assert sum(rewards) / len(rewards) == pytest.approx(metrics[f"accuracy_{name}"])
    assert captured.err.splitlines()[0] == "answered 0 of 5 prompts"
    assert "answered 5 of 5 prompts" in captured.err
    assert [word in captured.err for word in ("sea", "ice", "sand", "mud")] == [True, False, True, False]
    assert main(["eval", str(sampled / "hf"), str(sampled / "config.yaml"), *options]) == 1  # the file stays
    assert f"--samples {file} is there already" in capsys.readouterr().err


def test_answers_that_cannot_be_written_do_not_cost_the_numbers(sampled, tmp_path, capsys):
    metrics = evaluated(sampled / "hf", sampled, capsys)
    file = tmp_path / ("a" * 300)  # longer than a name may be, which the system says when it is written
    assert main(["eval", str(sampled / "hf"), str(sampled / "config.yaml"), "--samples", str(file)]) == 1
    captured = capsys.readouterr()
    assert "File name too long" in captured.err
    assert json.loads(captured.out) == metrics


def evaluated(model: Path, run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, float]:
    capsys.readouterr()  # of the run
    assert main(["eval", str(model), str(run / "config.yaml"), *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_several_sets_and_samples(sampled):
    rows = [row for row in comparable(sampled) if "accuracy" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        for kind in ("accuracy", "pass_at_4"):
            assert row[kind] == pytest.approx((row[f"{kind}_wet"] + row[f"{kind}_dry"]) / 2)
        assert row["accuracy_wet"] < row["pass_at_4_wet"] <= 1  # the mean of four shares of even tokens, and the best


def test_a_model_alone_has_the_numbers_of_its_run(sampled, capsys):
    last = comparable(sampled)[-1]
    metrics = evaluated(sampled / "hf", sampled, capsys)
    assert metrics == {name: last[name] for name in metrics}
    assert len(metrics) == 6
    for name in ("wet", "dry"):  # alone, in no order of sets
        own = evaluated(sampled / "hf", sampled, capsys, "--evaluation.path", str(sampled.parent / f"{name}.jsonl"))
        assert own == {"accuracy": last[f"accuracy_{name}"], "pass_at_4": last[f"pass_at_4_{name}"]}


def test_a_model_of_a_run_with_more_processes(sampled, tiny_model, tmp_path, capsys):
    """This is one process. What a user says counts all the same."""
    values, many = yaml.safe_load((sampled / "config.yaml").read_text()), {"shard_size": 2, "sequence_parallel": 2}
    values["actor"] |= many
    values["reward"]["models"] = {"helpful": {"model": str(tiny_model("llama-reward")), "weight": 0.0, **many}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))  # the sets have another order
    last = comparable(sampled)[-1]
    metrics = evaluated(sampled / "hf", tmp_path, capsys)
    assert metrics == {name: last[name] for name in metrics}
    for section in ("actor", "reward.models.helpful"):
        options = [f"--{section}.shard_size", "3"]
        assert main(["eval", str(sampled / "hf"), str(tmp_path / "config.yaml"), *options]) == 1
        assert "shard_size is 3, which does not divide the 1 ranks" in capsys.readouterr().err


def test_a_model_of_a_run_that_sends_adapters_is_sent_whole(sampled, monkeypatch, capsys):
    """The exported model has no adapters, although the run trained some. A copy of the model stands for vLLM."""

    def by_a_copy(engine, tokenizer, config, longest):
        assert config.backend == "vllm"
        assert _sampled_model(engine, tokenizer, config).adapter is None
        return copied_rollout(engine)

    monkeypatch.setattr(rlft_fast.trainer.evaluation, "build_rollout", by_a_copy)
    options = ["--actor.lora.rank", "2", "--rollout.backend", "vllm", "--rollout.vllm.adapter", "true"]
    last = comparable(sampled)[-1]
    metrics = evaluated(sampled / "hf", sampled, capsys, *options)
    assert metrics == {name: last[name] for name in metrics}


def test_answers_are_as_long_as_in_training_unless_said(sampled, capsys):
    lengths = ["--reward.function", f"{HERE}:length"]  # tokens / 10
    assert 0.5 < evaluated(sampled / "hf", sampled, capsys, *lengths)["accuracy"] <= 0.6
    assert (
        0.2
        < evaluated(sampled / "hf", sampled, capsys, *lengths, "--evaluation.max_new_tokens", "3")["accuracy"]
        <= 0.3
    )


def test_the_best_policy_is_kept(sampled, capsys):
    rows = [row for row in comparable(sampled) if "accuracy" in row]
    best = max(rows, key=lambda row: row["pass_at_4_wet"])  # the first of equals
    summary = json.loads((sampled / "summary.json").read_text())
    assert (summary["best_step"], summary["pass_at_4_wet_best"]) == (best["step"], best["pass_at_4_wet"])
    assert best["step"] != 4  # else the test compares with the last policy
    metrics = evaluated(sampled / "best", sampled, capsys)
    assert metrics == {name: best[name] for name in metrics}


def test_a_set_without_a_judged_answer_has_no_number(tiny_model, tmp_path):
    """It is neither the best among negative numbers, nor a 0 in the mean over the sets."""
    words = {"wet": ("sea", "ice", "fog"), "dry": ("sand", "mud")}
    paths = {
        name: str(write_rows(tmp_path / f"{name}.jsonl", [{"prompt": word} for word in own]))
        for name, own in words.items()
    }
    evaluation = {"path": paths, "max_new_tokens": 6, "every": 1, "function": f"{__file__}:negative_or_none"}
    config = toy_config(tiny_model("shallow"), tmp_path, steps=2, evaluation=evaluation, checkpoint__best="accuracy")
    with pytest.warns(UserWarning, match="left out every answer to the held-out prompts of the set 'dry'"):
        summary = train(config)
    rows = [row for row in comparable(tmp_path / "run") if "reward_mean" not in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() == {"step", "accuracy", "accuracy_wet"}
        assert row["accuracy"] == row["accuracy_wet"] < 0
    assert (summary["accuracy_before"], summary["accuracy_dry_after"]) == (None, None)
    assert summary["accuracy_best"] == max(row["accuracy"] for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"path": {}}}, "path names no set"),
        ({"evaluation": {"path": {"a b": "x"}}}, "a set named 'a b'"),
        ({"evaluation": {"path": "x", "samples_per_prompt": 2}}, "with temperature 0 all answers"),
        ({"checkpoint__best": "accuracy"}, "checkpoint.best is 'accuracy', expected null"),
        ({"evaluation": {"path": "x"}, "checkpoint__best": "reward"}, "'reward', expected one of accuracy"),
    ],
)
def test_settings_that_cannot_be(changes, message, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tmp_path / "no model", tmp_path, **changes)))
    assert main(["train", str(config)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_evaluated(sampled, tiny_model, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tiny_model("shallow"), tmp_path)))
    assert main(["eval", str(sampled / "hf"), str(config)]) == 1
    assert "the configuration has no evaluation section" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((sampled / "hf" / name).read_bytes())
    assert main(["eval", str(bare), str(sampled / "config.yaml")]) == 1
    error = capsys.readouterr().err
    assert str(bare) in error
    assert "tokenizer" in error
