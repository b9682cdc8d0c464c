"""Weights to start from: of a run, of one of its checkpoints, of a model folder, or of an adapter of PEFT."""

import zlib
from pathlib import Path

from rlft_fast.engine.checkpoint.adapter import CONFIG, WEIGHTS, is_adapter, load_adapter, read_adapter_config
from rlft_fast.engine.checkpoint.manager import CheckpointManager, checkpoint_of
from rlft_fast.engine.checkpoint.manifest import FILE_NAME
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.engine.optimizer import load_masters
from rlft_fast.models import load_weights, model_checksum, require_same_computation, stored_head


def find_start(path: str | Path) -> Path:
    """The folder whose weights a path names: a checkpoint, a model folder, or an adapter of PEFT.

    Args:
        path: one of them, or the folder of a run, which names its newest checkpoint.

    Raises:
        ValueError: it is none of them, or an adapter that is not read.
    """
    folder = Path(path)
    if is_adapter(folder):
        read_adapter_config(folder)
        return folder
    if (folder / FILE_NAME).is_file() or (folder / "config.json").is_file():
        return folder
    newest = CheckpointManager(folder / "checkpoints").latest() if (folder / "config.yaml").is_file() else None
    if newest is not None:
        return newest
    found = "a run without a complete checkpoint" if (folder / "config.yaml").is_file() else "none of these"
    raise ValueError(
        f"init_from {path} is {found}: give the folder of a run, one of its checkpoints "
        f"(.../checkpoints/step_00000020), a model folder, or a folder with {CONFIG} and {WEIGHTS}.safetensors"
    )


def start_checksum(path: str | Path) -> str:
    """Tells weights to start from from others. Raises ValueError as `find_start` does."""
    folder = find_start(path)
    if (folder / FILE_NAME).is_file():
        return f"{folder.name} {zlib.crc32((folder / FILE_NAME).read_bytes()):08x}"
    return model_checksum(folder, CONFIG) if is_adapter(folder) else model_checksum(folder)


def load_start(engine: FSDPEngine, name: str, path: str | Path) -> None:
    """Fills the weights of an initialized engine. Its optimizer and its schedule stay at their beginning.

    Args:
        engine: to fill.
        name: of its role; a checkpoint may hold the models of several.
        path: see `find_start`.

    Raises:
        ValueError: see `find_start`, or the weights do not fit the model.
    """
    folder = find_start(path)
    if is_adapter(folder):
        load_adapter(engine, folder)
    elif (folder / FILE_NAME).is_file():
        manager, step, tag = checkpoint_of(folder, engine.world)
        manager.load_part({name: engine}, step, tag=tag, optimizer=False, scheduler=False)
    elif engine.config.lora is not None:
        raise ValueError(
            f"init_from {path} is a model folder, and adapters begin at 0 beside any model: give it as model, and "
            "leave init_from out"
        )
    else:
        require_same_computation(folder, engine.model.pretrained)
        load_weights(folder, engine.model.pretrained, beside=stored_head(folder, engine.model))
        if engine.optimizer is not None and engine.config.param_dtype == "bfloat16":
            load_masters(str(folder), engine.model, engine.optimizer)
