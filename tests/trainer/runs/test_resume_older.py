"""A run that commit 755bc9d has left after its second step goes on with this code."""

import json
import shutil
from pathlib import Path

import pytest

from rlft_fast.trainer import train
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import comparable, toy_config

OLDER = Path(__file__).with_name("run_755bc9d")
OPTIONS = {
    "algorithm__kl_coef": 0.01, "algorithm__mini_batches": 2, "algorithm__advantage": "gae",
    "critic": {"max_tokens": 64}, "checkpoint__every": 2,
}  # fmt: skip


def test_its_next_step_has_the_recorded_numbers(tmp_path):
    """Recorded from the older code with samples drawn by seeds of their own; another machine rounds differently."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = save_tiny_model("llama", tmp_path / "model", **sizes, num_attention_heads=2, num_key_value_heads=1)
    shutil.copytree(OLDER, tmp_path / "run")
    config = toy_config(model, tmp_path, steps=3, **OPTIONS)
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    train(config, resume=True)
    expected = json.loads((OLDER / "step_3.json").read_text())
    (row,) = [row for row in comparable(tmp_path / "run") if row["step"] == 3]
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
