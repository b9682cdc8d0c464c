"""The folders of a demo's runs, which a second demo replaces, and the data in them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = "data"
"""The folder of the data that a demo writes, in the folder of each of its runs."""


def claim_folders(*folders: Path) -> None:
    """Claims the folders of a demo's runs.

    Raises:
        ValueError: a folder holds checkpoints of another run, or something other than a run.
    """
    from rlft_fast.engine import CheckpointManager
    from rlft_fast.trainer import claim

    for folder in folders:
        if not (folder / DATA).is_dir() and CheckpointManager(folder / "checkpoints").latest() is not None:
            raise ValueError(f"{folder} holds another run, which the demo would replace: name another folder")
    for folder in folders:
        claim(folder)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a data set as JSON lines, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
