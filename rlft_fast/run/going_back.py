"""Going back to an earlier checkpoint of a run. What came after it is kept as a run of its own.

The folder ``later.1`` in the folder of the run has the configuration, all lines of the logs, and everything of later
steps: checkpoints, samples, numbers of tokens and weights. ``rlft-fast view``, ``plot`` and ``export`` take it as any
other run.
"""

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rlft_fast.run.folder import LOGS, MARKER, run_id
from rlft_fast.run.records import step_files_after

_COPIED = (MARKER, "config.yaml", *LOGS)
_MOVED = ("summary.json", "curve.png", "timeline.png", "hf")  # of the last step


def keep_later(run: Path, step: int, checkpoints: Sequence[Path], *, best: bool) -> Path:
    """Moves everything of later steps to a new folder in the folder of the run, and copies the logs there.

    A kill at any moment loses nothing: the newest checkpoint is moved last, and until then the run goes on from it.

    Args:
        run: folder of the run.
        step: the step to go back to.
        checkpoints: folders of later checkpoints in the order in which they are moved.
        best: whether the folder ``best`` is of a later step.

    Returns:
        The new folder.
    """
    kept = next(folder for n in count(1) if not (folder := run / f"later.{n}").exists())
    kept.mkdir()
    for name in _COPIED:
        if (run / name).is_file():
            shutil.copyfile(run / name, kept / name)
    moved = [run / name for name in (*_MOVED, *["best"] * best) if (run / name).exists()]
    for path in (*moved, *step_files_after(run, step), *checkpoints):
        target = kept / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)  # which copies where a folder of the run is a link to another disk
    return kept


def ids_of_later(run: Path) -> set[str | None]:
    """Ids of the runs that a run went back from."""
    return {run_id(kept) for kept in run.glob("later.*")}
