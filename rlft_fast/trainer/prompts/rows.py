"""Rows of data: read from a source, or made by a reasoning-gym task; and their order."""

import torch

from rlft_fast.config import DataConfig
from rlft_fast.trainer.prompts.formats import Row, read_data


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
