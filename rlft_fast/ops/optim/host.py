"""Moments that wait in CPU memory. A step copies them to the parameters' device and back, a bucket at a time.

Only the place of the moments changes: the same kernel steps with the same numbers. A step moves 16 bytes for each
float32 parameter over the bus, and needs the memory of a bucket on the device, or that of the largest parameter's
moments.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlft_fast.ops.optim.checks import MOMENTS, local_part

BUCKET_BYTES = 256 * 2**20


class _HasMoments(Protocol):
    @property
    def exp_avg(self) -> Tensor: ...
    @property
    def exp_avg_sq(self) -> Tensor: ...


T = TypeVar("T", bound=_HasMoments)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in CPU memory, which is pinned if the tensor is on a GPU: copies are then several times faster."""
    host, local = tensor.to("cpu"), local_part(tensor)
    if not local.is_cuda:
        return host
    pinned = torch.empty_like(local, device="cpu", pin_memory=True).copy_(local)
    if isinstance(host, DTensor):
        host._local_tensor = pinned  # a DTensor itself cannot be pinned (torch 2.13)
        return host
    return pinned


def buckets(parts: Sequence[T]) -> Iterator[list[T]]:
    """Consecutive parameters whose moments have at most `BUCKET_BYTES` together; a larger parameter is alone."""
    bucket: list[T] = []
    size = 0
    for part in parts:
        own = part.exp_avg.nbytes + part.exp_avg_sq.nbytes
        if bucket and size + own > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += own
    yield bucket


def copies_of(part: T, device: torch.device) -> dict[str, Tensor]:
    """Copies of the moments on the device. Nothing waits for them but the device itself."""
    return {key: getattr(part, key).to(device, non_blocking=True, copy=True) for key in MOMENTS}


def write_back(part: T, moved: T) -> None:
    """Writes the moments back, and waits until they are there, because the host may read them at any time."""
    for key in MOMENTS:
        getattr(part, key).copy_(getattr(moved, key))
