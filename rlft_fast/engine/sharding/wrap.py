"""Which modules become FSDP units, and how units gather weights and reduce gradients.

FSDP gathers the weights of a unit before the unit runs and frees them afterwards. Units are the blocks that a model
repeats (of text and vision), the embedding, and the head. The root holds all other weights. A tied embedding and head
stay in the root: two units would own a copy each, and the copies would train apart. Units are found by structure, so a
new architecture needs no list.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from rlft_fast.engine.sharding.narrow import narrow_weights


def find_units(model: nn.Module, class_names: Sequence[str] | None = None) -> list[tuple[str, nn.Module]]:
    """Names and modules of the units, in the order in which they run. The root is not among them.

    The root has what a block shares with a module outside itself: two units would each train a copy of a tied weight.

    Args:
        model: contains a transformers model.
        class_names: classes of the blocks; None: the classes that the model declares (``_no_split_modules``), or if it
            declares none, the members of its module lists.

    Raises:
        ValueError: the model has no module of one of the classes.
    """
    blocks = _without_ties(model, _blocks(model, class_names))
    units = blocks | _embedding_and_head(model, blocks)
    return [(name, module) for name, module in model.named_modules() if name in units]


def decoder_blocks(model: nn.Module, class_names: Sequence[str] | None = None) -> list[nn.Module]:
    """The blocks that the model repeats. Arguments as in `find_units`."""
    return list(_blocks(model, class_names).values())


def _blocks(model: nn.Module, class_names: Sequence[str] | None) -> dict[str, nn.Module]:
    declared = set(class_names) if class_names is not None else _declared(model)
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in declared}
    if class_names is not None and (unknown := declared - {type(module).__name__ for module in found.values()}):
        repeated = sorted({type(module).__name__ for module in _list_members(model).values()})
        raise ValueError(
            f"wrap names {', '.join(sorted(unknown))}, but this model has no such module; it repeats "
            f"{', '.join(repeated)}"
        )
    return _outermost(found or _list_members(model))


def _declared(model: nn.Module) -> set[str]:
    """Class names that transformers declares, as a list, a set or None on the model's class."""
    return {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in module._no_split_modules or ()
    }


def _list_members(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{name}.{key}": member
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for key, member in module.named_children()
        if any(True for _ in member.parameters())
    }


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Leaves out modules inside another of the modules, such as the experts of a block."""
    return {
        name: module for name, module in modules.items() if not any(name.startswith(f"{other}.") for other in modules)
    }


def _without_ties(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    owners = _owners(model)
    return {
        name: block
        for name, block in blocks.items()
        if all(owners[parameter] == number for parameter, number in _owners(block).items())
    }


def _owners(model: nn.Module) -> Counter[int]:
    """Number of modules that have each parameter, by its id."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def _embedding_and_head(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    owners = _owners(model)
    ends = [end for end in _ends(model) if end is not None]
    return {
        name: module
        for name, module in model.named_modules()
        if any(module is end for end in ends)
        and not any(name.startswith(f"{block}.") for block in blocks)
        and all(owners[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    }


def _ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding of the tokens, and the head."""
    pretrained = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if pretrained is None:
        return None, None
    return pretrained.get_input_embeddings(), pretrained.get_output_embeddings()


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    class_names: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Wraps a model's units and its root by FSDP2, in place; works on the meta device.

    Args:
        model: see `find_units`.
        mesh: from `device_mesh`.
        compute_dtype: dtype of gathered weights; gradients are reduced in float32.
        class_names: see `find_units`.
        reshard_after_forward: whether units free their gathered weights between forward and backward. The last unit
            keeps them, because its backward comes next.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory; each unit is copied when it runs.

    Returns:
        Name and module of every unit.
    """
    units = find_units(model, class_names)
    # Inputs are not cast: hidden states have the dtype already, and the loss needs its fields in float32.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for i, (_, unit) in enumerate(units):
        reshard = reshard_after_forward and i < len(units) - 1
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy)
    _prefetch([unit for _, unit in units], _ends(model))
    return units


def _prefetch(units: Sequence[nn.Module], ends: Sequence[nn.Module | None]) -> None:
    """While a unit computes, FSDP gathers the weights of the unit that runs next.

    A block prefetches only blocks of its own class, and the head. Otherwise a batch without images would wait for
    vision blocks that never run.
    """
    embedding, head = ends
    for unit, following in pairwise(units):
        if type(unit) is type(following) or unit is embedding or following is head:
            assert isinstance(unit, FSDPModule)
            assert isinstance(following, FSDPModule)
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])


