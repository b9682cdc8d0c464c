"""examples/trl_environment.py: TRL and rlft_fast play one class, and the step here takes half of the time at most."""

import json
import random
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import get_json_schema

import rlft_fast.trainer.ppo
from rlft_fast.config import Config, SFTConfig
from rlft_fast.trainer import train
from tests.support.tiny_models import save_tiny_model
from tests.trainer.episodes.scripted import TEMPLATES
from tests.trainer.toy import read_lines, write_rows

FILE = Path(__file__).parents[2] / "examples" / "trl_environment.py"
EXAMPLE = runpy.run_path(str(FILE))
STEPS = 3
TOOL = get_json_schema(EXAMPLE["Lift"]().move)


def cpu_seconds() -> float:
    """Of this process and its workers."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children)


def traces() -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for _ in range(64):
        row, floors = draw.choice(EXAMPLE["ROWS"]), draw.randint(1, 9)
        lift = EXAMPLE["Lift"]()
        asked = row["prompt"][0]["content"] + lift.reset(**row)
        call = {"type": "function", "function": {"name": "move", "arguments": {"floors": floors}}}
        rows.append({
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "move", "content": lift.move(floors)},
                {"role": "assistant", "content": "Here."},
            ],
        })  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model that has learned by our own SFT to call the tool with some number of floors."""
    folder = tmp_path_factory.mktemp("lift")
    base = save_tiny_model("llama", folder / "base", vocab_size=264, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    values = {
        "objective": "sft", "model": str(base), "output_dir": str(folder / "sft"), "steps": 140, "batch_size": 8,
        "data": {"path": str(write_rows(folder / "traces.jsonl", traces())), "max_sequence_tokens": 2000},
        "actor": {"max_tokens": 8000, "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"}},
        "checkpoint": {"every": 0, "max_num": 1},
    }  # fmt: skip
    train(SFTConfig.parse(values))
    return folder / "sft" / "hf"


class Clock(TrainerCallback):
    """CPU seconds of TRL's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = cpu_seconds()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(cpu_seconds() - self.started)


@pytest.mark.peers
def test_one_class_in_both(model, tmp_path, monkeypatch):
    """Both learn from episodes with calls and different rewards. The median step here takes half of TRL's at most."""
    clock, ours = Clock(), []
    full_step = rlft_fast.trainer.ppo.PPOTrainer.train_step

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        started = cpu_seconds()
        result = full_step(*args, **kwargs)
        ours.append(cpu_seconds() - started)
        return result

    monkeypatch.setattr(rlft_fast.trainer.ppo.PPOTrainer, "train_step", timed_step)
    theirs = EXAMPLE["train_with_trl"](str(model), STEPS, [clock])
    values = {
        "model": str(model), "output_dir": str(tmp_path / "run"), "steps": STEPS,
        "data": {"path": str(write_rows(tmp_path / "rows.jsonl", EXAMPLE["ROWS"]))},
        "environment": {"name": f"{FILE}:Lift", "max_turns": 3},
        "rollout": {
            "backend": "hf", "prompts_per_step": 4, "samples_per_prompt": 8, "max_prompt_tokens": 1200,
            "max_new_tokens": 256, "batch_size": 32,
        },
        "actor": {"max_tokens": 16_000, "optimizer": {"learning_rate": 1e-5}},
        "checkpoint": {"every": 0, "max_num": 1},
    }  # fmt: skip
    train(Config.parse(values))
    print(f"CPU seconds of a step: {ours}, of TRL's: {clock.seconds}")
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "reward_mean" in line]
    logged = [line for line in theirs if "reward" in line]
    assert len(logged) == len(lines) == STEPS
    for line, other in zip(lines, logged, strict=True):
        of_line = [line[name] for name in ("tool_calls_mean", "failed_tool_calls_mean", "reward_std", "grad_norm")]
        names = ("tools/call_frequency", "tools/failure_frequency", "reward_std", "grad_norm")
        for calls, failed, reward_std, grad_norm in (of_line, [other[name] for name in names]):
            assert calls > 0.25
            assert failed < calls
            assert reward_std > 0.05
            assert grad_norm > 0
    ratio = statistics.median(ours[1:]) / statistics.median(clock.seconds[1:])
    assert ratio <= 0.5
