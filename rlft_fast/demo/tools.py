"""The demo of tools: SmolLM2-135M-Instruct learns to work out (a + b) * c with a calculator that does one operation.

A warm-up by supervised fine-tuning shows the calls. Most of its traces stop after the first operation, so the model is
right now and then. GRPO then teaches it to go on.
"""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft_fast.config import Config, SFTConfig
from rlft_fast.demo.folder import DATA, claim_folders, write_rows
from rlft_fast.demo.smollm2 import smollm2_folder
from rlft_fast.errors import printable

_STEPS = 8
_WARM_UP_STEPS = 10
_NUM_HELD_OUT = 128
_NUM_TRACES = 512
_COMPLETE = 0.35  # share of the traces that go on to the answer
_TOOL = {
    "name": "calculate",
    "description": "One operation: a + b or a * b.",
    "parameters": {"type": "object", "properties": {"operation": {"type": "string"}}},
}
_OPERATION = re.compile(r"\s*(\d{1,6})\s*([+*])\s*(\d{1,6})\s*")

Problem = tuple[int, int, int]
"""a, b and c."""


class Calculator:
    """An episode about one problem. Its reward is 1 if the last reply is the answer and nothing else."""

    tools = (_TOOL,)

    def reset(self, answer: str, **row: Any) -> None:
        self.answer = answer

    def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        calls = message.get("tool_calls")
        if not calls:
            return [], float(message["content"].strip() == self.answer), True
        results = [self._result(**call["function"]["arguments"]) for call in calls]
        return [{"role": "tool", "content": result} for result in results], 0.0, False

    def _result(self, operation: Any = "", **others: Any) -> str:
        found = _OPERATION.fullmatch(str(operation))
        if found is None:
            return "error: expected one operation, such as 3 + 4"
        a, b = int(found[1]), int(found[3])
        return str(a + b if found[2] == "+" else a * b)


def learn_tools(seed: int = 0, output_dir: str | Path = "runs/demo-tools", steps: int = _STEPS) -> dict[str, Any]:
    """Runs the demo, and returns the contents of the second run's ``summary.json``.

    Args:
        seed: seed of sampling and data order. The held-out problems are the same for every seed.
        output_dir: folder for everything the demo writes: the runs ``warm_up`` and ``learn``, and their data.
        steps: number of steps of reinforcement learning.

    Raises:
        ValueError: the package with the model is not installed, a folder holds something other than a run of the
            demo, or `steps` is less than 1.
    """
    from rlft_fast.trainer import train
    from rlft_fast.view import write_view

    output = Path(output_dir)
    warm_up, run = output / "warm_up", output / "learn"
    claim_folders(warm_up, run)
    data = write_tool_problems(run / DATA, warm_up / DATA)
    train(warm_up_config(smollm2_folder(), warm_up, data["traces"], seed))
    summary = train(tools_config(warm_up / "hf", run, data["train"], data["held_out"], seed, steps))
    _show_episodes(run / "samples.jsonl")
    write_view([run], run / "view.html")
    print(printable(f"the model is in {run / 'hf'}, and {run / 'view.html'} shows its episodes"))
    return summary


def warm_up_config(model: Path, output: Path, traces: Path, seed: int) -> SFTConfig:
    """Configuration of the warm-up, a run of ``rlft-fast sft``."""
    return SFTConfig.parse(
        {
            "objective": "sft",
            "model": str(model),
            "output_dir": str(output),
            "steps": _WARM_UP_STEPS,
            "seed": seed,
            "batch_size": 32,
            "data": {"path": str(traces), "max_sequence_tokens": 512},
            "actor": {"max_tokens": 4096, "optimizer": {"learning_rate": 1e-4, "schedule": "cosine"}},
            "checkpoint": {"every": 0, "max_num": 1},
        }
    )


def tools_config(model: Path, output: Path, train: Path, held_out: Path, seed: int, steps: int = _STEPS) -> Config:
    """Configuration of the reinforcement learning, a run of ``rlft-fast train``."""
    return Config.parse(
        {
            "model": str(model),
            "output_dir": str(output),
            "steps": steps,
            "seed": seed,
            "data": {"path": str(train)},
            "environment": {"name": "rlft_fast.demo.tools:Calculator", "max_turns": 4},
            "rollout": {
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_prompt_tokens": 256,
                "max_new_tokens": 192,
                "batch_size": 64,
            },
            "algorithm": {"skip_equal_groups": True, "mini_batches": 2, "clip_high": 0.28},
            "actor": {"max_tokens": 4096, "optimizer": {"learning_rate": 1e-5}},
            "evaluation": {"path": str(held_out), "temperature": 1.0, "max_new_tokens": 192},
            "checkpoint": {"every": 0, "max_num": 1},
        }
    )


def write_tool_problems(folder: Path, traces: Path) -> dict[str, Path]:
    """Writes problems to ``train.jsonl`` and ``held_out.jsonl``, and conversations about others to ``traces.jsonl``.

    Args:
        folder: of the problems.
        traces: folder of the conversations.

    Returns:
        The three paths by name.
    """
    draw = random.Random(0)
    problems = [(a, b, c) for a in range(2, 20) for b in range(2, 20) for c in range(2, 10)]
    draw.shuffle(problems)
    held_out, train = problems[:_NUM_HELD_OUT], problems[_NUM_HELD_OUT:]
    conversations = [_trace(problem, complete=draw.random() < _COMPLETE) for problem in train[:_NUM_TRACES]]
    return {
        "train": write_rows(folder / "train.jsonl", [_row(problem) for problem in train]),
        "held_out": write_rows(folder / "held_out.jsonl", [_row(problem) for problem in held_out]),
        "traces": write_rows(traces / "traces.jsonl", conversations),
    }


def _row(problem: Problem) -> dict[str, Any]:
    a, b, c = problem
    return {"prompt": f"({a} + {b}) * {c} = ?", "answer": str((a + b) * c)}


def _trace(problem: Problem, *, complete: bool) -> dict[str, Any]:
    """A conversation that ends with the answer, or with the sum, which is wrong."""
    a, b, c = problem
    messages = [{"role": "user", "content": _row(problem)["prompt"]}, *_calculated(f"{a} + {b}", a + b)]
    answer = (a + b) * c if complete else a + b
    if complete:
        messages += _calculated(f"{a + b} * {c}", answer)
    return {"messages": [*messages, {"role": "assistant", "content": str(answer)}], "tools": [_TOOL]}


def _calculated(operation: str, result: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": _TOOL["name"], "arguments": {"operation": operation}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _TOOL["name"], "content": str(result)},
    ]


def _show_episodes(samples: Path) -> None:
    """Prints an episode of the first step and an episode of the last."""
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").split("\n") if line]
    for row in (rows[0], rows[-1]):
        print(printable(f"\nan episode of step {row['step']}, reward {row['reward']:g}: {row['prompt']}"))
        for turn in row["turns"]:
            print(printable(f"  {'policy' if turn['sampled'] else 'answer'}: {turn['text'].strip()!r}"))
