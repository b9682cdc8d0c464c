"""The benchmark of a whole step runs both sides on a tiny model, with the same prompts."""

import shutil

import pytest

from benchmarks.step.compare import OURS, check_same_work, run, timed_tokens
from benchmarks.step.report import write_report
from benchmarks.step.workload import Workload

pytest.importorskip("reasoning_gym")


@pytest.mark.slow
def test_both_sides_make_the_same_step(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    work = Workload(max_new_tokens=4)
    sides = run(str(model), work, rounds=1, threads=1, names=[OURS, "TRL, 16 sequences"])
    difference = check_same_work(sides)
    ours, theirs = sides
    assert 0.95 * 256 < timed_tokens(ours) <= 64 * 4  # few samples end early
    assert abs(ours.steps[0]["reward"] - theirs.steps[0]["reward"]) < 0.1
    for side in sides:
        for step in side.steps:
            assert min(step["parts"].values()) >= 0
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"], rel=0.02, abs=0.05)
    ratios = write_report(sides, work, difference, threads=1, output=tmp_path / "report")
    assert ratios["time_ratio"] == ours.median_s / theirs.median_s
    assert "TRL, 16 sequences" in (tmp_path / "report" / "step.md").read_text()
