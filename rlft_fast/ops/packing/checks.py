"""Checks of the packing ops' arguments, and their error messages."""

import math
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from rlft_fast.ops.library import check_dense, check_device

PaddingSide = Literal["right", "left"]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FILLABLE = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def by_name(data: Tensor | dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors by the names that error messages call them."""
    tensors = data if isinstance(data, dict) else {name: data}
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{key} is a {type(tensor).__name__}, expected a tensor: pass one or a dict of tensors.")
    return tensors


def as_given(data: Tensor | dict[str, Tensor], tensors: list[Tensor]) -> Any:
    """The tensors as `data` came: under its names, or alone."""
    return dict(zip(data, tensors, strict=True)) if isinstance(data, dict) else tensors[0]


def check_cu_seqlens(cu_seqlens: Tensor, tensors: dict[str, Tensor]) -> None:
    """Checks everything about cu_seqlens but its contents; the CPU kernels check those."""
    check_dense({"cu_seqlens": cu_seqlens} | tensors)
    check_device(cu_seqlens.device)
    check_int32("cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens is empty, expected (B + 1,): pass cumulative lengths that start with 0.")
    for name, tensor in tensors.items():
        if tensor.device != cu_seqlens.device:
            raise ValueError(
                f"cu_seqlens is on {cu_seqlens.device}, {name} on {tensor.device}: move both to one device."
            )
        if tensor.dim() == 0:
            raise ValueError(f"{name} is a scalar, expected at least one dimension.")


def check_columns(column_T: Tensor, cu_seqlens: Tensor, left: bool) -> None:
    check_dense({"column_T": column_T})
    check_int32("column_T", column_T)
    if column_T.device != cu_seqlens.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device}, column_T on {column_T.device}: move both to one device."
        )
    if left:
        raise ValueError("got padding_side='left' and column_T, which says where the tokens stand: leave one out.")


def check_int32(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}, expected torch.int32: convert with .int().")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected one contiguous dimension."
        )


def check_padded(tensors: dict[str, Tensor], num_sequences: int) -> None:
    for name, tensor in tensors.items():
        first, other = next(iter(tensors.items()))
        if tensor.dim() < 2 or tensor.shape[0] != num_sequences:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected (B, L, ...) with B = {num_sequences} "
                "= len(cu_seqlens) - 1: pass one row per sequence."
            )
        if tensor.shape[1] != other.shape[1]:
            raise ValueError(
                f"{name} has padded length {tensor.shape[1]}, but {first} has {other.shape[1]}: "
                "unpad tensors of different lengths in different calls."
            )


def check_packed(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        first, other = next(iter(tensors.items()))
        if tensor.shape[0] != other.shape[0]:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, but {first} has {other.shape[0]}: both need T rows.")


def fill_values(value: float | dict[str, float], tensors: dict[str, Tensor]) -> list[float]:
    """What the padding of each tensor holds."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _FILLABLE:
            raise TypeError(f"{name} is {tensor.dtype}, expected a float, integer or bool: pad a view of such a dtype.")
    if not isinstance(value, dict):
        return [_fill_value(name, tensor.dtype, value) for name, tensor in tensors.items()]
    if unknown := value.keys() - tensors.keys():
        raise ValueError(f"value names {sorted(unknown)}, expected names of the packed tensors: {sorted(tensors)}.")
    return [_fill_value(name, tensor.dtype, value.get(name, 0)) for name, tensor in tensors.items()]


def _fill_value(name: str, dtype: torch.dtype, value: float) -> float:
    """The value as the double that the kernels convert to `dtype`, where `dtype` holds the value."""
    if not isinstance(value, Real):
        raise TypeError(f"the value of {name} is a {type(value).__name__}, expected a number.")
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        if value not in (math.inf, -math.inf) and (value > largest or value < -largest):
            raise ValueError(f"{name} is {dtype}, which cannot hold the value {value}: pass at most {largest:g}.")
    elif dtype == torch.bool:
        if value != value:
            raise ValueError(f"{name} is torch.bool, which cannot hold the value {value}: pass 0 or 1.")
    else:
        limits = torch.iinfo(dtype)
        if not (limits.min <= value <= limits.max and value == int(value)):
            raise ValueError(
                f"{name} is {dtype}, which cannot hold the value {value}: pass a whole number from {limits.min} to "
                f"{limits.max}; of a dict of tensors each may have its own."
            )
        if int(value) != int(float(value)):
            raise ValueError(f"{name} cannot be filled with {value}, which a double cannot hold: pass a smaller one.")
    return float(value)


def check_count(name: str, value: int) -> None:
    if not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name} is {value!r}, expected an int.")


def token_count(cu_seqlens: Tensor, num_tokens: int | None) -> int:
    if num_tokens is not None:
        check_count("the number of tokens", num_tokens)
    if num_tokens is not None and num_tokens < 0:
        raise ValueError(f"the number of tokens is {num_tokens}, expected at least cu_seqlens[B].")
    return int(cu_seqlens[-1]) if num_tokens is None else num_tokens


def pads_left(padding_side: PaddingSide) -> bool:
    if padding_side not in ("right", "left"):
        raise ValueError(f"padding_side is {padding_side!r}, expected 'right' or 'left'.")
    return padding_side == "left"
