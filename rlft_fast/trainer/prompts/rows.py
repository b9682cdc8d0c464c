"""Rows of data: read from JSON lines or a dataset folder, or made by a reasoning-gym task."""

import json
from pathlib import Path
from typing import Any

import torch

from rlft_fast.config import DataConfig
from rlft_fast.files import read_text

Row = dict[str, Any]


def read_rows(config: DataConfig, path: str | None = None) -> tuple[list[Row], str, str]:
    """The rows, the name of the column with the prompt, and a name of the source for messages.

    Args:
        config: where the rows come from.
        path: read this file or folder instead.

    Raises:
        ValueError: the source cannot be read.
    """
    source = path or config.path
    if source is not None:
        return read_data(source), config.prompt_column, source
    return _make_task(config), "question", f"task {config.task}"


def shuffled_rows(num_rows: int, start: int, count: int, seed: int) -> list[int]:
    """Rows ``start`` to ``start + count`` of an endless stream of shuffled passes over the data.

    A pure function of its arguments: a resumed run needs to know nothing but its step.
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), num_rows)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        shuffled = torch.randperm(num_rows, generator=generator)
        indices += shuffled[offset : offset + count - len(indices)].tolist()
    return indices


def read_data(source: str) -> list[Row]:
    """The rows of a file of JSON lines, or of a folder written by datasets.save_to_disk.

    Raises:
        ValueError: the source cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        return _read_dataset(path)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read the data {source}: {error} (expected JSON lines in UTF-8, or a folder written by "
            "datasets.save_to_disk)"
        ) from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028 within a text
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of numbers too long and lists too deep
                raise ValueError(f"{source}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{source}, line {number} must be a JSON object, got {type(row).__name__}")
            rows.append(row)
    return rows


def _read_dataset(path: Path) -> list[Row]:
    try:
        from datasets import Dataset, load_from_disk
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} is a folder: reading dataset folders needs `pip install datasets`") from error
    try:
        dataset = load_from_disk(str(path))
    except IndexError:  # datasets writes no file for no rows, and cannot read the folder again
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a folder written by datasets.save_to_disk: {error}") from error
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{path} holds the splits {sorted(dataset)}: name one, for example {path / 'train'}")
    return dataset.to_list()


def _make_task(config: DataConfig) -> list[Row]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError("data.task needs reasoning-gym: pip install reasoning-gym") from error
    assert config.task is not None
    try:
        dataset = reasoning_gym.create_dataset(config.task, size=config.task_size, seed=0, **config.task_options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make the task {config.task!r}: {error}") from error
    return [{"question": entry["question"], "entry": entry} for entry in dataset]
