"""From a model folder and a configuration to a sharded model without memory.

`FSDPEngine.initialize` starts with these functions. They also run in a pretended process group, where `rlft-fast plan`
finds out what a large run needs.
"""

import json
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rlft_fast.config import EngineConfig, HeadKind
from rlft_fast.engine.sharding.blocks import checkpoint_activations, compile_blocks, offload_inputs
from rlft_fast.engine.sharding.mesh import device_memory, device_mesh, resolve_shard_size
from rlft_fast.engine.sharding.narrow import narrow
from rlft_fast.engine.sharding.wrap import decoder_blocks, reshard, shard_model
from rlft_fast.engine.torch_optim import moment_bytes
from rlft_fast.models import (
    PolicyModel,
    RLModel,
    add_lora,
    build_critic,
    build_policy,
    build_reward_model,
    check_routers,
    name_kinds,
    require_divisible_heads,
)
from rlft_fast.ops.precision import sums_in_float32
from rlft_fast.world import World

# Largest accepted difference of log-probabilities between the packed forward and the model's own.
_MOST_DEVIATION = 0.01
_MOST_DEVIATION_IN_BFLOAT16 = 0.5
# Methods by which a policy runs its layers to generate.
_POLICY_METHODS = ("prefill", "generate", "prefill_rows", "next_logits")


def build_model(path: str, config: EngineConfig, head: HeadKind, *, trains: bool) -> RLModel:
    """Builds the model on the meta device, with adapters, activation checkpointing and compilation as configured.

    Args:
        path: model folder. Weights are not read.
        config: configuration of the engine.
        head: kind of the model's head.
        trains: whether weights, or adapters, get gradients.

    Raises:
        ValueError: the folder cannot be used, the adapters or a pattern of frozen weights do not fit the model, the
            routers have no auxiliary loss, or `sequence_parallel` does not divide the number of attention heads.
    """
    dtype = getattr(torch, config.param_dtype)
    if head == "logprob":
        model = build_policy(path, dtype, config.workspace_mib)
    elif head == "value":
        model = build_critic(path, dtype)
    else:
        model = build_reward_model(path, dtype)
    require_divisible_heads(model.backbone, config.sequence_parallel, model.padded_because)
    freeze(model.pretrained, config.freeze)
    if trains and config.router_aux_loss_coef:
        check_routers(model.backbone, auxiliary_loss=True)
    if config.lora is not None:
        add_lora(model, config.lora.rank, config.lora.alpha, config.lora.target_modules)
    prepare_blocks(model, config, trains=trains, compiles=not model.padded_because)
    return model


def prepare_blocks(
    model: nn.Module, config: EngineConfig, *, trains: bool, compiles: bool = True, is_random: bool = False
) -> None:
    """Freezes a model that does not train, and checkpoints and compiles the blocks as configured, in place.

    Args:
        model: see `decoder_blocks`.
        config: configuration of the engine.
        trains: whether weights get gradients.
        compiles: whether blocks may be compiled: loops over time would be unrolled for every length.
        is_random: whether a block may draw random numbers, such as dropout.
    """
    if not trains:
        model.requires_grad_(False)
    blocks = decoder_blocks(model, config.wrap)
    mode = config.activation_checkpointing if trains else "none"
    if mode in ("selective", "full", "offload"):
        checkpoint_activations(blocks, mode, is_random=is_random)
    if config.compile is True and compiles:
        compile_blocks(blocks)
    if mode == "offload":
        offload_inputs(blocks, torch.device("cpu"))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the weights whose names fit a pattern.

    Raises:
        ValueError: a pattern fits no name.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not (found := [name for name in names if fnmatchcase(name, pattern)]):
            raise ValueError(f"freeze has the pattern {pattern!r}, which fits none of {name_kinds(names)}")
        for name in found:
            names[name].requires_grad_(False)


