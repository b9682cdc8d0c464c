"""A task that a tiny random model learns in seconds: emit tokens with even ids. And ways for a reward to go wrong.

Runs load this file by its path, also in folders where `tests` is no package, so that it imports nothing of `tests`.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from rlft_fast.config import Config
from rlft_fast.world import World

HERE = Path(__file__)
WORDS = ("sun", "moon", "star", "rain", "snow", "wind", "hill", "lake", "tree", "leaf")
FILES = {
    "config.yaml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "summary.json", "run.json", "checkpoints", "hf",
    "curve.png", "timeline.png",
}  # fmt: skip
"""Of a run that has ended."""
CALLS: dict[Path, int] = {}
"""Of `even_share_until_struck`, since the file was written."""


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def mostly_even(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """1 where more than half of the token ids are even, else 0."""
    return [float(share > 0.5) for share in even_share(completion_ids)]


def constant(prompts: list[str], **_: Any) -> list[float | None]:
    return [0.25] * len(prompts)


def nothing(prompts: list[str], **_: Any) -> list[float | None]:
    return [None] * len(prompts)


def not_for_sun(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Leaves out every sample of one prompt."""
    scored = even_share(completion_ids)
    return [None if prompt == "sun" else reward for prompt, reward in zip(prompts, scored, strict=True)]


def spread(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Differs from sample to sample, so that no sample has the mean of its prompt: all of them are learned from."""
    return [(sum(ids) % 997) / 997 for ids in completion_ids]


def even_share_of_some(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """`spread` for four of the prompts, and 0 for the others."""
    scored = spread(completion_ids)
    some = ("hill", "lake", "tree", "leaf")
    return [reward if prompt in some else 0.0 for prompt, reward in zip(prompts, scored, strict=True)]


def raises(**_: Any) -> list[float | None]:
    raise KeyError("solution")


def one_too_few(prompts: list[str], **_: Any) -> list[float | None]:
    return [1.0] * (len(prompts) - 1)


def nan(prompts: list[str], **_: Any) -> list[float | None]:
    return [1.0] * (len(prompts) - 1) + [float("nan")]


def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [len(ids) / 10 for ids in completion_ids]


def even_share_until_struck(completion_ids: list[list[int]], strike: list[str], **_: Any) -> list[float | None]:
    """`even_share`, but the call whose number stands in the file named by the data strikes once, as written there."""
    order = Path(strike[0])
    with contextlib.suppress(FileNotFoundError):  # the rank that strikes removes it
        how, call, rank = order.read_text().split()
        CALLS[order] = CALLS.get(order, 0) + 1
        if CALLS[order] == int(call) and World.current().rank == int(rank):
            order.unlink()
            del CALLS[order]
            _strike(how)
    return even_share(completion_ids)


def _strike(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the judge does not answer")
    if how == "die":  # at once, without saving, as a second Ctrl-C has it
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.Signals[how])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def with_changes(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values after changes by dotted key (``rollout__temperature``)."""
    for key, value in changes.items():
        section = values
        *sections, last = key.split("__")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def toy_values(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Values of a small run in `folder`, with dotted changes (``rollout__temperature=0.5``)."""
    data = folder / "data.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(data, [{"prompt": word, "answer": len(word)} for word in WORDS])
    values: dict[str, Any] = {
        "model": str(model), "output_dir": str(folder / "run"), "steps": 3, "seed": 1,
        "data": {"path": str(data), "chat": False},
        "reward": {"function": f"{HERE}:even_share"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "actor": {"max_tokens": 64, "optimizer": {"learning_rate": 1e-2}},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    return with_changes(values, changes)


def toy_config(model: Path, folder: Path, **changes: Any) -> Config:
    return Config.parse(toy_values(model, folder, **changes))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]  # splitlines would also cut at U+2028


def comparable(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the machine, its clock and its memory, or on who samples."""
    machine = (
        "time", "seconds", "tokens_per_second", "memory_gib", "idle_share", "tflops", "mfu", "environment_time",
        "sync_mib",
    )  # fmt: skip
    rows = read_lines(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(machine)} for row in rows]
