"""The folders of a demo's runs, which a second demo replaces."""

from pathlib import Path

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