def shard(model: nn.Module, config: EngineConfig, world: World) -> list[tuple[str, nn.Module]]:
    """Wraps the model by FSDP2, in place, unless there is nothing to shard or offload; one process needs no more than
    casts (`narrow`).

    Returns:
        Name and module of every unit; empty if the model is not wrapped.

    Raises:
        ValueError: the shard size does not divide the number of ranks, or nothing fits.
    """
    config = config.for_device(world.device.type)
    memory = device_memory(world.device)
    size = resolve_shard_size(config.shard_size, world.size, state_bytes(model, config), memory)
    methods = [name for name in ("deviation", *_POLICY_METHODS) if hasattr(model, name)]
    compute_dtype = getattr(torch, config.compute_dtype)
    if not is_wrapped(config, world.size):
        if config.compute_dtype != "float32":
            narrow(model, compute_dtype, tuple(methods), keeps_memory=config.cuda_graphs)
        return []
    units = shard_model(
        model,
        device_mesh(size, world),
        compute_dtype=compute_dtype,
        class_names=config.wrap,
        reshard_after_forward=config.reshard_after_forward,
        cpu_offload=config.cpu_offload,
    )
    for method in methods:
        register_fsdp_forward_method(model, method)  # the method then gathers the root's weights, as forward does
    return units


def is_wrapped(config: EngineConfig, world_size: int) -> bool:
    """Whether `shard` wraps a model by FSDP."""
    return world_size > 1 or config.cpu_offload


def state_bytes(model: nn.Module, config: EngineConfig) -> int:
    """Bytes that one copy of the model keeps on its devices between steps: weights, gradients and optimizer state.

    Moments that ``optimizer.cpu_offload`` keeps in the CPU's memory do not count.
    """
    width = getattr(torch, config.param_dtype).itemsize
    master = 4 if config.param_dtype == "bfloat16" else 0
    moments = (
        0 if config.optimizer.cpu_offload else moment_bytes(model, config.optimizer, lambda parameter: parameter.shape)
    )
    per_trained = width + master
    return moments + sum(p.numel() * (width + (per_trained if p.requires_grad else 0)) for p in model.parameters())


def require_own_numbers(model: RLModel, config: EngineConfig) -> None:
    """Makes a loaded model run padded if its packed forward and its own forward give different numbers.

    In bfloat16 it warns instead: the two kinds of attention round differently there. In float32 all bits are
    multiplied here, whatever torch.set_float32_matmul_precision allows to training: on CPUs with bfloat16, "medium"
    alone makes differences of 0.3.

    Raises:
        ValueError: the padded numbers differ by more than rounding explains, too, or the ranks share micro-batches,
            which a padded model cannot; the message has the difference.
    """
    deviation = _deviation(model)
    is_narrow = "bfloat16" in (config.compute_dtype, config.param_dtype)
    most = _MOST_DEVIATION_IN_BFLOAT16 if is_narrow else _MOST_DEVIATION
    if not deviation > most:  # NaN passes: the weights themselves are NaN, whatever the attention does
        return
    way, name = "padded" if model.padded_because else "packed", type(model.pretrained).__name__
    what = "log-probabilities" if isinstance(model, PolicyModel) else "hidden states"
    difference = f"{what} of {way} sequences differ by {deviation:.3g} from those of {name}'s own forward on 8 tokens"
    if is_narrow:
        warnings.warn(f"{difference}. Rounding explains less: compare with float32", stacklevel=2)
    elif model.padded_because:
        raise ValueError(f"{difference}: it is not causal, or transforms its output in an unknown way")
    else:
        model.run_padded(f"has other {what} if it is packed (they differ by {deviation:.3g})")
        require_divisible_heads(model.backbone, config.sequence_parallel, model.padded_because)
        require_own_numbers(model, config)


def _deviation(model: RLModel) -> float:
    embedding = cast(nn.Embedding, model.pretrained.get_input_embeddings())
    # Mllama has embeddings of tokens that it never predicts.
    known = len(model.head.weight) if isinstance(model, PolicyModel) else embedding.num_embeddings
    # As an argument: on a GPU, FSDP of torch 2.11 fails at a method that is called without any.
    token_ids = torch.linspace(0, min(known, embedding.num_embeddings) - 1, 8, device=embedding.weight.device).long()
    with torch.compiler.set_stance("force_eager"), sums_in_float32(embedding.weight):
        deviation = model.deviation(token_ids).item()
    reshard(model)  # the root and the last block would keep their gathered weights
    return deviation


def require_same_model(
    path: str, config: EngineConfig, head: HeadKind | None, num_training_steps: int | None, world: World
) -> None:
    """Requires that all ranks were given the same model and settings.

    Raises:
        ValueError: ranks differ; raised on every rank, and the message names the differences.
    """
    file = Path(path) / "config.json"
    model = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    engine = config.model_dump(mode="json") | {"head": head, "num_training_steps": num_training_steps}
    world.require_agreement("engine configuration", engine | {f"config.json: {key}": model[key] for key in model})
