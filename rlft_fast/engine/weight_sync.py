"""Whole weights out of sharded ones, for the rollout and for export: a stream, one collective per bucket.

    shards -> cast into one flat buffer -> one all-gather -> pieces -> joined to whole weights, or sent as they are

Names and shapes are those of the model's original checkpoint, which every reader knows: where the model has the experts
of a layer in one tensor, the checkpoint has a few tensors for each expert, and pieces are cut between them.

A bucket ends where it is full, be it inside a weight; so a stream of pieces needs one bucket of memory however large a
weight is (gloo takes another for itself), and a stream of whole weights needs the weights at hand besides.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlft_fast.engine.sharding import shard_numel
from rlft_fast.models import CheckpointPart, RLModel, checkpoint_tensors, head_parameters, low_rank_factors
from rlft_fast.ops import FusedAdamW

BUCKET_BYTES = 256 * 2**20  # a tenth of a second on a GPU's links, and little beside a model that needs sharding
_ALIGNMENT = 16  # bytes; pieces are read back as tensors of their dtype
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Source(NamedTuple):
    """A weight to stream, sharded or not, in the dtype that it has at the other end."""

    name: str
    tensor: Tensor
    dtype: torch.dtype


class Piece(NamedTuple):
    """Consecutive elements of a weight."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Of the first element, in the flattened weight."""
    data: Tensor
    """(N,) in the dtype that was asked for. Of a sharded weight it is valid until the next piece is asked for."""
    borrowed: bool
    """Whether ``data`` lies in the bucket."""


@torch.no_grad()
def weight_sources(model: RLModel, optimizer: FusedAdamW | None, dtype: torch.dtype | None = None) -> Iterator[Source]:
    """A model's weights by its own names, still in shards: tied ones once, adapters merged.

    Args:
        model: not gathered.
        optimizer: its float32 masters stand for the weights that have one.
        dtype: of the parameters at the other end; None: as they are kept. Buffers keep theirs.
    """
    factors = low_rank_factors(model)
    seen: set[int] = set()
    for name, tensor in (checkpoint_tensors(model.pretrained) | head_parameters(model)).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        state = optimizer.state.get(tensor, {}) if optimizer is not None else {}
        weight = state.get("master", tensor.detach())
        if name in factors:
            weight = _merged(weight, *factors[name])
        cast = dtype if isinstance(tensor, nn.Parameter) else None
        yield Source(name, weight, cast or weight.dtype)


def stream_pieces(sources: Iterable[Source], bucket_bytes: int, device: torch.device) -> Iterator[Piece]:
    """Every element of every weight once, weights in the order of the sources; all ranks must iterate to the end.

    Weights that this process holds whole come as they are, without a copy if their dtype is the right one.

    Args:
        sources: the same names, shapes and placements on all ranks. Sharded ones are split along their first dimension.
        bucket_bytes: memory of the bucket.
        device: where the bucket is.
    """
    bucket: _Bucket | None = None
    for source in sources:
        if not isinstance(source.tensor, DTensor):
            data = source.tensor.detach().to(source.dtype).contiguous().view(-1)
            piece = Piece(source.name, source.tensor.shape, 0, data, borrowed=False)
            if bucket is None:
                yield piece
            else:
                bucket.entries.append(piece)  # after those that are in it
            continue
        bucket = bucket or _Bucket(source.tensor, bucket_bytes, device)
        yield from bucket.add(source)
    if bucket is not None:
        yield from bucket.flush()


def split_pieces(pieces: Iterable[Piece], parts: Mapping[str, list[CheckpointPart]]) -> Iterator[Piece]:
    """The same elements as pieces of the parts that a checkpoint has.

    Args:
        pieces: of the model's weights.
        parts: of each of them by name, in their order; together they are all of it.
    """
    for piece in pieces:
        own = parts[piece.name]
        begin, end = piece.offset, piece.offset + piece.data.numel()
        for part in own[bisect_right(own, begin, key=lambda part: part.start) - 1 :]:
            first, last = max(part.start, begin), min(part.start + math.prod(part.shape), end)
            if first >= end:
                break
            data = piece.data[first - begin : last - begin]
            yield Piece(part.name, part.shape, first - part.start, data, piece.borrowed)


