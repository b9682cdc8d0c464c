"""The table of methods comes from the logs of complete runs, and each run belongs to its example."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks.methods import race
from benchmarks.methods.report import Result, table, write_report
from rlft_fast import demo
from rlft_fast.config import Config
from rlft_fast.trainer import claim
from tests.trainer.toy import toy_values, write_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KEPT = {"config.yaml", "metrics.jsonl", "environment.json"}


def write_run(folder: Path, accuracy: list[float], rewards: list[float], config: Config | None = None) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 0, "accuracy": accuracy[0]}]
    lines += [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, start=1)]
    lines += [{"step": len(rewards), "accuracy": accuracy[1]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (folder / "config.yaml").write_text(config.to_yaml())
    return folder


def test_every_method_has_an_example_and_a_line_of_its_own():
    for name, method in race.METHODS.items():
        config = Config.load(race.Run(name, 0).example)
        assert config.evaluation is not None
        assert config.evaluation.every
        assert config.data.path == "runs/demo/data/train.jsonl"
        assert bool(method.differs) == (name != "grpo_sums")
        assert (config.reward.model is not None) == (method.reward != "right answers")


def test_a_run_is_complete_if_it_is_kept_with_its_example(tmp_path, monkeypatch):
    shutil.copytree(race._ROOT / "examples", tmp_path / "examples")
    monkeypatch.setattr(race, "_ROOT", tmp_path)
    run = race.Run("rloo", 2)
    assert not run.is_complete()
    config = Config.load(tmp_path / run.example, run.overrides)
    write_run(tmp_path / run.folder, [0.25, 0.75], [0.1, 0.2], config)
    run._keep({"torch": "2"})
    assert run.is_complete()
    assert not race.Run("gspo", 2).is_complete()
    assert str(Path.home()) not in (tmp_path / run.kept / "config.yaml").read_text()
    (result,) = race.results()
    assert (result.name, result.method, result.seed, result.steps) == ("rloo-seed2", "RLOO", 2, 2)
    (tmp_path / run.kept / "config.yaml").write_text(config.model_copy(update={"steps": 99}).to_yaml())
    assert not run.is_complete()
    assert race.results() == []


def test_the_demo_accepts_the_problems_in_its_folder(tiny_model, tmp_path, monkeypatch):
    shutil.copytree(race._ROOT / "examples", tmp_path / "examples")
    monkeypatch.setattr(race, "_ROOT", tmp_path)
    monkeypatch.setattr(demo, "smollm2_folder", lambda: tiny_model("llama"))
    for _ in range(2):
        race.prepare(["grpo_sums"])
        output = tmp_path / "runs" / "demo"
        assert (output / "data" / "train.jsonl").is_file()
        claim(output)


@pytest.mark.slow
def test_a_run_is_made_once_and_kept(tiny_model, tmp_path, monkeypatch):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}])
    changes = {"evaluation": {"path": str(held_out), "max_new_tokens": 6}, "rollout__samples_per_prompt": 2}
    (tmp_path / "examples").mkdir()
    values = toy_values(tiny_model("llama"), tmp_path, steps=2, **changes)
    (tmp_path / "examples" / "rloo.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(race, "_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = race.Run("rloo", 0)
    run.make(threads=1)
    assert {path.name for path in (tmp_path / run.kept).iterdir()} == KEPT
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / run.folder).iterdir()}
    assert left.keys() >= {"output.txt", "metrics.jsonl", "summary.json"}
    assert not left.keys() & {"checkpoints", "hf"}
    run.make(threads=1)
    assert left == {path.name: path.stat().st_mtime_ns for path in (tmp_path / run.folder).iterdir()}
    (result,) = race.results()
    assert (result.method, result.seed, result.steps) == ("RLOO", 0, 2)


def test_report(tmp_path):
    results = [
        Result.read(write_run(tmp_path / name, accuracy, [0.1, 0.5]), *labels)
        for name, accuracy, labels in [
            ("grpo-seed0", [0.25, 0.75], ("GRPO", "", "right answers", 0)),
            ("grpo-seed2", [0.25, 1.0], ("GRPO", "", "right answers", 2)),
            ("ppo-seed0", [0.25, 0.5], ("PPO", "a critic", "score", 0)),
        ]
    ]
    logs = "../benchmarks/results/methods"
    lines = table(results).splitlines()
    assert lines == [
        "| method | steps | before | seed 0 | seed 2 | mean | what differs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        f"| GRPO | 2 | 0.250 | [0.750]({logs}/grpo-seed0/metrics.jsonl) | [1.000]({logs}/grpo-seed2/metrics.jsonl) "
        "| 0.875 |  |",
        f"| PPO | 2 | 0.250 | [0.500]({logs}/ppo-seed0/metrics.jsonl) |  | 0.500 | a critic |",
    ]
    shutil.copy(DOCS / "methods.md", tmp_path)
    write_report(results, tmp_path)
    write_report(results, tmp_path)  # replaces what it wrote
    text, before = ((folder / "methods.md").read_text() for folder in (tmp_path, DOCS))
    assert text.count(lines[2]) == 1
    assert text.split("<!-- results")[0] == before.split("<!-- results")[0]
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    (tmp_path / "methods.md").write_text("no markers")
    with pytest.raises(ValueError, match=r"3 results for .*methods.md, expected some, and the lines"):
        write_report(results, tmp_path)
