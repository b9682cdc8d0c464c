"""Rows that are taken several times, with a backward that adds their gradients in a fixed order.

The backward of `index_select` adds on CUDA by atomics, in any order, and rounds to the dtype of the values after every
addition. The backward of `embedding` sorts the index in every call. Here the index is sorted once, for all calls.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.ops.library import check_dense, check_device
from rlft_fast.ops.packing import autograd as autograd  # registers fakes and backward passes


class RowIndex(NamedTuple):
    """Which rows to take, and where each row goes, see `row_index`."""

    index_M: Tensor
    """(M,) int64, the row that each place takes."""
    order_M: Tensor
    """(M,) int64, the places by the row that they take, ascending for each row."""
    cu_uses: Tensor
    """(T + 1,) int32: row t is taken by the places order_M[cu_uses[t]:cu_uses[t + 1]]."""


def row_index(index_M: Tensor, num_rows: int) -> RowIndex:
    """Sorts an index once for any number of `take_rows` and their backward passes.

    Args:
        index_M: (M,) int64, the row that each place takes, on the CPU; M below 2^31.
        num_rows: T, the number of rows to take from.

    Returns:
        A RowIndex on the CPU. Move its three tensors to the device of the values.

    Raises:
        ValueError: the index is on another device, has another shape, or names a row outside of [0, num_rows).
        TypeError: the index is not int64.
    """
    check_dense({"index_M": index_M})
    if index_M.dtype != torch.int64:
        raise TypeError(f"index_M is {index_M.dtype}, expected torch.int64: convert with .long().")
    if index_M.dim() != 1 or index_M.device.type != "cpu":
        raise ValueError(
            f"index_M has shape {tuple(index_M.shape)} on {index_M.device}, expected (M,) on the CPU: "
            "make the index on the host, where it is sorted."
        )
    if len(index_M) > torch.iinfo(torch.int32).max or num_rows < 0:
        raise ValueError(
            f"got {len(index_M)} places and {num_rows} rows, expected at most 2^31 - 1 places of at least 0 rows."
        )
    if len(index_M) > 0 and not 0 <= index_M.min() <= index_M.max() < num_rows:
        raise ValueError(
            f"index_M names rows {int(index_M.min())} to {int(index_M.max())}, expected 0 to {num_rows - 1}: "
            "pass the number of rows that the index was made for."
        )
    cu_uses = pad(index_M.bincount(minlength=num_rows).cumsum(0), (1, 0)).int()
    return RowIndex(index_M.contiguous(), index_M.argsort(stable=True), cu_uses)


def take_rows(values_T: Tensor, rows: RowIndex) -> Tensor:
    """out[m] = values[index[m]]. Differentiable twice.

    Same inputs, same gradient bits: the gradient of a row is the sum over its places, in ascending order, added in
    float32 (float64 for float64) and rounded once. On the CPU the contents of `rows` are checked. On CUDA they are not,
    because a check would stall the stream; a place that names no row gets zeros there.

    Args:
        values_T: (T, *), any float dtype.
        rows: from `row_index`, on the device of the values.

    Returns:
        (M, *), dtype and device of the values.

    Raises:
        ValueError: shapes, devices or contents do not fit together.
        TypeError: the values are no floats, or a dtype of `rows` is wrong.
    """
    check_dense({"values_T": values_T} | rows._asdict())
    check_device(values_T.device)
    if not values_T.is_floating_point():
        raise TypeError(f"values_T is {values_T.dtype}, expected a float: take integers by values_T[index_M].")
    for name, tensor, dtype in zip(RowIndex._fields, rows, (torch.int64, torch.int64, torch.int32), strict=True):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}: take the rows from row_index().")
        if tensor.device != values_T.device:
            raise ValueError(
                f"{name} is on {tensor.device}, values_T on {values_T.device}: move the row index to the values."
            )
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected one contiguous "
                "dimension: take the rows from row_index()."
            )
    if values_T.dim() == 0 or values_T.shape[0] != len(rows.cu_uses) - 1:
        raise ValueError(
            f"values_T has shape {tuple(values_T.shape)}, expected ({len(rows.cu_uses) - 1}, ...): "
            "pass the rows that the row index was made for."
        )
    return torch.ops.rlft_fast.take_rows(values_T, *rows)
