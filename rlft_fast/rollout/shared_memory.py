"""A backend of vLLM's weight-transfer interface for CPUs: pieces of weights pass through a file in shared memory.

    trainer: fills the file -> update_weights(slots of the file) -> fills the file again -> ...
    worker:  copies the pieces out of the slots, and loads each weight that is complete

vLLM's workers import this module for `WorkerExtension`. The import registers the backend in the worker's process.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlft_fast.engine import BUCKET_BYTES, Piece, PieceJoiner, WeightStream, checksum
from rlft_fast.rollout.vllm import renew_packed_weights

BACKEND = "shared_memory"
_ALIGNMENT = 16  # bytes


class StreamSource(WeightSource):
    """A stream of weights in the form that vLLM's trainers take.

    Args:
        stream: of the weights to send now.
    """

    def __init__(self, stream: WeightStream) -> None:
        self.stream = stream

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(*fields) for fields in self.stream.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.stream.tensors()


class Slot(NamedTuple):
    """A run of bytes in the file with consecutive elements of one weight. Slots follow each other."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    numel: int

    @property
    def num_bytes(self) -> int:
        """Bytes up to the beginning of the next slot."""
        return -(-self.numel * getattr(torch, self.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT


# ---- the trainer's side ---------------------------------------------------------------------------------------------


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """Settings of the trainer's side. Each process sends to the vLLM beside it, so each process is rank 0."""

    backend: ClassVar[str] = BACKEND
    rank: int = 0
    num_bytes: int = BUCKET_BYTES
    check: bool = False


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """Sends the weights of a `StreamSource`."""

    init_info_cls = SharedMemoryTrainerInitInfo
    buffer: Tensor

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rlft_fast-") as file:
            os.truncate(file.name, init_info.num_bytes)
            sender.buffer = _map(file.name, init_info.num_bytes)
            info = {"path": file.name, "num_bytes": init_info.num_bytes, "check": init_info.check}
            client.init_weight_transfer_engine(info)
        return sender  # the file has no name now, and is freed when both processes that have mapped it end

    def send_weights(self) -> None:
        assert isinstance(self.source, StreamSource)
        self.client.start_weight_update()
        for slots in fill(self.source.stream.pieces(), self.buffer):
            self.client.update_weights({"slots": [list(slot) for slot in slots]})
        self.client.finish_weight_update()


def fill(pieces: Iterable[Piece], buffer: Tensor) -> Iterator[list[Slot]]:
    """Writes the pieces into the buffer. Yields the buffer's slots each time that it is full, and at the end."""
    slots: list[Slot] = []
    used = 0
    for piece in pieces:
        start = 0
        while start < piece.data.numel():
            count = min((len(buffer) - used) // piece.data.itemsize, piece.data.numel() - start)
            part = piece.data[start : start + count]
            buffer[used : used + part.nbytes].view(piece.data.dtype).copy_(part)
            dtype = str(piece.data.dtype).removeprefix("torch.")
            slots.append(Slot(piece.name, dtype, list(piece.shape), piece.offset + start, count))
            used += slots[-1].num_bytes
            start += count
            if used >= len(buffer):
                yield slots
                slots, used = [], 0
    if slots:
        yield slots


def _map(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


# ---- the worker's side ----------------------------------------------------------------------------------------------


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Settings of the worker's side, sent once at the beginning."""

    path: str
    num_bytes: int
    check: bool


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """The present slots of the file, each as a list of the fields of `Slot`."""

    slots: list[list[Any]]


class SharedMemoryWorker(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Copies weights from the file into vLLM's model, layer by layer."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    buffer: Tensor
    check: bool

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self.buffer = _map(init_info.path, init_info.num_bytes)
        self.check = init_info.check

    def start_weight_update(self) -> None:
        self.joiner = PieceJoiner()
        self.loaded: set[str] = set()
        self.checksums: dict[str, str] = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class also waits for an accelerator

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        position = 0
        for fields in update_info.slots:
            slot = Slot(*fields)
            dtype = getattr(torch, slot.dtype)
            data = self.buffer[position : position + slot.numel * dtype.itemsize].view(dtype)
            piece = Piece(slot.name, torch.Size(slot.shape), slot.offset, data, borrowed=True)
            self._load(self.joiner.add(piece))
            position += slot.num_bytes

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        if not weights:
            return
        if self.check:
            self.checksums |= {name: checksum(weight) for name, weight in weights}
        self.loaded |= self.model.load_weights(weights) or set()

    def finish_weight_update(self) -> None:
        self.joiner.finish()
        finalize_layerwise_reload(self.model, self.model_config)
        renew_packed_weights(self.model)
        if missing := {name for name, _ in self.model.named_parameters()} - self.loaded:
            raise RuntimeError(f"vLLM did not get all weights of its model: {', '.join(sorted(missing)[:3])}, ...")

    def shutdown(self) -> None:
        """Does nothing: the file is freed with the process."""


class WorkerExtension:
    """Adds methods to vLLM's worker, for ``collective_rpc``."""

    weight_transfer_engine: SharedMemoryWorker

    def received_checksums(self) -> dict[str, str]:
        return self.weight_transfer_engine.checksums


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWorker)
WeightTransferTrainerFactory.register_engine(BACKEND, SharedMemoryTrainer)
