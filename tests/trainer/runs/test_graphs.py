"""A whole run whose passes and decode steps are replayed."""

from pathlib import Path

import pytest

from rlft_fast.trainer import read_metrics, train
from tests.support.machine.tape import Tape, record_on_cpu
from tests.trainer.toy import toy_config


def refuse(function):
    raise RuntimeError("nothing is recorded")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """All but times and memory."""
    other = ("time", "seconds", "tokens_per_second", "tflops", "mfu", "memory")
    return [{key: x for key, x in row.items() if not key.startswith(other)} for row in read_metrics(folder)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cuda_graphs. .* could not be recorded")
def test_a_run_with_graphs_has_the_numbers_of_the_run_that_falls_back(tiny_model, tmp_path, monkeypatch):
    found = []
    for recorder in (Tape(), refuse):
        record_on_cpu(monkeypatch, recorder)
        changes = {"actor__cuda_graphs": True, "actor__compute_dtype": "bfloat16", "steps": 4}
        config = toy_config(tiny_model("shallow"), tmp_path / type(recorder).__name__, **changes)
        train(config)
        found.append(metrics_of(Path(config.output_dir)))
        assert recorder is refuse or recorder.num_replayed > 20
    assert found[0] == found[1]
    assert [row["step"] for row in found[0]] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 for row in found[0])
