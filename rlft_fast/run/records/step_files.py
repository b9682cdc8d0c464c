"""Files of single steps in the folder of a run, such as ``tokens/step_00000003.safetensors``."""

import re
from pathlib import Path

from rlft_fast.files import TEMPORARY

TOKENS, ROLLOUTS = "tokens", "rollouts"
STEP_FOLDERS = (TOKENS, ROLLOUTS)


def step_file(run: Path, folder: str, step: int) -> Path:
    """The file of a step, counted from 1."""
    return run / folder / f"step_{step:08d}.safetensors"


def step_files_after(run: Path, step: int) -> list[Path]:
    """The files of later steps, and what a kill left incomplete."""
    named = [
        (re.fullmatch(rf"step_(\d+)\.safetensors({re.escape(TEMPORARY)})?", path.name), path)
        for folder in STEP_FOLDERS
        for path in (run / folder).glob("step_*")
    ]
    return [path for found, path in named if found and (found[2] or int(found[1]) > step)]
