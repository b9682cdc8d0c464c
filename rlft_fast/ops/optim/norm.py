"""Gradient norm over plain tensors and DTensors of any mix of meshes, placements, dtypes and devices.

    norm = (sum_i |g_i|^p)^(1/p) over every element of every gradient, each counted once

A sharded gradient contributes its local part, and the sums of |g|^p are added over exactly the mesh dimensions that
shard it; replicas are neither added nor communicated. Each process group takes one small all-reduce, and the host waits
for nothing: the norm stays on the device (float64 gradients apart, whose norm the host reads). Powers are added in
float64, since squares leave float32's range long before gradients do. Pipeline stages are the caller's to combine.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from rlft_fast.ops.library import check_device
from rlft_fast.ops.optim.memory_order import in_order_of


def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Global norm of the gradients of `parameters`.

    Every rank of a mesh must call this with the same parameters in any order; a rank may lack gradients that others
    have. A parameter without a gradient counts as 0, a parameter listed twice counts once.

    Args:
        parameters: a tensor or an iterable of tensors (a generator is consumed once), of which `.grad` is read.
        norm_type: p > 0, or inf for the largest magnitude.

    Returns:
        0-d on the device of the first parameter (of its mesh, for a DTensor); 0 for no parameters. A plain tensor, the
        same on every rank; float64 if a gradient is, else float32.

    Raises:
        ValueError: norm_type is not positive, or a gradient has a Partial placement or a sparse layout.
        TypeError: a gradient is not floating point.
    """
    return global_norm(gradients_of(parameters), norm_type)


# ---- which gradients, and who else holds parts of them -----------------------------------------------------------


_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class _Group(NamedTuple):
    """Identifies a process group over which sums of |g|^p are added.

    Sorting by these fields gives all ranks of a mesh the same order of mesh dimensions, which a sum over two of them
    needs, and all ranks of a group the same order of groups, without which they would wait for each other.
    """

    mesh_ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_dim: int
    device_type: str
    name: str


_Groups = dict[_Group, dist.ProcessGroup]
_Layout = tuple[DeviceMesh, tuple[Placement, ...]]


class Gradient(NamedTuple):
    """One parameter's gradient, and who else holds parts of it."""

    grad: Tensor | None
    """None where the parameter has none."""
    local: Tensor | None
    """This rank's part of it."""
    device: torch.device
    """Where its sum of |g|^p is reduced."""
    groups: _Groups
    """Groups that hold the other parts; empty for plain and replicated tensors."""
    dtype: torch.dtype
    """Of the gradient, or of the parameter where this rank has no gradient."""


@torch.no_grad()
def gradients_of(parameters: Tensor | Iterable[Tensor]) -> list[Gradient]:
    """The checked gradients of the parameters, each parameter once; one entry also where there is no gradient."""
    # Each tensor once; by id, for a tensor's hash and comparison are Python functions.
    tensors = [parameters] if isinstance(parameters, Tensor) else list({id(p): p for p in parameters}.values())
    known: dict[_Layout, _Groups] = {}
    return [_gradient(index, tensor, known) for index, tensor in enumerate(tensors)]


def _gradient(index: int, parameter: Tensor, known: dict[_Layout, _Groups]) -> Gradient:
    grad = parameter.grad
    if grad is not None:
        _check_gradient(index, grad)
    # A rank without this gradient still has to join the all-reduce, since other ranks may have the gradient.
    layout = parameter if grad is None else grad
    if not isinstance(layout, DTensor):
        return Gradient(grad, grad, layout.device, {}, layout.dtype)
    local = None if grad is None else layout.to_local()
    key = layout.device_mesh, layout.placements
    if key not in known:  # a model has thousands of parameters and a handful of layouts
        known[key] = _shard_groups(*key)
    return Gradient(grad, local, _mesh_device(layout), known[key], layout.dtype)


def _check_gradient(index: int, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ValueError(f"gradient {index} has layout {grad.layout}, expected a dense one: use sparse=False.")
    if grad.dtype not in _DTYPES:
        raise TypeError(f"gradient {index} is {grad.dtype}, expected float64, float32, float16 or bfloat16.")
    if isinstance(grad, DTensor):
        _check_placements(index, grad)


def _check_placements(index: int, grad: DTensor) -> None:
    names = grad.device_mesh.mesh_dim_names
    for mesh_dim, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ValueError(
                f"gradient {index} of shape {tuple(grad.shape)} has placement {placement} on mesh dimension "
                f"{names[mesh_dim] if names else mesh_dim}, expected Shard or Replicate: "
                "redistribute it before clipping."
            )


def _mesh_device(tensor: DTensor) -> torch.device:
    """The device that the mesh's backend communicates from; an offloaded shard lies elsewhere."""
    device_type = tensor.device_mesh.device_type
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )


