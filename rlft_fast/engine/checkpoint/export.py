"""Export to Hugging Face folders, one file of weights after another."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlft_fast.config import Config
from rlft_fast.engine.checkpoint.manager import CheckpointError, CheckpointManager
from rlft_fast.engine.checkpoint.storage import save_weights
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.files import REPLACED, TEMPORARY, fsync, publish, write_text
from rlft_fast.models import ValueModel, token_classifier
from rlft_fast.world import World, forked_rng

_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_OWN_FILES = ".export.json"  # lists the files that an export has written; the first file of an unfinished folder
Dtype = Literal["float32", "bfloat16"]


def export_hf(
    engine: FSDPEngine,
    output: str | Path,
    *,
    dtype: Dtype = "float32",
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a folder that plain transformers (and vLLM) load: weights, configuration and tokenizer.

    A critic becomes a token classifier with one label, whose logits are the values.

    Every rank must call it; rank 0 writes. Beside the engine, rank 0 needs memory for one file of weights, and every
    other rank for one weight. Configuration and tokenizer are copied from the engine's model folder. The output folder
    gets its name when it is complete.

    Args:
        engine: a policy or a critic, sharded or not.
        output: the folder to write.
        dtype: dtype of the exported weights.
        max_shard_bytes: most bytes of a file of weights; a weight that is larger has a file of its own.
        overwrite: replace the files of an earlier export in the folder, and keep all other files in it.

    Raises:
        ValueError: the folder exists and is not empty.
        CheckpointError: the folder could not be written, or ``<output>.incomplete`` is not an export's.
    """
    output = Path(output).absolute()
    if not overwrite and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists: choose another folder, or delete it")
    temporary = output.with_name(output.name + TEMPORARY)
    replaced = output.with_name(temporary.name + REPLACED)  # a name that only adds .old may be a folder of the user
    shards = _ShardWriter(temporary, max_shard_bytes)
    model, attempt = engine.model, partial(_attempt, engine.world)
    own_config = token_classifier(model.pretrained).config() if isinstance(model, ValueModel) else {}
    failure = attempt(_copy_model_files, Path(engine.path), temporary, own_config | {"dtype": dtype})
    for name, tensor in engine.named_weights():  # iterates to the end after a failure, too: all ranks gather together
        failure = failure or attempt(shards.add, name, tensor, getattr(torch, dtype))
    failure = failure or attempt(shards.finish) or attempt(_keep_others_files, output, temporary)
    failure = failure or attempt(publish, temporary, output, replaced)
    if engine.world.any_rank(failure is not None):
        attempt(_clear, temporary)
        raise CheckpointError(f"could not export to {output}: {failure or 'the first process says why'}") from failure


def _attempt(world: World, function: Callable[..., None], *args: Any) -> Exception | None:
    """Calls the function on rank 0, and returns the error that it raised, if any."""
    try:
        if world.is_first:
            function(*args)
    except Exception as error:  # is raised later, on all ranks together
        return error
    return None


class _ShardWriter:
    """Writes safetensors files of bounded size, and an index if there are several, under transformers' names."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        tensor = tensor.to("cpu", dtype).contiguous()
        pending_bytes = sum(weight.nbytes for weight in self.pending.values())
        if self.pending and pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        self.pending[name] = tensor
        self.num_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._path(len(self.shards))
        save_weights(self.pending, path, {"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}

    def finish(self) -> None:
        self._flush()
        total = len(self.shards)
        if total == 1:
            os.rename(self._path(0), self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            os.rename(self._path(i), self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def _path(self, index: int) -> Path:
        return self.folder / f"{index}.safetensors"


def _copy_model_files(source: Path, target: Path, config_changes: dict[str, Any]) -> None:
    """Copies everything but weights, and sets the dtype in config.json, to which loading converts the weights."""
    _clear(target)
    target.mkdir(parents=True)
    write_text(target / _OWN_FILES, "{}\n")
    for path in source.iterdir():
        is_weights = ".safetensors" in path.name or path.suffix in _WEIGHTS
        if path.is_file() and not is_weights and path.name != _OWN_FILES:
            shutil.copyfile(path, target / path.name)
            fsync(target / path.name)
    config: dict[str, Any] = json.loads((target / "config.json").read_text()) | config_changes
    config.pop("torch_dtype", None)
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")


def _clear(temporary: Path) -> None:
    """Removes what an export that failed or was killed has left. Raises ValueError if it is somebody else's."""
    if temporary.is_dir() and any(temporary.iterdir()) and not (temporary / _OWN_FILES).is_file():
        raise ValueError(f"{temporary}, where an export writes first, is not an export's: move it away, or delete it")
    shutil.rmtree(temporary, ignore_errors=True)


def _keep_others_files(output: Path, temporary: Path) -> None:
    """Copies files that no export has written from the old folder to the new one, and lists this export's own files."""
    own = {path.name for path in temporary.iterdir()} | {_OWN_FILES}
    try:
        earlier = set(json.loads((output / _OWN_FILES).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):  # older versions wrote no list
        earlier = {path.name for path in output.glob("model*.safetensors*")}
    for path in output.iterdir() if output.is_dir() else []:
        if path.name not in own | earlier:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, temporary / path.name)
    write_text(temporary / _OWN_FILES, json.dumps({"files": sorted(own)}) + "\n")


def export_run(
    run: str | Path, output: str | Path | None = None, dtype: Dtype = "float32", world: World | None = None
) -> Path:
    """Exports the policy of a run's newest complete checkpoint, without its optimizer.

    Args:
        run: output folder of the run.
        output: folder to write, which must not exist; None: ``hf/`` in the run's folder, which is replaced.
        dtype: dtype of the exported weights.
        world: the processes that export together; None: `World.current()`.

    Returns:
        The folder written.

    Raises:
        ValueError: the folder is no run, holds no complete checkpoint, or the output exists.
        CheckpointError: the checkpoint cannot be read, or the output cannot be written.
    """
    run = Path(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not the output folder of a run: it has no config.yaml")
    config = Config.load(run / "config.yaml")
    manager = CheckpointManager(run / "checkpoints", world=world)
    if manager.latest() is None:
        raise ValueError(f"{run} has no complete checkpoint to export")
    # The float32 masters of bfloat16 weights are in the optimizer's state, so the engine needs an optimizer.
    num_training_steps = 1 if config.actor.param_dtype == "bfloat16" else None
    alone = {"sequence_parallel": 1, "shard_size": -1}  # the run may have had more processes than the export
    actor = config.actor.model_copy(update=alone)
    engine = FSDPEngine(config.model, actor, num_training_steps=num_training_steps, world=manager.world).initialize()
    with forked_rng():  # loading a checkpoint would set the caller's random states
        manager.load({"actor": engine})
    target = Path(output) if output else run / "hf"
    export_hf(engine, target, dtype=dtype, overwrite=output is None)
    return target
