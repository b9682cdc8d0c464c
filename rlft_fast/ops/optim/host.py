"""Moments that wait in CPU memory, or in 8 bits. A step copies or decodes them, and puts them back, bucket by bucket.

The same kernel steps. With moments in CPU memory the numbers are the same, too, and a step moves 16 bytes for each
float32 parameter over the bus. A step needs the memory of a bucket on the device, or that of the largest parameter's
moments.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlft_fast.ops.optim.checks import local_part
from rlft_fast.ops.optim.eight_bits import MOMENTS, SCALES, decoded, encode, seed_of
from rlft_fast.ops.optim.parts import Parts

BUCKET_BYTES = 256 * 2**20
_ITEMSIZES = {torch.int8: 4, torch.uint8: 4}  # of decoded moments


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


def buckets(parts: Sequence[Parts]) -> Iterator[list[Parts]]:
    """Consecutive parameters whose moments have at most `BUCKET_BYTES` together; a larger parameter is alone."""
    bucket: list[Parts] = []
    size = 0
    for part in parts:
        own = sum(_ITEMSIZES.get(x.dtype, x.itemsize) * x.numel() for x in (part.exp_avg, part.exp_avg_sq))
        if bucket and size + own > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += own
    yield bucket


def copies_of(part: Parts, device: torch.device) -> dict[str, Tensor]:
    """Copies of the moments on the device, decoded. Nothing waits for them but the device itself."""
    if part.exp_avg_scale is None:
        return {key: getattr(part, key).to(device, non_blocking=True, copy=True) for key in MOMENTS}
    pairs = [
        [getattr(part, key).to(device, non_blocking=True) for key in pair] for pair in zip(MOMENTS, SCALES, strict=True)
    ]
    return {key: decoded(*pair) for key, pair in zip(MOMENTS, pairs, strict=True)}


def write_back(part: Parts, moved: Parts, number: int, found_inf: Tensor | None) -> None:
    """Writes the moments back, and waits until they are in the CPU's memory, which the host may read at any time.

    Args:
        part: its moments are written.
        moved: from `copies_of`, after the step.
        number: of the parameter among others, which are rounded otherwise.
        found_inf: 0-d; where it is not 0, codes of moments stay.
    """
    moments = [getattr(moved, key) for key in MOMENTS]
    if part.exp_avg_scale is None:
        for key, moment in zip(MOMENTS, moments, strict=True):
            getattr(part, key).copy_(moment)
        return
    kept = [getattr(part, key) for key in (*MOMENTS, *SCALES)]
    here = [tensor.to(moments[0].device, non_blocking=True) for tensor in kept]
    encode(moments, here[:2], here[2:], seed_of(part.step, number), found_inf, part.row_numbers)
    for old, new in zip(kept, here, strict=True):
        if new is not old:
            old.copy_(new)
