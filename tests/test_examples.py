"""The example programs do what they say."""

import random
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
PROBLEMS = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a, b in ((1, 2), (7, 5), (20, 11), (3, 19))]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLES / "reward_model.py"))


def test_reward_model_learns_what_is_right(example, tiny_model, tmp_path):
    """A tiny model cannot add, but learns the answers to a few problems by heart."""
    tokenizer = load_tokenizer(tiny_model("llama"))
    example["write_classifier"](tiny_model("llama"), tmp_path / "start")
    config = EngineConfig(max_tokens=2048, optimizer=OptimizerConfig(learning_rate=1e-2))
    engine = FSDPEngine(str(tmp_path / "start"), config, head="score", num_training_steps=60).initialize()
    before = example["pairwise_accuracy"](engine, PROBLEMS, tokenizer)
    example["train"](engine, PROBLEMS, tokenizer, 60)
    after = example["pairwise_accuracy"](engine, PROBLEMS, tokenizer)
    assert before < 0.7
    assert after > 0.85


def test_reward_model_is_trained_on_right_and_wrong_answers(example, tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    batch = example["make_batch"](PROBLEMS, 2, 6, tokenizer, random.Random(0))
    labels = batch.reward_T[batch.cu_seqlens[1:].long() - 1].view(4, 6)
    assert labels.tolist() == [[1, 1, 0, 0, 0, 0]] * 4
    assert set(batch.reward_T[batch.loss_mask_T].tolist()) == {0.0, 0.5, 1.0}
    assert (batch.reward_T[batch.cu_seqlens[:-1].long()] == 0.5).all()
    for ids, right, row in zip(
        batch.input_ids_T.split(batch.lengths.tolist()), labels.flatten(), range(24), strict=True
    ):
        problem = PROBLEMS[row // 6]
        text = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(problem["prompt"])
        number = text.rstrip(".").split(" ")[-1]
        assert (number == problem["answer"]) == bool(right)


def test_reward_model_folder_loads_in_transformers(example, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(example["main"].__globals__, "PROMPTS_PER_STEP", 2)
    example["main"](tiny_model("llama"), tmp_path / "out", 1, 1e-4)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").score.weight.shape == (1, 32)
    assert "scores higher than a wrong one in 0." in capsys.readouterr().out
