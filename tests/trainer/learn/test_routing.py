"""Routing replay in a run: the experts of the pass that gives log π_old are those of the update."""

import pytest

from rlft_fast.trainer import train
from tests.trainer.toy import read_lines, toy_config

REPLAY = {"algorithm__routing_replay": True, "steps": 1}


def row_of(model, folder, learning_rate: float, **changes) -> dict[str, float]:
    """The numbers of a step with four mini-batches. A critic has experts of its own, and a reference its own choice."""
    changes |= {"algorithm__mini_batches": 2, "algorithm__epochs": 2, "algorithm__advantage": "gae", "critic": {}}
    rate = {"actor__optimizer__learning_rate": learning_rate, "algorithm__kl_coef": 0.1}
    train(toy_config(model, folder, **changes, **rate, **REPLAY, actor__router_aux_loss_coef=0.01))
    (row,) = [row for row in read_lines(folder / "run" / "metrics.jsonl") if "ratio_max" in row]
    return row


def test_an_update_has_the_experts_of_the_pass_before(tiny_model, tmp_path):
    still = row_of(tiny_model("mixtral"), tmp_path / "still", 1e-30)
    assert still["routing_agreement"] == 1.0
    assert still["ratio_max"] == pytest.approx(1.0, abs=1e-5)  # micro-batches differ, and float32 rounds
    moved = row_of(tiny_model("mixtral"), tmp_path / "moved", 0.03)
    assert 0.2 < moved["routing_agreement"] < 0.99
    assert still["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert still["router_aux_loss"] > 0


def test_a_model_without_experts(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"LlamaModel has no routers of experts .* leave .* routing_replay out"):
        train(toy_config(tiny_model("llama"), tmp_path, **REPLAY))
