"""The benchmark of the trainers runs all heads on a tiny model, and its report adds up."""

import dataclasses
import json

import pytest
from torch import Tensor

from benchmarks.integrations.compare import check, compare
from benchmarks.integrations.comparison import Comparison
from benchmarks.integrations.report import write_report
from benchmarks.integrations.workload import FLOOR, OURS, THEIRS, TRAINERS, Task, Workload, make_task

WORK = Workload(num_rows=4, prompt=3, completion=5)


@pytest.fixture(scope="module")
def comparison(tiny_model) -> Comparison:
    return compare(str(tiny_model("llama-tied")), WORK, rounds=1)


@pytest.mark.slow
def test_every_trainer_runs_with_every_head(comparison):
    """The comparison itself raises an error if heads disagree."""
    assert set(comparison.results.measured) == {f"{name} | {way}" for name in TRAINERS for way in (OURS, THEIRS, FLOOR)}
    assert list(comparison.agreement) == [*TRAINERS]


@pytest.fixture
def task(tiny_model, tmp_path) -> Task:
    return make_task("SFT", str(tiny_model("llama-tied")), WORK, str(tmp_path))


def test_a_head_that_did_not_run_is_an_error(task):
    other = dataclasses.replace(task, runs=task.runs | {OURS: task.runs[THEIRS]})
    with pytest.raises(RuntimeError, match="SFT with rlft_fast ran our head: False, its own head: True"):
        check(other)


def test_other_gradients_are_an_error(task):
    def run() -> Tensor:
        loss = task.runs[OURS]()
        for parameter in task.parameters[OURS]:
            parameter.grad *= 1 + 1e-4
        return loss

    with pytest.raises(RuntimeError, match="the heads of SFT disagree"):
        check(dataclasses.replace(task, runs=task.runs | {OURS: run}))


@pytest.mark.slow
def test_the_report_adds_up(comparison, tmp_path):
    write_report(comparison, WORK, tmp_path)
    text = (tmp_path / "integrations.md").read_text()
    assert "all 28 positions that have a successor; ours projects the 20 positions" in " ".join(text.split())
    raw = json.loads((tmp_path / "integrations.json").read_text())
    assert len(raw["bars"]) == 8
    seconds = {way: raw["measured"][f"DPO | {way}"]["seconds"][0] for way in (OURS, THEIRS)}
    time = next(bar["value"] for bar in raw["bars"] if bar["name"] == "DPO: time / TRL's")
    assert time == seconds[OURS] / seconds[THEIRS]
