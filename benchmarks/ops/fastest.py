"""Writes the fastest backend of each kind of call, for `backend="auto"` of the ops (`rlft_fast/ops/backends.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.ops.ways import backend_way
from benchmarks.support.harness import Results
from rlft_fast.ops.backends import MEASUREMENTS, Shape, read_measurements

# The kind of call that a task measures. Every per-token loss costs as much as PPO's.
KINDS = {
    "no grad": "no grad",
    "forward + backward": "forward + backward",
    "frozen head": "frozen head",
    "PPO loss": "loss",
}
BACKENDS = ("native", "triton")


def entries(results: Results, device: str, dtype: str, shape: Shape) -> list[dict[str, Any]]:
    """One entry per kind of call that every backend has run.

    Args:
        results: of the report, with the ways `backend_way` of every backend.
        device: as `rlft_fast.ops.backends.device_name` gives it.
        dtype: such as "bfloat16".
        shape: (T, D, V).
    """
    found = []
    for task, kind in KINDS.items():
        ways = results.ways(task)
        if all(backend_way(backend) in ways for backend in BACKENDS):
            times = {backend: round(1e3 * ways[backend_way(backend)].median_s, 4) for backend in BACKENDS}
            found.append({"device": device, "dtype": dtype, "kind": kind, "shape": list(shape), "milliseconds": times})
    return found


def write(path: Path, new: list[dict[str, Any]]) -> None:
    """Adds entries to the file, or to a copy of the shipped entries. New entries replace old ones of the same call."""
    kept = {_key(entry): entry for entry in [*read_measurements(path if path.exists() else MEASUREMENTS), *new]}
    lines = ",\n".join("  " + json.dumps(kept[key]) for key in sorted(kept))
    about = "What backend='auto' knows of GPUs, written by python -m benchmarks.ops.report --fastest."
    path.write_text(f'{{\n "about": {json.dumps(about)},\n "measurements": [\n{lines}\n ]\n}}\n')


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["device"], entry["dtype"], entry["kind"], *entry["shape"]
