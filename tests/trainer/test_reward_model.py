"""A reward model that fails in the middle of a run."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from rlft_fast.rewards import RewardError
from rlft_fast.trainer import train
from tests.trainer.toy import toy_config, write_rows


@pytest.fixture
def broken(tiny_model, tmp_path):
    """A reward model whose scores are NaN, as of one that overflows its dtype."""
    shutil.copytree(tiny_model("llama-reward"), tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["score.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "broken"


@pytest.mark.parametrize("evaluates", [False, True])
def test_scores_that_are_no_numbers_end_the_run(evaluates, tiny_model, broken, tmp_path, capsys):
    changes = {}
    if evaluates:
        changes["evaluation__path"] = str(write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog"}]))
    with pytest.raises(RewardError, match=r"the reward model scored an answer to the prompt .* with nan"):
        train(toy_config(tiny_model("llama"), tmp_path, reward={"model": str(broken)}, **changes))
    assert "the reward function failed after step 0" in capsys.readouterr().out
