"""A stream of whole weights out of shards, for the rollout and for export, with one collective per bucket.

    shards -> cast into one flat buffer -> one all-gather -> pieces -> joined to whole weights, or sent as they are

Names and shapes are those of the model's original checkpoint, which every reader knows. Where the model holds the
experts of a layer in one tensor, the checkpoint holds a few tensors per expert, and pieces are cut between experts.

A bucket ends when it is full, even inside a weight. So a stream of pieces needs the memory of one bucket, however large
a weight is (gloo needs a second bucket). A stream of whole weights also needs memory for the weight being joined.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlft_fast.engine.optimizer import Optimizer
from rlft_fast.engine.sharding import shard_numel
from rlft_fast.models import CheckpointPart, RLModel, checkpoint_tensors, head_parameters, low_rank_factors

BUCKET_BYTES = 256 * 2**20  # a tenth of a second on a GPU's links, and little beside a model that needs sharding
_ALIGNMENT = 16  # bytes; pieces are read back as tensors of their dtype
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Source(NamedTuple):
    """A weight to stream, sharded or not, and the dtype in which it is sent."""

    name: str
    tensor: Tensor
    dtype: torch.dtype


class Piece(NamedTuple):
    """Consecutive elements of a weight."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Position of the first element in the flattened weight."""
    data: Tensor
    """(N,) elements in the source's dtype."""
    borrowed: bool
    """Whether ``data`` lies in the bucket: then it is valid only until the next piece is asked for."""


class WeightMetadata(NamedTuple):
    """A tensor of the model's checkpoint, without its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream:
    """A model's weights as they are now, by the names of its checkpoint. A generator takes them over.

    The stream can be read once, as pieces or as whole tensors, and all ranks must read it to its end.

    Args:
        sources: returns the model's weights, sharded or not, see `weight_sources`.
        parts: for each of the model's weights, the checkpoint's parts in order.
        bucket_bytes: memory of the bucket, through which sharded weights are gathered.
        device: device of the bucket.

    Attributes:
        num_bytes: of the elements that were read so far.
    """

    def __init__(
        self,
        sources: Callable[[], Iterator[Source]],
        parts: Mapping[str, list[CheckpointPart]],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._sources = sources
        self._parts = parts
        self.num_bytes = 0
        self._stream = self._counted(stream_pieces(sources(), bucket_bytes, device))

    def metadata(self) -> list[WeightMetadata]:
        """What the stream will bring, in order. All ranks must call it: adapters of sharded weights are gathered."""
        found: list[WeightMetadata] = []
        missing: dict[str, int] = {}  # elements of tensors that other weights have a part of, too
        for source in self._sources():
            for part in self._parts[source.name]:
                missing[part.name] = missing.get(part.name, math.prod(part.shape)) - part.numel
                if missing[part.name] == 0:
                    found.append(WeightMetadata(part.name, source.dtype, part.shape))
        return found

    def pieces(self) -> Iterator[Piece]:
        """The weights in pieces no larger than a bucket where they are sharded: it needs no memory but a bucket's.

        A weight that the checkpoint has transposed is one piece, and so is one that it makes of several.
        """
        return split_pieces(self._stream, self._parts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights one after the other, each with its name, as `metadata` has them. No two share elements."""
        whole = (_whole_piece(name, weight) for name, weight in join_pieces(self._stream))  # in the order of sources
        return join_pieces(split_pieces(whole, self._parts))

    def finish(self) -> None:
        """Reads the rest of the stream, also after an error, because all ranks gather together."""
        for _ in self._stream:
            pass

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.num_bytes += piece.data.nbytes
            yield piece


