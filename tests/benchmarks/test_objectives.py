"""The benchmark of the objectives runs both sides on a tiny model, with the same rows."""

import shutil

import pytest

from benchmarks.objectives.compare import OBJECTIVES, OURS, PADDING_FREE, THEIRS, run
from benchmarks.objectives.report import bars_of, difference, write_report
from benchmarks.objectives.workload import Workload

pytest.importorskip("trl")


@pytest.mark.slow
def test_both_sides_make_the_same_step(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    work = Workload(num_rows=4, num_pairs=2, prompt=8, answer=8, pair_prompt=16, pair_answer=4)
    found = run(str(model), work, 1, 1, [*OBJECTIVES], [OURS, THEIRS, PADDING_FREE])
    assert [len(sides) for sides in found.values()] == [3, 2, 2]
    for sides in found.values():
        assert difference(sides, "loss") < 1e-4
        assert difference(sides, "grad_norm") < 1e-4
        assert all(step["cpu_seconds"] > 0 for side in sides for step in side.steps)
    holds = write_report(found, work, 1, tmp_path / "report")
    assert holds == all(bar.holds for objective, sides in found.items() for bar in bars_of(objective, sides))
    assert "| DPO: time / TRL, padded" in (tmp_path / "report" / "objectives.md").read_text()