def _shard_groups(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Groups:
    mesh_ranks = tuple(mesh.mesh.flatten().tolist())
    groups = {}
    for mesh_dim, placement in enumerate(placements):
        if not placement.is_replicate() and mesh.size(mesh_dim) > 1:
            group = mesh.get_group(mesh_dim)
            key = _Group(mesh_ranks, tuple(mesh.shape), mesh_dim, mesh.device_type, group.group_name)
            groups[key] = group
    return groups


# ---- the norm ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def global_norm(gradients: list[Gradient], norm_type: float) -> Tensor:
    """`grad_norm` of gradients that are checked already."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, expected a positive number or inf.")
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    norm = _norm(gradients, norm_type)
    if all(gradient.dtype != torch.float64 for gradient in gradients):
        return norm.float()
    return norm if norm.isfinite() else _scaled_norm(gradients, norm_type)


def _norm(gradients: list[Gradient], norm_type: float) -> Tensor:
    """0-d float64; inf where the sum of |g|^p is not finite."""
    powers = [power.to(gradients[0].device) for power in _reduced_powers(gradients, norm_type)]
    total = _combine(powers, norm_type)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _scaled_norm(gradients: list[Gradient], norm_type: float) -> Tensor:
    """The norm of gradients that are divided by their largest magnitude: powers may leave float64's range.

    All ranks get here together, because they have the same norm, and the same dtypes of parameters.
    """
    largest = _norm(gradients, math.inf)
    if not largest.isfinite():
        return largest
    scaled = [
        gradient
        if gradient.local is None
        else gradient._replace(local=gradient.local / largest.to(gradient.local.device))
        for gradient in gradients
    ]
    return largest * _norm(scaled, norm_type)


def _reduced_powers(gradients: list[Gradient], norm_type: float) -> list[Tensor]:
    """The sums of |g|^p of all ranks, one 0-d tensor per combination of process groups that gradients are sharded over.

    A gradient sharded over two mesh dimensions is added over one group and then the other. Gradients whose groups
    coincide share one all-reduce. `_Group` says why every rank runs the same ones, whatever its parameters' order.
    """
    groups = {key: group for gradient in gradients for key, group in gradient.groups.items()}
    by_layout: dict[tuple[_Group, ...], list[Gradient]] = {}
    for gradient in gradients:
        by_layout.setdefault(tuple(sorted(gradient.groups)), []).append(gradient)
    layouts = sorted(by_layout)
    powers = _local_powers([by_layout[layout] for layout in layouts], norm_type)
    for key in sorted(groups):
        members = [i for i, layout in enumerate(layouts) if key in layout]
        vector = torch.stack([powers[i] for i in members])
        _all_reduce(vector, groups[key], norm_type)
        for i, power in zip(members, vector.unbind(), strict=True):
            powers[i] = power
    return powers


def _all_reduce(vector: Tensor, group: dist.ProcessGroup, norm_type: float) -> None:
    if math.isinf(norm_type):
        vector.nan_to_num_(nan=math.inf, posinf=math.inf)  # the largest of nan and x is x on some backends
        dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    else:
        dist.all_reduce(vector, group=group)


def _local_powers(layouts: list[list[Gradient]], norm_type: float) -> list[Tensor]:
    """This rank's sum of |g|^p (largest |g| for inf) of every list, in float64 on the device where it is reduced.

    All lists go in one pass per device and dtype.
    """
    parts: list[list[Tensor]] = [[] for _ in layouts]
    passes: dict[_Kind, list[list[Tensor]]] = {}
    for i, gradients in enumerate(layouts):
        for kind, tensors in by_device_and_dtype([g.local for g in gradients if g.local is not None]).items():
            passes.setdefault(kind, [[] for _ in layouts])[i] = tensors
    for lists in passes.values():
        tensors, sizes = [tensor for tensors in lists for tensor in tensors], [len(tensors) for tensors in lists]
        sums = torch.ops.rlft_fast.multi_tensor_norm_pow(tensors, sizes, norm_type).unbind()
        for i in range(len(layouts)):
            if lists[i]:
                parts[i].append(sums[i].to(layouts[i][0].device))
    return [
        _combine(powers, norm_type) if powers else torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        for powers, gradients in zip(parts, layouts, strict=True)
    ]


def _combine(powers: list[Tensor], norm_type: float) -> Tensor:
    """The sum of |g|^p (largest |g| for inf) of several sets of gradients. One set costs no kernel."""
    return functools.reduce(torch.maximum if math.isinf(norm_type) else torch.add, powers)


_Kind = tuple[torch.device, torch.dtype]


def by_device_and_dtype(tensors: list[Tensor]) -> dict[_Kind, list[Tensor]]:
    """The tensors that have elements, contiguous, in lists of one device and dtype; copies where they have gaps."""
    groups: dict[_Kind, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            groups.setdefault((tensor.device, tensor.dtype), []).append(in_order_of(tensor, tensor))
    for device, _ in groups:
        check_device(device)
    return groups


# ---- fakes -------------------------------------------------------------------------------------------------------


@torch.library.register_fake("rlft_fast::multi_tensor_norm_pow")
def _(tensors, group_sizes, norm_type):
    return tensors[0].new_empty((len(group_sizes),), dtype=torch.float64)