@torch.no_grad()
def weight_sources(model: RLModel, optimizer: Optimizer | None, dtype: torch.dtype | None = None) -> Iterator[Source]:
    """A model's weights by the model's own names, still sharded. Tied weights come once; adapters are merged.

    Args:
        model: its weights must not be gathered.
        optimizer: where a weight has a float32 master in the optimizer, the master is taken.
        dtype: dtype in which parameters are sent; None: their own dtype. Buffers always keep their dtype.
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


@torch.no_grad()
def stream_pieces(sources: Iterable[Source], bucket_bytes: int, device: torch.device) -> Iterator[Piece]:
    """Yields every element of every weight once, in the order of the sources. All ranks must iterate to the end.

    A weight that this process holds whole is one piece. It is not copied if its dtype is the dtype to send.

    Args:
        sources: the same names, shapes and placements on all ranks. Shards are split along the first dimension.
        bucket_bytes: memory of the bucket.
        device: device of the bucket.
    """
    bucket: _Bucket | None = None
    for source in sources:
        if not isinstance(source.tensor, DTensor):
            data = source.tensor.detach().to(source.dtype).contiguous().view(-1)
            piece = Piece(source.name, source.tensor.shape, 0, data, borrowed=False)
            if bucket is None:
                yield piece
            else:
                bucket.entries.append(piece)  # keeps the order: the bucket's earlier weights come out first
            continue
        bucket = bucket or _Bucket(source.tensor, bucket_bytes, device)
        yield from bucket.add(source)
    if bucket is not None:
        yield from bucket.flush()


def split_pieces(pieces: Iterable[Piece], parts: Mapping[str, list[CheckpointPart]]) -> Iterator[Piece]:
    """Cuts pieces of the model's weights into pieces of the checkpoint's tensors.

    Args:
        pieces: pieces of the model's weights.
        parts: for each of the model's weights, the checkpoint's parts in order. They cover the whole weight.
    """
    transposed, shared = PieceJoiner(), PieceJoiner()
    for piece in pieces:
        own = parts[piece.name]
        if own[0].is_transposed:
            for _, whole in transposed.add(piece):
                yield _whole_piece(own[0].name, whole.mT.contiguous())
            continue
        begin, end = piece.offset, piece.offset + piece.data.numel()
        for part in own[bisect_right(own, begin, key=lambda part: part.start) - 1 :]:
            first, last = max(part.start, begin), min(part.start + part.numel, end)
            if first >= end > begin:  # a weight may be empty
                break
            data = piece.data[first - begin : last - begin]
            found = Piece(part.name, part.shape, part.offset + first - part.start, data, piece.borrowed)
            if part.size is None:
                yield found
            else:
                yield from (_whole_piece(name, whole) for name, whole in shared.add(found))
    transposed.finish()
    shared.finish()


def _whole_piece(name: str, whole: Tensor) -> Piece:
    return Piece(name, whole.shape, 0, whole.view(-1), borrowed=False)


def join_pieces(pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Joins pieces to whole tensors, and yields each with its name."""
    joiner = PieceJoiner()
    for piece in pieces:
        yield from joiner.add(piece)
    joiner.finish()


class PieceJoiner:
    """Joins pieces to whole weights as the pieces come."""

    def __init__(self) -> None:
        self.incomplete: dict[str, tuple[Tensor, int]] = {}  # flat weight, number of missing elements

    def add(self, piece: Piece) -> list[tuple[str, Tensor]]:
        """Name and whole weight of the piece, if the piece completes the weight; otherwise nothing."""
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
    """W + scale * B A. The rows of W and B are sharded alike, so each rank gathers only A, the smaller factor.

    Of experts, W, B and A are sharded alike, by expert.
    """
    if not isinstance(weight, DTensor):
        return weight + (scale * (up.float() @ down.float())).to(weight.dtype)
    assert isinstance(up, DTensor)
    assert isinstance(down, DTensor)
    own_down = down.to_local() if down.dim() == 3 else down.full_tensor()
    local = _merged(weight.to_local(), up.to_local(), own_down, scale)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """Consecutive elements of a weight, which every rank has written to the same place of its share of the bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int  # first element in each rank's shard
    count: int
    position: int  # first byte in each rank's share of the bucket

    def piece(self, rank: int, num_ranks: int, share: Tensor) -> Piece | None:
        """The piece in a rank's share. Shards have equal sizes but for the last ones, which may be empty: then None."""
        numel = math.prod(self.shape)
        offset = rank * shard_numel(self.shape, num_ranks) + self.start
        size = min(self.count, numel - offset)
        if size <= 0:
            return None
        content = share[self.position : self.position + size * self.dtype.itemsize].view(self.dtype)
        return Piece(self.name, self.shape, offset, content, borrowed=True)


class _Bucket:
    """One flat buffer of bytes, (ranks, bytes per rank). Each rank writes its own row; an all-gather fills the others.

    Args:
        example: any of the weights; all weights are sharded over the same ranks.
        num_bytes: size of the buffer.
        device: device of the buffer.
    """

    def __init__(self, example: DTensor, num_bytes: int, device: torch.device) -> None:
        mesh = example.device_mesh
        (axis,) = (i for i, placement in enumerate(example.placements) if isinstance(placement, Shard))
        self.group = mesh.get_group(axis)
        self.num_ranks = mesh.size(axis)
        self.rank = mesh.get_local_rank(axis)
        share = max(num_bytes // self.num_ranks // _ALIGNMENT, 1) * _ALIGNMENT
        self.buffer = torch.empty(self.num_ranks, share, dtype=torch.uint8, device=device)
        self.entries: list[_Entry | Piece] = []  # a Piece is a whole weight that waits for its turn
        self.used = 0  # bytes of each row

    def add(self, source: Source) -> Iterator[Piece]:
        """Writes a weight into the bucket. Each time the bucket is full, yields its pieces and starts anew."""
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
        """Gathers the bucket from all ranks and yields its pieces."""
        used = self.buffer.view(-1)[: self.num_ranks * self.used].view(self.num_ranks, self.used)
        if self.used < self.buffer.shape[1]:  # the used parts of the rows must be contiguous: this rank's part moves
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
