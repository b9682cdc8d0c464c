"""The example programs do what they say."""

import json
import random
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
SUMS = ((1, 2), (7, 5), (20, 11), (3, 19), (8, 8))


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLES / "reward_model.py"))


@pytest.fixture
def samples(tmp_path):
    """Completions as a run writes them: right, wrong, right but cut off, and without an answer."""
    lines = [
        {"prompt": f"{a} + {b} = ", "completion": text, "reward": reward, "finish_reason": reason}
        for a, b in SUMS
        for text, reward, reason in (
            (f"{a + b}", 1.0, "stop"), (f"{a} + {b} = {a + b}", 1.0, "stop"), (f"{a + b + 1}", 0.0, "stop"),
            (f"{a + b - 10}", 0.0, "stop"), (f"{a + b} and {a}", 0.5, "length"), ("Let us see", -0.5, "length"),
        )
    ]  # fmt: skip
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_reward_model_learns_what_is_right(example, samples, tiny_model, tmp_path):
    """A tiny model cannot add, but learns the answers to a few problems by heart."""
    tokenizer = load_tokenizer(tiny_model("llama"))
    answers, _ = example["read_answers"](samples, random.Random(0))
    example["write_classifier"](tiny_model("llama"), tmp_path / "start")
    config = EngineConfig(max_tokens=2048, optimizer=OptimizerConfig(learning_rate=1e-2))
    engine = FSDPEngine(str(tmp_path / "start"), config, head="score", num_training_steps=60).initialize()
    before = example["pairwise_accuracy"](engine, answers, tokenizer)
    example["train"](engine, answers, tokenizer, 60, random.Random(0))
    after = example["pairwise_accuracy"](engine, answers, tokenizer)
    assert before < 0.7
    assert after > 0.85


def test_reward_model_reads_answers_with_any_character(example, tmp_path):
    """Some characters end a line for `str.splitlines`, but do not end a line of a JSON-lines file."""
    text = "one\u2028two\u2029three\x85four"
    line = {"prompt": "count", "completion": text, "reward": 1.0, "finish_reason": "stop"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n\n", encoding="utf-8")
    answers, held_out = example["read_answers"](tmp_path / "samples.jsonl", random.Random(0))
    assert [answer.text for answer in (answers | held_out)["count"]] == [text]


def test_reward_model_is_trained_on_right_and_wrong_answers(example, samples, tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    training, held_out = example["read_answers"](samples, random.Random(0))
    assert not training.keys() & held_out.keys()
    answers = training | held_out
    assert len(answers) == len(SUMS)
    batch = example["make_batch"](answers, tokenizer)
    last = batch.cu_seqlens[1:].long() - 2
    assert batch.reward_T[last].view(len(SUMS), 6).tolist() == [[1, 1, 0, 0, 0, 0]] * len(SUMS)
    assert batch.loss_mask_T.sum() == 2 * batch.num_sequences
    assert batch.loss_mask_T[last].all()
    assert set(batch.reward_T[batch.loss_mask_T].tolist()) == {0.0, 0.5, 1.0}
    texts = [tokenizer.decode(ids) for ids in batch.input_ids_T.split(batch.lengths.tolist())]
    wanted = [f"{prompt}{answer.text}" for prompt, some in answers.items() for answer in some]
    end = tokenizer.eos_token
    assert [text.replace(end, "") for text in texts] == wanted
    assert [text.count(end) for text in texts] == [2, 2, 2, 2, 1, 1] * len(SUMS)  # one that never runs


def test_reward_model_folder_loads_in_transformers(example, samples, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(example["main"].__globals__, "HELD_OUT_SHARE", 0.4)
    example["main"](tiny_model("llama"), samples, tmp_path / "out", 1, 1e-4)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").score.weight.shape == (1, 32)
    assert "scores higher than a wrong one in 0." in capsys.readouterr().out
