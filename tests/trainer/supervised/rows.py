"""Rows for runs that learn from data, and a run in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from rlft_fast.config import RunConfig, SFTConfig
from rlft_fast.trainer import train
from tests.support.machine.distributed import run_distributed
from tests.trainer.ranks import train_in_process
from tests.trainer.toy import read_lines, with_changes, write_rows

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(*texts: str) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def texts(number: int) -> list[dict[str, Any]]:
    """Prompts and completions of different lengths."""
    return [
        {"prompt": "count " * (i % 3 + 1), "completion": "abcdefghij"[: i % 7 + 2] * (i % 2 + 1)} for i in range(number)
    ]


def sft_values(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Values of a small run in `folder`, with dotted changes (``data__chat=True``)."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_rows(folder / "data.jsonl", texts(20))
    values: dict[str, Any] = {
        "model": str(model), "output_dir": str(folder / "run"), "steps": 4, "batch_size": 6,
        "data": {"path": str(data), "max_sequence_tokens": 48, "chat": False},
        "actor": {"max_tokens": 64, "optimizer": {"learning_rate": 1e-2}},
        "checkpoint": {"every": 2, "asynchronous": False},
    }  # fmt: skip
    return with_changes(values, changes)


def sft_config(model: Path, folder: Path, **changes: Any) -> SFTConfig:
    return SFTConfig.parse(sft_values(model, folder, **changes))


def encode(text: str) -> list[int]:
    """Tokens of the tiny models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index("Ġ" if letter == " " else letter) for letter in text]


def assert_two_learn_what_one_learns(configs: Sequence[RunConfig], *, least_movement: float, tolerance: float) -> None:
    """Two processes move the weights as one process does, and log its numbers.

    Args:
        configs: of equal runs in two folders.
        least_movement: of the weight that moves most.
        tolerance: of the difference of weights beyond the rounding of a weight, relative to the largest movement.
    """
    train(configs[0])
    run_distributed(train_in_process, 2, configs[1])
    one, two = (load_file(f"{config.output_dir}/hf/model.safetensors") for config in configs)
    start = load_file(f"{configs[0].model}/model.safetensors")
    moved = max((one[name] - start[name]).abs().max() for name in one)
    assert moved > least_movement
    rounding = torch.finfo(torch.float32).eps  # an addition of a step may fall on the other side of a half
    apart = max(((one[name] - two[name]).abs() - rounding * one[name].abs()).max() for name in one)
    assert apart < tolerance * moved, f"{apart / moved:.1e}"
    logs = (read_lines(Path(config.output_dir) / "metrics.jsonl") for config in configs)
    for first, second in zip(*logs, strict=True):
        for name in {"train_loss", "grad_norm", "held_out_loss", "held_out_pair_accuracy"} & first.keys():
            assert first[name] == pytest.approx(second[name], rel=1e-5)
