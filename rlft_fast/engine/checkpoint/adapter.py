"""Adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlft_fast.config import LoraConfig
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.engine.sharding import reshard
from rlft_fast.engine.weight_sync import BUCKET_BYTES, Source, WeightStream
from rlft_fast.errors import brief
from rlft_fast.models import (
    CheckpointPart,
    PolicyModel,
    RewardModel,
    ValueModel,
    local_part,
    low_rank_factors,
    name_some,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
_HEADS = ("score", "classifier")  # which PEFT trains and keeps beside the adapters of any classifier
# Settings of PEFT with which W x + (alpha / r) B A x is not the whole adapter, and their values without effect.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_rslora": (False, None), "use_dora": (False, None),
    "fan_in_fan_out": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "modules_to_save": ([], None), "trainable_token_indices": ([], {}, None), "target_parameters": ([], None),
    "lora_bias": (False, None), "megatron_config": (None,), "use_qalora": (False, None),
    "layer_replication": ([], None), "alora_invocation_tokens": (None,), "arrow_config": (None,),
    "use_bdlora": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    # Others, such as PiSSA, take A and B out of the model's own weights, and the files do not have what is left.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}  # fmt: skip


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def adapter_stream(engine: FSDPEngine, dtype: torch.dtype | None = None) -> WeightStream:
    """The adapters of now, by PEFT's names, for a generator or a file.

    Args:
        engine: with adapters, see `adapter_config`.
        dtype: in which they come; None: as they are kept, which is their float32 master where they have one.
    """
    reshard(engine.model)
    tensors = _tensors(engine)

    def sources() -> Iterator[Source]:
        state = {} if engine.optimizer is None else engine.optimizer.state
        for name, tensor in tensors.items():
            kept = state.get(tensor, {}).get("master", tensor.detach())
            yield Source(name, kept, dtype or kept.dtype)

    parts = {name: [CheckpointPart(name, tensor.shape, 0)] for name, tensor in tensors.items()}
    return WeightStream(sources, parts, BUCKET_BYTES, engine.device)


def adapter_config(engine: FSDPEngine) -> dict[str, Any]:
    """The entries of ``adapter_config.json``.

    Raises:
        ValueError: the engine has no adapters, or is a critic, whose head is trained beside them.
    """
    lora = _require_adapters(engine)
    modules = [name.removesuffix(".weight") for name in low_rank_factors(engine.model)]
    head = {"modules_to_save": ["score"]} if isinstance(engine.model, RewardModel) else {}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if isinstance(engine.model, PolicyModel) else "SEQ_CLS",
        "base_model_name_or_path": engine.path, "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "target_modules": modules, **head,
    }  # fmt: skip


@torch.no_grad()
def load_adapter(engine: FSDPEngine, folder: Path) -> None:
    """Fills the adapters of an engine from a folder of PEFT.

    Raises:
        ValueError: the folder cannot be read, or its adapter is another adapter than the engine's.
    """
    lora, found = _require_adapters(engine, folder), read_adapter_config(folder)
    if (found["r"], found["lora_alpha"]) != (lora.rank, lora.alpha):
        raise ValueError(
            f"the adapter in {folder} has rank {found['r']} and alpha {found['lora_alpha']}, but lora.rank is "
            f"{lora.rank} and lora.alpha is {lora.alpha}: give lora the numbers of the adapter"
        )
    file, targets = folder / f"{WEIGHTS}.safetensors", _tensors(engine)
    try:
        with safe_open(file, "pt") as stored:
            _check_same(folder, {name: stored.get_slice(name).get_shape() for name in [*stored.keys()]}, targets)
            for name, tensor in targets.items():
                _fill(engine, tensor, stored.get_slice(name))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the adapter in {folder}: {file.name}: {brief(error)}") from error


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The entries of ``adapter_config.json``.

    Raises:
        ValueError: it cannot be read, or its adapter is more than W x + (alpha / r) B A x.
    """
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kept = [name for name in found.get("modules_to_save") or () if name not in _HEADS]
        entries = {"r": int(found["r"]), "lora_alpha": found["lora_alpha"], **found, "modules_to_save": kept}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read the adapter in {folder}: {CONFIG}: {brief(error)}") from error
    if other := [name for name, plain in _PLAIN.items() if name in entries and entries[name] not in plain]:
        shown = ", ".join(f"{name}: {entries[name]!r}" for name in other)
        raise ValueError(
            f"the adapter in {folder} has {brief(shown)}, and only W x + (alpha / r) B A x is read: merge it into its "
            "model with PEFT's merge_and_unload, and give the merged folder as the model"
        )
    return entries


def _check_same(folder: Path, stored: Mapping[str, list[int]], targets: Mapping[str, Tensor]) -> None:
    lacking, extra = [x for x in targets if x not in stored], [x for x in stored if x not in targets]
    shapes = [name for name, x in targets.items() if name in stored and [*stored[name]] != [*x.shape]]
    found = {"it lacks {}": lacking, "this model has no place for {}": extra, "{} have other shapes": shapes}
    if wrong := [text.format(name_some(names)) for text, names in found.items() if names]:
        raise ValueError(
            f"the adapter in {folder} does not fit the model with lora.target_modules: {'; '.join(wrong)}. Name the "
            "adapter's layers in lora.target_modules, and take its model"
        )


def _fill(engine: FSDPEngine, tensor: Tensor, stored: Any) -> None:
    state = {} if engine.optimizer is None else engine.optimizer.state.get(tensor, {})
    for target in (tensor.detach(), *([state["master"]] if "master" in state else [])):
        local, region = local_part(target)
        local.copy_(stored[region])


def _tensors(engine: FSDPEngine) -> dict[str, Tensor]:
    """The parameters of the adapters, and of a reward model's head, by PEFT's names."""
    found: dict[str, Tensor] = {}
    if isinstance(engine.model, RewardModel):
        found |= {f"{_PREFIX}score.{name}": parameter for name, parameter in engine.model.head.named_parameters()}
    for name, (lora_B, lora_A, _) in low_rank_factors(engine.model).items():
        layer = _PREFIX + name.removesuffix(".weight")
        found |= {f"{layer}.lora_A.weight": lora_A, f"{layer}.lora_B.weight": lora_B}
    return found


def _require_adapters(engine: FSDPEngine, folder: Path | None = None) -> LoraConfig:
    lora = engine.config.lora
    if lora is None:
        hint = "" if folder is None else f", which the adapter in {folder} needs"
        raise ValueError(f"the model has no adapters{hint}: set lora in its section, with the adapter's rank and alpha")
    if experts := [name for name, (up, _, _) in low_rank_factors(engine.model).items() if up.dim() == 3]:
        raise ValueError(
            f"the files of an adapter have no place for adapters of experts ({experts[0]}): use the merged model, or "
            "the checkpoint of a run"
        )
    if isinstance(engine.model, ValueModel):
        raise ValueError(
            "the files of an adapter have no place for a critic's head, which is trained beside its adapters: use the "
            "checkpoint of a run"
        )
    return lora
