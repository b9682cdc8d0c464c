"""A part of a checkpoint, such as its weights alone, for engines that need not be the saved engines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft_fast.engine.checkpoint.manifest import find_differences, read_state
from rlft_fast.engine.checkpoint.storage import load_tensors
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.world import World

_WEIGHT, _STATE, _MASTER = "model.", "optimizer.", ".master"


class OtherModelError(ValueError):
    """A checkpoint does not fill an engine exactly."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part that was taken of a checkpoint.

    Args:
        folder: of the checkpoint.
        state: the values that JSON can hold of the state that was saved with the engines.
        tensors: for each engine, the names of its tensors that were filled.
        missing: for each engine, the names of its tensors that the checkpoint lacks, or has in another shape.
        unused: for each engine, the names of the checkpoint's tensors that were not read.
    """

    folder: Path
    state: dict[str, Any]
    tensors: dict[str, list[str]]
    missing: dict[str, list[str]]
    unused: dict[str, list[str]]


@torch.no_grad()
def restore_part(
    manifest: Mapping[str, Any], engines: Mapping[str, FSDPEngine], folder: Path, world: World, *,
    strict: bool, optimizer: bool, scheduler: bool,
) -> Loaded:  # fmt: skip
    """Fills the engines in place; random states stay. Every rank must call it.

    A float32 master is the weight: it is read into a float32 weight, and a float32 weight into a master.

    Args:
        manifest: of the checkpoint.
        engines: by the names of the save.
        folder: of the checkpoint.
        world: all processes.
        strict: refuse a checkpoint that lacks a tensor, or whose tensors have no place. Else tensors that an engine
            and the checkpoint both have, in one shape, are filled.
        optimizer: fill the state of the optimizers, too.
        scheduler: take the numbers of optimizer steps, too, with which the schedules go on.

    Raises:
        OtherModelError: strict, and a model differs from the saved model. No engine has changed.
    """
    saved, models = read_state(folder), manifest["models"]
    shapes = {name: models[name]["shapes"] if name in models else {} for name in engines}
    own = {name: _tensors_to_fill(engine, optimizer=optimizer) for name, engine in engines.items()}
    sources = {name: _sources(own[name], shapes[name]) for name in engines}
    if strict:
        for name in engines:
            _check(name, own[name], sources[name], shapes[name], folder, optimizer=optimizer)
            _check_alpha(name, engines[name], models[name], folder)
    for name, engine in engines.items():
        if sources[name]:
            load_tensors({source: own[name][key] for key, source in sources[name].items()}, folder / name, world)
        _round_masters(engine)
        if scheduler and name in saved["engines"]:
            engine.load_counters(saved["engines"][name])
    missing = {name: [key for key in own[name] if key not in sources[name]] for name in engines}
    unused = {name: sorted(shapes[name].keys() - {*sources[name].values()}) for name in engines}
    return Loaded(folder, saved["client"], {name: [*found] for name, found in sources.items()}, missing, unused)


def _tensors_to_fill(engine: FSDPEngine, *, optimizer: bool) -> dict[str, Tensor]:
    """Tensors by their names in a checkpoint; of a weight with a master, the master alone."""
    state = engine.state_tensors()
    rounded = _rounded(state)
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in rounded and (optimizer or name.endswith(_MASTER) or name.startswith(_WEIGHT))
    }


def _rounded(names: Iterable[str]) -> set[str]:
    """The weights that have a master among these names."""
    return {_WEIGHT + name.removeprefix(_STATE).removesuffix(_MASTER) for name in names if name.endswith(_MASTER)}


def _sources(own: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> dict[str, str]:
    """For each tensor to fill, the name of the saved tensor that fills it, if there is one."""
    found = {}
    for name, tensor in own.items():
        bare = name.removeprefix(_WEIGHT).removeprefix(_STATE).removesuffix(_MASTER)
        is_weight = name in (_WEIGHT + bare, _STATE + bare + _MASTER)
        names = [_STATE + bare + _MASTER, _WEIGHT + bare] if is_weight else [name]
        source = next((x for x in names if shapes.get(x) == list(tensor.shape)), None)
        if source is not None:
            found[name] = source
    return found


def _check(
    name: str, own: Mapping[str, Tensor], sources: Mapping[str, str], shapes: Mapping[str, list[int]], folder: Path, *,
    optimizer: bool,
) -> None:  # fmt: skip
    """Raises OtherModelError for a checkpoint that does not fill the engine exactly."""
    if not shapes:
        raise OtherModelError(f"checkpoint {folder} holds no model named {name}")
    here = {sources.get(key, key): list(tensor.shape) for key, tensor in own.items()}
    reads_state = optimizer and any(key.startswith(_STATE) for key in own)
    rounded = _rounded(here)
    there = {
        key: shape
        for key, shape in shapes.items()
        if key not in rounded and (reads_state or key.startswith(_WEIGHT) or key in sources.values())
    }
    same = {"architecture": ""}
    if differences := find_differences({"shapes": there, **same}, {"shapes": here, **same}):
        raise OtherModelError(
            f"checkpoint {folder} is of another model than the {name}: {'; '.join(differences)}. Adapters are in no "
            "full model's checkpoint, and a full model is in no checkpoint of adapters: export the earlier run, and "
            "give the export as the model"
        )


def _check_alpha(name: str, engine: FSDPEngine, saved: Mapping[str, Any], folder: Path) -> None:
    """Raises OtherModelError for adapters that count more or less beside the weights than they did."""
    there, lora = saved.get("lora_alpha"), engine.config.lora
    if there is not None and lora is not None and there != lora.alpha:
        raise OtherModelError(
            f"the adapters of the {name} in checkpoint {folder} were trained with lora.alpha {there:g}, and "
            f"lora.alpha is {lora.alpha:g} here: give lora the alpha of the checkpoint"
        )


def _round_masters(engine: FSDPEngine) -> None:
    """Makes narrow weights of their masters, as an optimizer step does."""
    state = {} if engine.optimizer is None else engine.optimizer.state
    for parameter in engine.model.parameters():
        if (master := state.get(parameter, {}).get("master")) is not None:
            parameter.copy_(master)