def reshard(model: nn.Module) -> None:
    """Frees all gathered weights. Some units keep theirs for a backward pass, which does not come after inference.

    While the weights of a unit are gathered, the unit's parameters are the gathered tensors instead of the shards. A
    reader of the shards calls this first. So does a reader of weights that `narrow` has copied.
    """
    if weights := narrow_weights(model):
        weights.step_back()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, every rank has all weights whole. Afterwards the weights are sharded as before.

    Weights are gathered once, not once per pass. No collective runs inside, so ranks may do different work.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [(group, group.post_forward_mesh_info) for unit in units if unit is not model for group in _groups(unit)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)  # the root is never resharded after forward
        unit.unshard()
    try:
        yield
    finally:
        reshard(model)
        for group, mesh in before:
            group.post_forward_mesh_info = mesh


def reduce_gradients(model: nn.Module, is_last: bool, every_micro_batch: bool) -> None:
    """Sets whether the backward pass of the next micro-batch reduces gradients.

    Args:
        model: sharded or not.
        is_last: whether the micro-batch is the last of the step. Only then do the copies of a hybrid mesh add up their
            gradients, because the copies are often on different machines.
        every_micro_batch: reduce after each micro-batch, not only the last, among the ranks that share one copy.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(is_last or every_micro_batch)
    model.set_requires_all_reduce(is_last)
    for unit in model.modules():
        # Without the reduction, FSDP fails at a unit that never runs, such as a block of a frozen tower.
        if isinstance(unit, FSDPModule) and _is_frozen(unit):
            unit.set_requires_gradient_sync(True, recurse=False)


def hand_over_gradients(model: nn.Module) -> None:
    """After the last backward pass: each parameter has its own data and its whole gradient, as an optimizer needs."""
    if weights := narrow_weights(model):
        weights.hand_over_gradients()


def move_gradients(model: nn.Module, device: torch.device | str) -> None:
    """Moves gradients that are not in the parameters yet."""
    if weights := narrow_weights(model):
        weights.to(device)


def discard_gradients(model: nn.Module) -> None:
    """Drops all gradients, also gradients that FSDP has not reduced yet, and FSDP's state of a failed pass."""
    if weights := narrow_weights(model):
        weights.drop_gradients()
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # torch >= 2.12
        state: Any = model._get_fsdp_state()
        if hasattr(state._comm_ctx, "all_gather_state"):  # made by the first forward pass
            model.reset_iter_state()
    for group in (group for unit in model.modules() if isinstance(unit, FSDPModule) for group in _groups(unit)):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:  # reset_iter_state is documented to drop these, but does not (torch 2.13)
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    model.zero_grad(set_to_none=True)


def _is_frozen(unit: FSDPModule) -> bool:
    """Whether no weight of a unit trains, so that there is nothing to reduce."""
    return not any(x.sharded_param.requires_grad for group in _groups(unit) for x in group.fsdp_params)


def _groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP gathers together for this unit."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group until torch 2.12
    return [group for group in groups if group is not None]


def describe_units(model: nn.Module, units: Iterable[tuple[str, nn.Module]]) -> str:
    """A table of the units: for each class, the number of units and the parameters of one unit."""
    rows: dict[tuple[str, int], list[str]] = {}
    inside: set[int] = set()
    for name, unit in units:
        parameters = list(unit.parameters())
        inside |= {id(parameter) for parameter in parameters}
        rows.setdefault((type(unit).__name__, sum(p.numel() for p in parameters)), []).append(name)
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    rows[(f"{type(model).__name__} (root)", rest)] = [""]
    lines = [f"{'unit':32} {'count':>6} {'parameters each':>18}  first"]
    lines += [f"{kind:32} {len(names):>6} {numel:>18,}  {names[0]}" for (kind, numel), names in rows.items()]
    return "\n".join(lines)
