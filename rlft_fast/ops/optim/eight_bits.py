"""AdamW's moments in 8 bits, with a float32 scale for each row of a parameter.

    |x| = scale * 2^exponent * (1 + fraction),   the scale is the row's largest size

The code is a small floating-point number: 5 bits of exponent, with a sign and 2 bits of fraction for the first moment,
and 3 bits of fraction for the second. A row reaches over 31 octaves. Codes are not evenly spaced, as in Dettmers et al.
2022, arXiv:2110.02861, because an update divides one moment by the root of the other: with even steps the small moments
of a row become 0, and their updates explode. Rounding is stochastic (Gupta et al. 2015, arXiv:1502.02551): rounded to
nearest, beta2 = 0.999 would never lower a code. A second moment that is not 0 never becomes 0.

Matrices are coded, and other contiguous tensors of two dimensions or more whose rows are whole on each rank. Other
parameters, such as biases and norms, are few, and keep moments in float32.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_code", "exp_avg_sq_code")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_CHUNK = 2**22  # elements that are coded at a time: coding takes about 30 bytes for each


class Code(NamedTuple):
    """How a moment is coded."""

    dtype: torch.dtype
    fraction_bits: int

    @property
    def most(self) -> int:
        """The code of a row's largest size."""
        return torch.iinfo(self.dtype).max

    @property
    def dropped_bits(self) -> int:
        """Of the 23 bits of a float32's fraction."""
        return 23 - self.fraction_bits

    @property
    def offset(self) -> int:
        """The kept bits of the float32 1.0, less its code."""
        return (127 << self.fraction_bits) - self.most


CODE_OF = {"exp_avg": Code(torch.int8, 2), "exp_avg_sq": Code(torch.uint8, 3)}


def is_coded(parameter: Tensor) -> bool:
    """Whether moments of a float32, bfloat16 or float16 parameter have codes."""
    if not isinstance(parameter, DTensor):
        return _has_rows(parameter.shape) and parameter.is_contiguous()
    last = parameter.dim() - 1
    return is_coded(parameter.to_local()) and not any(placement.is_shard(last) for placement in parameter.placements)


def coded_bytes(shape: Sequence[int]) -> int:
    """Bytes of the two moments of a parameter of this shape, or of its shard."""
    numel = math.prod(shape)
    return 2 * (numel + 4 * (numel // shape[-1])) if _has_rows(shape) else 8 * numel


def _has_rows(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] > 0


def scale_like(parameter: Tensor) -> Tensor:
    """Zeros in float32 with one element for each row of the parameter, sharded as the parameter is."""
    if isinstance(parameter, DTensor):
        shape = torch.Size((*parameter.shape[:-1], 1))
        stride = torch.empty(shape, device="meta").stride()
        local = scale_like(parameter.to_local())
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
    return torch.zeros((*parameter.shape[:-1], 1), dtype=torch.float32, device=parameter.device)


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """The moment in float32. Both tensors are this rank's own parts."""
    code = next(code for code in CODE_OF.values() if code.dtype == codes.dtype)
    signed = codes.int()
    sizes = signed.abs().add_(code.offset).bitwise_left_shift_(code.dropped_bits).view(torch.float32)
    return sizes.mul_(signed.sign_()).mul_(scale)


def encode(
    moments: Sequence[Tensor], codes: Sequence[Tensor], scales: Sequence[Tensor], seed: Tensor | None,
    kept: Tensor | None, row_numbers: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes codes and scales of the two moments of a parameter in place. All tensors are this rank's own parts.

    Args:
        moments: float32.
        codes: of the moments' shape.
        scales: one for each row.
        seed: 0-d int32, which decides the rounding; None: round to nearest.
        kept: 0-d; where it is not 0, codes and scales stay; None: they are written.
        row_numbers: from `row_numbers_of`; None: this rank has all rows, in their order.
    """
    num_columns = moments[0].shape[-1]
    rows = [[tensor.view(-1, tensor.shape[-1]) for tensor in tensors] for tensors in (moments, codes, scales)]
    at_once = max(_CHUNK // num_columns, 1)
    for begin in range(0, len(rows[0][0]), at_once):
        here = slice(begin, begin + at_once)
        random = None if seed is None else _random(rows[0][0][here], begin, row_numbers, seed)
        for number, (code, moment, *old) in enumerate(zip(CODE_OF.values(), *rows, strict=True)):
            bits = None if random is None else (random >> 16 * number) & 0xFFFF
            for kept_part, new in zip(old, _encoded(code, moment[here], bits), strict=True):
                part = kept_part[here]
                part.copy_(new if kept is None else torch.where(kept.bool(), part, new))


def seed_of(step: Tensor, number: int) -> Tensor:
    """0-d int32 by which the rounding of one tensor and step differs from that of others."""
    return _hashed(_hashed(step.int()) + number)


def _encoded(code: Code, rows: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    sizes = rows.abs()
    scale = sizes.amax(-1, keepdim=True)
    shares = sizes.div_(scale).nan_to_num_(0.0)  # a row of zeros has no scale
    is_some = shares > 0
    bits = shares.view(torch.int32)
    bits += 1 << code.dropped_bits - 1 if random is None else random << code.dropped_bits - 16
    found = bits.bitwise_right_shift_(code.dropped_bits).sub_(code.offset).clamp_(min=0)
    if code.dtype == torch.int8:
        return found.mul_(rows.sign().int()).to(code.dtype), scale
    return found.maximum(is_some.int()).to(code.dtype), scale


def row_numbers_of(parameter: Tensor) -> Tensor | None:
    """(R,) int32, for each row of this rank's part its number in the whole parameter; None if the rank has all rows.

    Rounding depends on the row, and not on the rank that has it: a run learns the same on any number of processes.
    """
    if not isinstance(parameter, DTensor) or parameter.to_local().shape == parameter.shape:
        return None
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )  # fmt: skip
    numbers = torch.zeros(1, dtype=torch.int32)
    for size, own, first in zip(parameter.shape[:-1], shape, offset, strict=False):
        numbers = (numbers[:, None] * size + torch.arange(first, first + own, dtype=torch.int32)).view(-1)
    return numbers


def _random(rows: Tensor, begin: int, row_numbers: Tensor | None, seed: Tensor) -> Tensor:
    """int32 with random bits, one for each element of rows that begin at a row of this rank's part."""
    num_rows, num_columns = rows.shape
    if row_numbers is None:
        numbers = torch.arange(begin, begin + num_rows, dtype=torch.int32, device=rows.device)
    else:
        numbers = row_numbers[begin : begin + num_rows].to(rows.device)
    index = numbers[:, None] * num_columns + torch.arange(num_columns, dtype=torch.int32, device=rows.device)
    return _hashed(index.mul_(0x9E3779B9 - 2**32).add_(seed))


def _hashed(x: Tensor) -> Tensor:
    """The hash of csrc/adamw.h: lowbias32 of C. Wellons, on int32, whose products wrap around."""
    x = ((x >> 16) & 0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = ((x >> 15) & 0x1FFFF).bitwise_xor_(x).mul_(0x846CA68B - 2**32)
    return ((x >> 16) & 0xFFFF).bitwise_xor_(x)