def join_pieces(
    pieces: Iterable[Piece], parts: Mapping[str, list[CheckpointPart]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights, or the parts that a checkpoint has of them, by name in their order; no two share elements."""
    joiner = PieceJoiner()
    for piece in pieces:
        for name, whole in joiner.add(piece):
            for part in [CheckpointPart(name, whole.shape, 0)] if parts is None else parts[name]:
                yield part.name, whole.view(-1)[part.start : part.start + math.prod(part.shape)].view(part.shape)
    joiner.finish()


class PieceJoiner:
    """Puts pieces together as they come."""

    def __init__(self) -> None:
        self.incomplete: dict[str, tuple[Tensor, int]] = {}  # flat weight, elements missing

    def add(self, piece: Piece) -> list[tuple[str, Tensor]]:
        """The piece's weight by its name, if it is complete now."""
        size, numel = piece.data.numel(), math.prod(piece.shape)
        if size == numel and not piece.borrowed:
            return [(piece.name, piece.data.view(piece.shape))]
        whole, missing = self.incomplete.pop(piece.name, None) or (piece.data.new_empty(numel), numel)
        whole[piece.offset : piece.offset + size] = piece.data
        if missing == size:
            return [(piece.name, whole.view(piece.shape))]
        self.incomplete[piece.name] = whole, missing - size
        return []

    def finish(self) -> None:
        assert not self.incomplete, f"the stream ended inside {', '.join(self.incomplete)}"


def checksum(tensor: Tensor) -> str:
    """A short hash of a tensor's bytes, shape and dtype, the same on every device."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content.data).hexdigest()[:16]


def _merged(weight: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """W + scale * B A. Rows of W and B are sharded alike, so each rank needs only all of A, the smaller factor."""
    if not isinstance(weight, DTensor):
        return weight + (scale * (up.float() @ down.float())).to(weight.dtype)
    assert isinstance(up, DTensor)
    assert isinstance(down, DTensor)
    local = _merged(weight.to_local(), up.to_local(), down.full_tensor(), scale)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A run of elements that every rank has put at the same place of its share of the bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int  # of the run in each rank's shard, in elements
    count: int
    position: int  # in the rank's share of the bucket, in bytes

    def piece(self, rank: int, num_ranks: int, share: Tensor) -> Piece | None:
        """What of the weight is in a rank's share: shards are equal but for the last ones, which may be empty."""
        numel = math.prod(self.shape)
        offset = rank * shard_numel(self.shape, num_ranks) + self.start
        size = min(self.count, numel - offset)
        if size <= 0:
            return None
        content = share[self.position : self.position + size * self.dtype.itemsize].view(self.dtype)
        return Piece(self.name, self.shape, offset, content, borrowed=True)


class _Bucket:
    """One flat buffer of bytes, (ranks, bytes per rank). Each rank writes its own row and an all-gather the others.

    Args:
        example: any of the weights; all are sharded over the same ranks.
        num_bytes: size of the buffer.
        device: where it is.
    """

    def __init__(self, example: DTensor, num_bytes: int, device: torch.device) -> None:
        mesh = example.device_mesh
        (axis,) = (i for i, placement in enumerate(example.placements) if isinstance(placement, Shard))
        self.group = mesh.get_group(axis)
        self.num_ranks = mesh.size(axis)
        self.rank = mesh.get_local_rank(axis)
        share = max(num_bytes // self.num_ranks // _ALIGNMENT, 1) * _ALIGNMENT
        self.buffer = torch.empty(self.num_ranks, share, dtype=torch.uint8, device=device)
        self.entries: list[_Entry | Piece] = []  # whole weights wait for their turn
        self.used = 0  # bytes of each row

    def add(self, source: Source) -> Iterator[Piece]:
        """Puts a weight in; what the bucket holds comes out each time that it is full."""
        assert isinstance(source.tensor, DTensor)
        assert all(placement.is_replicate() or placement.is_shard(0) for placement in source.tensor.placements)
        own, shape = source.tensor.to_local().detach().reshape(-1), source.tensor.shape
        start, end = 0, shard_numel(shape, self.num_ranks)
        while start < end:
            count = min((self.buffer.shape[1] - self.used) // source.dtype.itemsize, end - start)
            self._write(own[start : start + count], source.dtype)
            self.entries.append(_Entry(source.name, shape, source.dtype, start, count, self.used))
            self.used += -(-count * source.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            start += count
            if self.used == self.buffer.shape[1]:
                yield from self.flush()

    def _write(self, own: Tensor, dtype: torch.dtype) -> None:
        target = self.buffer[self.rank, self.used : self.used + own.numel() * dtype.itemsize]
        target.view(dtype).copy_(own)

    def flush(self) -> Iterator[Piece]:
        used = self.buffer.view(-1)[: self.num_ranks * self.used].view(self.num_ranks, self.used)
        if self.used < self.buffer.shape[1]:  # rows must follow each other: the own one moves to where it belongs
            used[self.rank] = self.buffer[self.rank, : self.used].clone()
        if self.used:
            _all_gather(used.view(-1), used[self.rank], group=self.group)
        entries, self.entries, self.used = self.entries, [], 0
        for entry in entries:
            if isinstance(entry, Piece):
                yield entry
                continue
            for rank in range(self.num_ranks):
                if (piece := entry.piece(rank, self.num_ranks, used[rank])) is not None:
                    yield piece
