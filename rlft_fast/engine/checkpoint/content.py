"""The content of a checkpoint. It is taken from engines, written by each process for itself, and put back."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlft_fast.engine.checkpoint.manifest import STATE_NAME, describe_file, describe_model, find_differences, read_state
from rlft_fast.engine.checkpoint.storage import LocalPart, Snapshot, load_tensors, local_parts, save_parts, whole
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.files import write_text
from rlft_fast.world import World

_CLIENT = "client.safetensors"


@dataclass(frozen=True, slots=True)
class Content:
    """The files that this process has to write. File names are relative to the checkpoint's folder.

    Args:
        parts: for each file of tensors, its tensors by name.
        texts: for each text file, its text.
        models: for each engine, its description for the manifest.
    """

    parts: dict[str, dict[str, LocalPart]]
    texts: dict[str, str]
    models: dict[str, Any]

    def copied(self, snapshot: Snapshot) -> "Content":
        """The same content with copies of the tensors: training may change the originals."""
        live = {(file, name): part.data for file, named in self.parts.items() for name, part in named.items()}
        copies = snapshot.take(live)
        parts = {
            file: {name: LocalPart(copies[file, name], part.offsets) for name, part in named.items()}
            for file, named in self.parts.items()
        }
        return replace(self, parts=parts)

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes all files durably, and returns for each file its description for the manifest."""
        for name, parts in self.parts.items():
            save_parts(parts, folder / name)
        for name, text in self.texts.items():
            write_text(folder / name, text)
        return {name: describe_file(folder / name) for name in (*self.parts, *self.texts)}


def collect(engines: Mapping[str, FSDPEngine], state: Mapping[str, Any], world: World) -> Content:
    """Takes the engines' tensors and counters, this process's random states, and on rank 0 the caller's state.

    Args:
        engines: by name.
        state: tensors, and values that JSON can hold.
        world: all processes.

    Returns:
        The content. Its tensors alias the engines' own tensors.

    Raises:
        ValueError: a value of the state is no tensor, and JSON would not restore it as it is.
    """
    values = _checked({name: value for name, value in state.items() if not isinstance(value, Tensor)})
    counters = {name: engine.counters() for name, engine in engines.items()}
    parts = {_file_of(name, world.rank): local_parts(engine.state_tensors(), world) for name, engine in engines.items()}
    parts[_file_of("rng", world.rank)] = {name: whole(tensor) for name, tensor in _random_states().items()}
    texts = {}
    if world.is_first:
        texts[STATE_NAME] = json.dumps({"engines": counters, "client": values})
        parts[_CLIENT] = {name: whole(value) for name, value in state.items() if isinstance(value, Tensor)}
    models = {name: describe_model(engine) for name, engine in engines.items()}
    return Content({file: named for file, named in parts.items() if named}, texts, models)


def check_models(manifest: Mapping[str, Any], engines: Mapping[str, FSDPEngine], folder: Path) -> None:
    """Refuses a checkpoint of other models.

    Raises:
        ValueError: a model differs from the saved one; the message names the differences.
    """
    saved = manifest["models"]
    for name, engine in engines.items():
        if name not in saved:
            raise ValueError(f"checkpoint {folder} holds {' and '.join(saved)}, not {name}")
        if differences := find_differences(saved[name], describe_model(engine)):
            raise ValueError(
                f"checkpoint {folder} is of another model than the {name}: {'; '.join(differences)}. Continue with the "
                "configuration that the run began with, or begin a new run in another folder"
            )


def restore(
    manifest: Mapping[str, Any], engines: Mapping[str, FSDPEngine], folder: Path, world: World
) -> dict[str, Any]:
    """Fills the engines in place, and restores random states if the number of processes is the same.

    Returns:
        The state that was saved with the engines.
    """
    saved = read_state(folder)
    for name, engine in engines.items():
        load_tensors(engine.state_tensors(), folder / name, world)
        engine.load_counters(saved["engines"][name])
    if manifest["world_size"] == world.size:
        _restore_random_states(load_file(folder / _file_of("rng", world.rank)))
    tensors = load_file(folder / _CLIENT) if _CLIENT in manifest["files"] else {}
    return saved["client"] | tensors


def _file_of(name: str, rank: int) -> str:
    return f"{name}/rank_{rank:05d}.safetensors"


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        shown = f"{name!r} of the state to save is {reprlib.repr(value)}"
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError) as error:
            raise ValueError(f"{shown}: {error}") from error
        if not same:
            raise ValueError(
                f"{shown}, which JSON would change: give tensors, or dictionaries with texts as keys, lists, texts, "
                "numbers, true, false and null"
            )
    return values


def _random_states() -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state()} | cuda


def _restore_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
