"""The example programs do what they say."""

import json
import random
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from rlft_fast.cli import main
from rlft_fast.envs import EnvironmentClass, EnvironmentPool
from tests.trainer.toy import read_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
SUMS = ((1, 2), (7, 5), (20, 11), (3, 19), (8, 8))


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLES / "reward_model.py"))


@pytest.fixture
def samples(tmp_path):
    """Completions as a run writes them: right, right but cut off once, wrong, without an answer, and empty."""
    lines = [
        {"prompt": f"{a} + {b} = ", "completion": text, "reward": reward, "finish_reason": reason}
        for a, b in SUMS
        for text, reward, reason in (
            (f"{a + b}", 1.0, "stop"), (f"{a} + {b} = {a + b}", 1.0, "stop"), (f"{a + b}", 0.5, "length"),
            (f"{a + b + 1}", 0.0, "stop"), (f"{a + b} and {a}", 0.5, "length"), ("", -0.5, "stop"),
        )
    ]  # fmt: skip
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_pairs_have_a_right_answer_and_a_wrong_answer(example, samples, tmp_path):
    example["write_pairs"].__globals__["HELD_OUT_SHARE"] = 0.4
    example["write_pairs"](samples, tmp_path)
    train, held_out = (read_lines(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    expected = {
        (f"{a} + {b} = ", chosen, rejected)
        for a, b in SUMS
        for chosen in (f"{a + b}", f"{a} + {b} = {a + b}")
        for rejected in (f"{a + b + 1}", f"{a + b} and {a}")
    }
    assert sorted(tuple(row.values()) for row in train + held_out) == sorted(expected)


def test_answers_may_have_any_character(example, tmp_path):
    """Some characters end a line for `str.splitlines`, but do not end a line of a JSON-lines file."""
    text = "one\u2028two\u2029three\x85four"
    line = {"prompt": "count", "completion": text, "reward": 1.0, "finish_reason": "stop"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert example["read_answers"](tmp_path / "samples.jsonl") == {"count": {text: True}}
    assert [*example["make_pairs"]({text: True, "": False}, random.Random(0))] == []


def test_a_reward_model_learns_the_pairs(example, samples, tiny_model, tmp_path, monkeypatch):
    """A tiny model cannot add, but learns the answers to a few problems by heart. The commands are the example's."""
    example["main"](tiny_model("llama"), samples, tmp_path / "runs" / "reward_pairs")
    pairs = tmp_path / "runs" / "reward_pairs"
    monkeypatch.chdir(tmp_path)
    learns = ["--actor.optimizer.learning_rate", "1e-2", "--evaluation.path", str(pairs / "train.jsonl")]
    assert main(["reward", str(EXAMPLES / "reward_model.yaml"), *learns, "--steps", "20", "--batch_size", "16"]) == 0
    summary = json.loads((tmp_path / "runs" / "reward_model" / "summary.json").read_text())
    assert summary["held_out_pair_accuracy_before"] < 0.8
    assert summary["held_out_pair_accuracy_after"] > 0.95
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs" / "reward_model" / "hf")
    assert model.score.weight.shape == (1, 32)


def test_a_number_is_guessed():
    spec = f"{EXAMPLES / 'guess_the_number.py'}:GuessTheNumber"
    game = EnvironmentPool({"": EnvironmentClass(spec, {}, ("prompt", "number"), 20.0, 100)})
    (number,) = game.open([""])
    game.reset({number: {"prompt": "Guess my number, from 1 to 20.", "number": 7}})
    said = [game.step({number: {"role": "assistant", "content": words}})[number] for words in ("It is 5", "9?", "7")]
    game.close()
    assert [answer["messages"][0]["content"] for answer in said[:2]] == ["Too low.", "Too high."]
    assert [(answer["reward"], answer["done"]) for answer in said] == [(0.0, False), (0.0, False), (1.0, True)]
