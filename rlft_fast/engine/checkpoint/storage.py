"""Tensors on disk. Each process writes its own parts of the tensors, and any number of processes reads them.

Files are safetensors in the layout of torch DCP's ``HuggingFaceStorageWriter``, and DCP's ``HuggingFaceStorageReader``
reads and reshards them. DCP's writer is not used for two reasons. It serialises a file to bytes first, which doubles
the memory and holds the interpreter's lock: 0.4 to 0.7 s for 400 MB, where ``save_file`` holds it for 0.01 s and takes
a third of the time in all. And it makes a global plan over a collective. Here the placements alone say which process
writes which part, so saving needs no collective.
"""

import json
import stat
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from rlft_fast.files import fsync, is_apple_double
from rlft_fast.models import local_part
from rlft_fast.world import World


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a tensor that one process holds.

    Args:
        data: elements of the part.
        offsets: position of the first element in the whole tensor, one number per dimension.
    """

    data: Tensor
    offsets: tuple[int, ...]


def whole(tensor: Tensor) -> LocalPart:
    """The part that is the whole tensor."""
    return LocalPart(tensor.detach(), (0,) * tensor.dim())


def local_parts(tensors: Mapping[str, Tensor], world: World) -> dict[str, LocalPart]:
    """The parts that this process has to write. All processes together write every element once.

    Args:
        tensors: DTensors, and plain tensors that are the same on every rank. The parts alias them.
        world: all processes.
    """
    parts = {}
    for name, tensor in tensors.items():
        local, region = local_part(tensor)
        is_empty_shard = local.numel() == 0 and tensor.numel() > 0  # the last ranks may have no rows
        if _writes(name, tensor, world) and not is_empty_shard:
            parts[name] = LocalPart(local.detach(), tuple(along.start for along in region))
    return parts


def _writes(name: str, tensor: Tensor, world: World) -> bool:
    """Whether this process writes its part of the tensor.

    Only one of the processes that hold the same part does. The name decides which one, so replicas share the work.
    """
    if not isinstance(tensor, DTensor):
        return world.is_first
    mesh, turn = tensor.device_mesh, zlib.crc32(name.encode())
    replicated = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == turn % mesh.size(axis) for axis in replicated)


class Snapshot:
    """Copies of tensors in host memory. The memory is kept for the next copies."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def take(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copies all tensors. The copies are complete on return, and valid until the next call."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return buffers

    def _buffer(self, name: Any, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def save_parts(parts: Mapping[str, LocalPart], path: Path) -> None:
    """Writes the parts of one process durably. `load_tensors` reads them.

    Raises:
        OSError, SafetensorError: the file cannot be written, because the disk is full for example.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = json.dumps({name: {"saved_offsets": part.offsets} for name, part in parts.items()})
    data = {name: part.data.cpu().contiguous() for name, part in parts.items()}
    save_weights(data, path, {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"})


def save_weights(data: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file durably, with the permissions of the umask: ``save_file`` lets only the owner read."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(data, path, metadata=metadata)
    path.chmod(mode)
    fsync(path)


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, world: World) -> None:
    """Fills tensors of any sharding, in place, from the parts of any number of processes. Every rank must call it."""
    with warnings.catch_warnings():  # DCP warns about loading in a single process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=world.size == 1)


class _Reader(HuggingFaceStorageReader):
    """DCP's reader, without the files that macOS adds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.fs = _Files()


class _Files(FileSystem):
    def ls(self, path: Any) -> list[str]:
        return [name for name in super().ls(path) if not is_apple_double(name)]
