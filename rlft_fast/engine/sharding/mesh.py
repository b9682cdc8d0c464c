"""The device mesh of FSDP: ``(replicate, shard)``. All models of a run share one mesh per shape.

A shard size below the number of ranks is hybrid sharding (HSDP). Each group of neighbouring ranks then holds one copy
of the model: weights are gathered inside a group, and only gradients cross groups.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlft_fast.world import World, collective_timeout, ensure_process_group

# Share of the device's memory that a model's state may take. Activations, gathered weights and others need the rest.
_USABLE = 0.6


def resolve_shard_size(shard_size: int | Literal["auto"], world_size: int, state_bytes: int, memory_bytes: int) -> int:
    """The number of ranks that share one copy of a model.

    Args:
        shard_size: -1 for all ranks, 1 for a copy on each rank, n for groups of n ranks, or "auto" for the smallest
            number with which the state fits.
        world_size: number of ranks.
        state_bytes: bytes of the model's parameters, gradients and optimizer state.
        memory_bytes: memory of one rank's device.

    Raises:
        ValueError: the shard size does not divide the number of ranks, or no shard size fits.
    """
    if shard_size == "auto":
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        for n in divisors:
            if state_bytes <= n * _USABLE * memory_bytes:
                return n
        raise ValueError(
            f"shard_size auto: the model's {state_bytes / 2**30:.1f} GiB of state, over all {world_size} ranks, take "
            f"more than {_USABLE:.0%} of the {memory_bytes / 2**30:.1f} GiB of a device: use more ranks"
        )
    size = world_size if shard_size == -1 else shard_size
    if world_size % size:
        raise ValueError(
            f"shard_size is {size}, which does not divide the {world_size} ranks: "
            f"choose one of {[n for n in range(1, world_size + 1) if world_size % n == 0]}, -1 or auto"
        )
    return size


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]] = WeakKeyDictionary()


def device_mesh(shard_size: int, world: World) -> DeviceMesh:
    """The mesh for a shard size. It is made once, and has one axis if all ranks share one copy of the model.

    On a mesh of one axis FSDP reduces gradients once instead of twice.

    Args:
        shard_size: from `resolve_shard_size`.
        world: all ranks. Their devices have one type.
    """
    ensure_process_group()
    assert dist.group.WORLD is not None
    meshes = _meshes.setdefault(dist.group.WORLD, {})
    key = world.device.type, shard_size
    if key not in meshes:
        meshes[key] = _make_mesh(*key, world.size)
    return meshes[key]


def _make_mesh(device_type: str, shard_size: int, world_size: int) -> DeviceMesh:
    # DTensor caches what it derives from a mesh, by the mesh's value, which lacks this process's rank. A memory plan
    # pretends to be rank 0: its meshes must not equal those of the run.
    prefix = "pretended_" if dist.get_backend() == "fake" else ""
    names = (f"{prefix}replicate", f"{prefix}shard")
    if shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=names[1:])
    mesh = init_device_mesh(device_type, (world_size // shard_size, shard_size), mesh_dim_names=names)
    if timeout := collective_timeout():
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def shard_numel(shape: Sequence[int], shard_size: int) -> int:
    """Elements of a tensor's first shard, the largest one. FSDP2 deals out rows as `torch.chunk` does."""
    return -(-shape[0] // shard_size) * math.prod(shape[1:])


def device_memory(device: torch.device) -> int:
    """Bytes of memory for one rank: all of its GPU's memory, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def host_memory() -> int:
    """Bytes of memory that the processes of a machine may have, divided by the number of ranks on the machine.

    A container or a job of a cluster may have less than the machine: the kernel kills a process that takes more.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *memory_limits()]) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def memory_limits(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that Linux allows the control groups of a process, from its own group up to the root.

    Args:
        process: names the groups of the process, one of each hierarchy in a line.
        mount: where the hierarchies are: that of version 2 itself, and version 1's for memory in a folder.
    """
    limits = []
    for line in _lines(process):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts  # of the host, where a container sees its own group as the root
        for i in range(len(parts) + 1) if ".." not in parts else [0]:
            limits += [int(found) for found in _lines(root.joinpath(*parts[:i], name)) if found.isdecimal()]
    return limits


def _lines(file: Path) -> list[str]:
    """Of a file; none where it is missing, as on other systems, or may not be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
