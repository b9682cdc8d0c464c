"""GEMMs over the first `count` rows, a number that only the device knows: no vendor's GEMM takes it from there.

Blocks of rows behind it return at once, and sums over rows end there. Deterministic: a block of results belongs to one
program. The fused forward pass of `triton` shares their tiles.
"""

# pyrefly: ignore-errors
# (launch options and the code inside kernels are no Python that a type checker knows)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"num_warps": 8, "enable_fp_fusion": True}  # as nvcc fuses a * b + c; Triton 3.10 stops doing so by default


def on_its_device(function):
    """Launches on the device of the first argument; Triton alone takes the current one."""

    @functools.wraps(function)
    def launch(first: Tensor, *arguments, **options) -> None:
        with torch.cuda.device_of(first):
            function(first, *arguments, **options)

    return launch


# ---- tiles ----------------------------------------------------------------------------------------------------------

SCHEDULE = {"GROUP": 16, "num_stages": 3, **LAUNCH}
# By the bytes of an operand's element: tiles that do not spill (test_triton_binaries.py compiles them all).
# With the large one, for Hopper's tensor cores, which read their operands from shared memory, a GEMM reads its operands
# from L2 half as often. Float32 is multiplied outside of the tensor cores, which takes many more registers.
_LARGE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
_TILES = {2: {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}, 4: {"ROWS": 128, "COLUMNS": 64, "DEPTH": 32}}


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def gemm_tile(operand: Tensor, shapes: dict[int, dict[str, int]], large: bool = True) -> dict[str, int]:
    """A GEMM's tile, ``large`` where that is possible."""
    large = large and operand.element_size() == 2 and is_hopper(operand.device)
    return _LARGE if large else shapes[operand.element_size()]


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Row and column block of a program: neighbours walk down GROUP row blocks, so that both operands stay in L2."""
    per_group = GROUP * column_blocks
    first_row = program // per_group * GROUP
    group = min(row_blocks - first_row, GROUP)
    return first_row + program % per_group % group, program % per_group // group


@triton.jit
def load_depth(block, offset, d, left, EVEN: tl.constexpr):
    """A block of a GEMM operand, 0 behind the ``left`` remaining elements of the summed dimension."""
    if EVEN:
        return tl.load(block + offset)
    return tl.load(block + offset, mask=d < left, other=0.0)


@triton.jit
def _multiply_rows_kernel(
    a_ptr, b_ptr, out_ptr, count_ptr, columns, depth, a_stride, b_stride_k, b_stride_n, out_stride,
    row_blocks, column_blocks, ACCUMULATE: tl.constexpr, EVEN: tl.constexpr, WHOLE_VECTORS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_of(tl.program_id(0), row_blocks, column_blocks, GROUP)
    count = tl.load(count_ptr)
    if row_block * ROWS >= count:
        return
    # Blocks begin at 64-bit addresses, and within a block 32 bits are enough: registers decide how large it may be.
    i, j, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    first_row, first_column = (row_block * ROWS).to(tl.int64), (column_block * COLUMNS).to(tl.int64)
    i_inside, j_inside = i < count - row_block * ROWS, j < columns - column_block * COLUMNS
    # What lies outside reads row 0 instead, and is not stored: masks would take registers.
    a_offset = tl.where(i_inside, i, 0)[:, None] * a_stride + d[None, :]
    column = tl.where(j_inside, j, 0)
    if WHOLE_VECTORS:  # eight neighbours are all inside or all outside, so they may be read at once
        column = tl.max_contiguous(tl.multiple_of(column, 8), 8)
    b_offset = d[:, None] * b_stride_k + column[None, :] * b_stride_n
    a_block = a_ptr + first_row * a_stride
    b_block = b_ptr + first_column * b_stride_n
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_depth(a_block, a_offset, d[None, :], depth - k, EVEN)
        b = load_depth(b_block, b_offset, d[:, None], depth - k, EVEN)
        z = tl.dot(a, b, z, input_precision="ieee")
        a_block += DEPTH
        b_block += DEPTH * b_stride_k
    out = out_ptr + first_row * out_stride + first_column + i[:, None] * out_stride + j[None, :]
    inside = i_inside[:, None] & j_inside[None, :]
    if ACCUMULATE and COLUMNS == 256:
        # No other program adds here, so the sum is the same every time; to load it would take as many registers as z.
        tl.atomic_add(out, z, mask=inside, sem="relaxed")
    else:
        if ACCUMULATE:
            z += tl.load(out, mask=inside, other=0.0)
        tl.store(out, z.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_columns_kernel(
    a_ptr, b_ptr, out_ptr, count_ptr, rows, columns, a_stride, b_stride, out_stride, row_blocks, column_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_of(tl.program_id(0), row_blocks, column_blocks, GROUP)
    count = tl.load(count_ptr)
    i, j, t = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    first_row, first_column = (row_block * ROWS).to(tl.int64), (column_block * COLUMNS).to(tl.int64)
    i_inside, j_inside = i < rows - row_block * ROWS, j < columns - column_block * COLUMNS
    a_block, b_block = a_ptr + first_row, b_ptr + first_column
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, count, DEPTH):
        t_inside = t < count - k
        a = tl.load(a_block + t[None, :] * a_stride + i[:, None], mask=t_inside[None, :] & i_inside[:, None], other=0.0)
        b = tl.load(b_block + t[:, None] * b_stride + j[None, :], mask=t_inside[:, None] & j_inside[None, :], other=0.0)
        z = tl.dot(a, b, z, input_precision="ieee")
        a_block += DEPTH * a_stride
        b_block += DEPTH * b_stride
    out = out_ptr + first_row * out_stride + first_column + i[:, None] * out_stride + j[None, :]
    tl.store(out, z.to(out_ptr.dtype.element_ty), mask=i_inside[:, None] & j_inside[None, :])


# ---- the GEMMs ------------------------------------------------------------------------------------------------------


@on_its_device
def multiply_rows(a: Tensor, b: Tensor, out: Tensor, count: Tensor, accumulate: bool = False) -> None:
    """``out[:count] (+)= a[:count] @ b``, summed in float32; the rows of ``out`` behind are left as they are.

    Args:
        a: (R, K) with contiguous rows.
        b: (K, N), any strides.
        out: (R, N) with contiguous rows.
        count: () int32 on the device.
        accumulate: add to ``out``.
    """
    (num_rows, depth), columns = a.shape, b.shape[1]
    shape = gemm_tile(a, _TILES)
    row_blocks, column_blocks = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(columns, shape["COLUMNS"])
    _multiply_rows_kernel[(row_blocks * column_blocks,)](
        a, b, out, count, columns, depth, a.stride(0), b.stride(0), b.stride(1), out.stride(0), row_blocks,
        column_blocks, ACCUMULATE=accumulate, EVEN=depth % shape["DEPTH"] == 0,
        WHOLE_VECTORS=columns % 8 == 0, **shape, **SCHEDULE,
    )  # fmt: skip


@on_its_device
def multiply_columns(a: Tensor, b: Tensor, out: Tensor, count: Tensor) -> None:
    """``out = a[:count].T @ b[:count]``, summed in float32 and rounded once.

    Args:
        a: (R, M) with contiguous rows.
        b: (R, N) with contiguous rows.
        out: (M, N) with contiguous rows.
        count: () int32 on the device.
    """
    rows, columns = a.shape[1], b.shape[1]
    shape = gemm_tile(a, _TILES)
    row_blocks, column_blocks = triton.cdiv(rows, shape["ROWS"]), triton.cdiv(columns, shape["COLUMNS"])
    _multiply_columns_kernel[(row_blocks * column_blocks,)](
        a, b, out, count, rows, columns, a.stride(0), b.stride(0), out.stride(0), row_blocks, column_blocks,
        **shape, **SCHEDULE,
    )  # fmt: skip
