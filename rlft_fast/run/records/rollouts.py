"""The samples of each step as tensors: one safetensors file per step in the folder ``rollouts`` of a run.

A run with ``log_samples`` writes them, and ``--replay`` trains with them again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlft_fast.files import replacing
from rlft_fast.run.records.step_files import ROLLOUTS, step_file

if TYPE_CHECKING:
    from torch import Tensor


def write_rollout(run: Path, step: int, tensors: "Mapping[str, Tensor]") -> None:
    """Writes the file of a step.

    Args:
        run: folder of the run.
        step: counts from 1.
        tensors: by name.
    """
    from safetensors.torch import save

    path = step_file(run, ROLLOUTS, step)
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        file.write_bytes(save({name: x.contiguous() for name, x in tensors.items()}))


def read_rollout(run: Path, step: int) -> "dict[str, Tensor]":
    """What `write_rollout` wrote.

    Raises:
        ValueError: the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = step_file(run, ROLLOUTS, step)
    if not path.is_file():
        raise ValueError(f"{path} is missing, so step {step} cannot be replayed: a run with log_samples writes it")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def require_replayable(run: Path, num_steps: int, output: Path) -> None:
    """Raises ValueError where a run has not kept the samples of all these steps, or would be overwritten."""
    if run.resolve() == output.resolve():
        raise ValueError(f"output_dir {output} is the run to replay, and would be overwritten: name another folder")
    missing = next((n for n in range(1, num_steps + 1) if not step_file(run, ROLLOUTS, n).is_file()), None)
    if missing is not None:
        then = f"replay the steps before with --steps {missing - 1}, or" if missing > 1 else "to replay a run,"
        raise ValueError(
            f"{run} has no samples of step {missing} of {num_steps} in its folder {ROLLOUTS}: {then} set log_samples "
            "in the run that is to be replayed"
        )
