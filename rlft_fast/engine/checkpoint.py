"""Checkpoints that a kill at any moment cannot spoil, and export to Hugging Face folders.

A checkpoint is written to a temporary folder, made durable, renamed, and only then are older ones removed; a folder
without the temporary suffix is complete. Tensors go through torch DCP's safetensors storage (any number of processes
can load what any other number saved), everything else is JSON. Nothing is pickled.

    <directory>/step_00000020/actor/*.safetensors    parameters and AdamW moments
    <directory>/step_00000020/state.json             counters of the engines and of the trainer
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from rlft_fast.config import Config
from rlft_fast.engine.distributed import barrier, get_rank, get_world_size
from rlft_fast.engine.fsdp import FSDPEngine

_TEMPORARY = ".incomplete"
_STORAGE_ERRORS = (Exception, CheckpointException)  # DCP raises many kinds, and wraps them in a BaseException


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message says what is left."""


class CheckpointManager:
    """Saves and loads the engines of a run.

    Args:
        directory: folder of the checkpoints.
        max_num: complete checkpoints to keep; the newest is never removed.
    """

    def __init__(self, directory: str | Path, max_num: int = 2) -> None:
        self.directory = Path(directory)
        self.max_num = max_num

    def save(self, step: int, engines: Mapping[str, FSDPEngine], state: Mapping[str, Any]) -> Path:
        """Writes one checkpoint; every rank must call it.

        Args:
            step: number that names it.
            engines: by name ("actor", "critic").
            state: what else continues the run, JSON values only.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: it could not be written (a full disk, for example). Older checkpoints are untouched.
        """
        final = self.directory / f"step_{step:08d}"
        temporary = final.with_name(final.name + _TEMPORARY)
        if get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        barrier()
        try:
            for name, engine in engines.items():
                _save_tensors(engine.state_tensors(), temporary / name)
            if get_rank() == 0:
                counters = {name: engine.counters() for name, engine in engines.items()}
                (temporary / "state.json").write_text(json.dumps({"engines": counters, "trainer": dict(state)}))
        except _STORAGE_ERRORS as error:  # the half-written folder must go, the rest must stay
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.latest()
            raise CheckpointError(
                f"could not save checkpoint {final}: {error}. The newest complete one is still "
                f"{kept if kept else 'missing: none was saved yet'}; free some space and run again with --resume"
            ) from error
        barrier()
        if get_rank() == 0:
            _publish(temporary, final)
            self._rotate()
        barrier()
        return final

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    def load(self, engines: Mapping[str, FSDPEngine]) -> dict[str, Any] | None:
        """Loads the newest complete checkpoint into initialized engines, in place.

        Returns:
            The ``state`` it was saved with; None if there is no checkpoint.

        Raises:
            CheckpointError: it cannot be read, or does not fit these models.
        """
        folder = self.latest()
        if folder is None:
            return None
        try:
            saved = json.loads((folder / "state.json").read_text())
            for name, engine in engines.items():
                _load_tensors(engine.state_tensors(), folder / name)
                engine.load_counters(saved["engines"][name])
        except _STORAGE_ERRORS as error:  # the user needs the folder's name with each
            raise CheckpointError(f"cannot load checkpoint {folder}: {error}") from error
        return saved["trainer"]

    def _complete(self) -> list[Path]:
        folders = self.directory.glob("step_*") if self.directory.is_dir() else ()
        return sorted(folder for folder in folders if folder.suffix != _TEMPORARY)

    def _rotate(self) -> None:
        for folder in self._complete()[: -self.max_num]:
            shutil.rmtree(folder)


def _save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():  # DCP warns that a single process is a single process
        warnings.simplefilter("ignore", UserWarning)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=get_world_size() == 1)


def _load_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(tensors, storage_reader=reader, no_dist=get_world_size() == 1)


def _publish(temporary: Path, final: Path) -> None:
    """Makes every byte durable before the rename makes the checkpoint visible."""
    for path in (*temporary.rglob("*"), temporary):
        _fsync(path)
    if final.exists():  # the same step saved again, for example after a resume
        shutil.rmtree(final)
    os.rename(temporary, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def export_hf(engine: FSDPEngine, output: str | Path) -> None:
    """Writes a folder that plain transformers (and vLLM) load: weights, configuration and tokenizer.

    Every rank must call it; rank 0 writes. Configuration and tokenizer files are those of the engine's own model.
    """
    weights = {name: tensor.cpu().contiguous() for name, tensor in engine.named_weights()}
    if get_rank() == 0:
        output = Path(output)
        output.mkdir(parents=True, exist_ok=True)
        for source in Path(engine.path).iterdir():
            if source.is_file() and ".safetensors" not in source.name and source.suffix not in (".bin", ".pt", ".gguf"):
                shutil.copy2(source, output / source.name)
        save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
        # The weights are the float32 masters; a configuration that says bfloat16 would have them rounded on loading.
        config = json.loads((output / "config.json").read_text()) | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    barrier()


def export_run(run: str | Path, output: str | Path | None = None) -> Path:
    """Exports the policy of a run's newest complete checkpoint, without its optimizer.

    Args:
        run: output folder of the run.
        output: where to write; None: ``hf/`` in the run's folder.

    Returns:
        The folder written.

    Raises:
        ValueError: the folder is no run, or holds no complete checkpoint.
    """
    run = Path(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not the output folder of a run: it has no config.yaml")
    config = Config.load(run / "config.yaml")
    manager = CheckpointManager(run / "checkpoints")
    if manager.latest() is None:
        raise ValueError(f"{run} has no complete checkpoint to export")
    engine = FSDPEngine(config.model, config.actor).initialize()
    manager.load({"actor": engine})
    target = Path(output) if output else run / "hf"
    export_hf(engine, target)
    return target
