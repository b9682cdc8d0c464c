"""Rows for runs that learn from data, and a run in a folder."""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from rlft_fast.config import RunConfig, SFTConfig
from rlft_fast.trainer import train
from tests.trainer.toy import write_rows

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
    for key, value in changes.items():
        section = values
        *sections, last = key.split("__")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def sft_config(model: Path, folder: Path, **changes: Any) -> SFTConfig:
    return SFTConfig.parse(sft_values(model, folder, **changes))


def encode(text: str) -> list[int]:
    """Tokens of the tiny models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index("Ġ" if letter == " " else letter) for letter in text]


def run_in_process(rank: int, config: RunConfig) -> None:
    train(config)
