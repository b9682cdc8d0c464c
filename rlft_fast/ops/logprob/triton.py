"""What happens between the GEMMs of `linear_logprob`, in Triton, and a forward pass that never stores a logit.

The equations are those of ``csrc/cpu/logprob_rows.cpp``. The first three functions have the signatures of the compiled
operators of the same names. On the CPU they run in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.

    logprob_stats_    reads a logits tile once
    logprob_grad_     reads it once, writes dlogits once, in the dtype of the GEMM that follows
    logprob_frozen_   reads it twice, the second time from cache, and writes once
    fused_stats       a GEMM whose epilogue is logprob_stats_: nothing of size rows x vocabulary leaves the registers
    fused_grad        the same GEMM with logprob_grad_ as its epilogue: of a tile, dlogits alone are written

The last two give log-probabilities of plain logits: with a bias, a soft-cap, an entropy or another sum, the large tile
would not fit the registers.

Deterministic: a row belongs to one program, or to one per vocabulary split, and splits are merged in their order.
"""

# pyrefly: ignore-errors
# (launch options and the code inside kernels are no Python that a type checker knows)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlft_fast.ops.logprob.statistics import Sums

LAUNCH = {"num_warps": 8, "enable_fp_fusion": True}  # as nvcc fuses a * b + c; Triton 3.10 stops doing so by default
BLOCK = 2048  # columns per step: paths agree bit for bit if their tiles are multiples of it
# A GEMM's tiles by the bytes of an operand's element. They do not spill (tests/ops/logprob/test_triton.py).
# With the large one, for Hopper's tensor cores, which read their operands from shared memory, a GEMM reads its operands
# from L2 half as often. Float32 is multiplied outside of the tensor cores, which takes many more registers.
_LARGE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
_TILES = {2: {"ROWS": 64, "COLUMNS": 128, "DEPTH": 64}, 4: {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32}}
SCHEDULE = {"GROUP": 16, "num_stages": 3, **LAUNCH}


def on_its_device(function):
    """Launches on the device of the first argument; Triton alone takes the current one."""

    @functools.wraps(function)
    def launch(first: Tensor, *arguments, **options) -> None:
        with torch.cuda.device_of(first):
            function(first, *arguments, **options)

    return launch


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def gemm_tile(operand: Tensor) -> dict[str, int]:
    is_large = operand.element_size() == 2 and is_hopper(operand.device)
    return _LARGE if is_large else _TILES[operand.element_size()]


# ---- pieces ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(u):
    """Error of about 1 ulp. Near 0 it is Cephes' polynomial, because exp would lose the digits of small arguments."""
    e = tl.exp(-2.0 * tl.abs(u))
    large = tl.where(u < 0, -1.0, 1.0) * (1.0 - 2.0 * e / (1.0 + e))
    s = u * u
    p = ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1
    small = u + u * s * (p * s - 3.33332819422e-1)
    return tl.where(s < 0.390625, small, large)


@triton.jit
def _softmax_logits(z, bias, inv_temperature, softcap, scale, SOFTCAP: tl.constexpr):
    """The logits that the softmax sees."""
    if SOFTCAP:
        return softcap * inv_temperature * _tanh((z + bias) * (scale / softcap))
    return (z + bias) * (scale * inv_temperature)


@triton.jit
def _slope(z, bias, inv_temperature, softcap, scale, SOFTCAP: tl.constexpr):
    """dx/dz. softcap tanh(u) has the derivative softcap (1 - tanh^2 u), here from exp: near 1, tanh has lost digits."""
    slope = tl.zeros_like(z) + scale * inv_temperature  # a logit of -inf has one too
    if SOFTCAP:
        e = tl.exp(-2.0 * tl.abs((z + bias) * (scale / softcap)))
        slope *= 4.0 * e / ((1.0 + e) * (1.0 + e))
    return slope


@triton.jit
def _load_block(z_row, bias_ptr, start, columns, inv_temperature, softcap, scale,
                HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Column numbers, which of them exist, their logits (-inf beyond the end), and dx/dz of each.

    The compiler removes the slopes from kernels of statistics, which do not use them.
    """
    j = start + tl.arange(0, BLOCK)
    inside = j < columns
    z = tl.load(z_row + j, mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + j, mask=inside, other=0.0)
    x = _softmax_logits(z, bias, inv_temperature, softcap, scale, SOFTCAP)
    slope = _slope(z, bias, inv_temperature, softcap, scale, SOFTCAP)
    return j, inside, tl.where(inside, x, -float("inf")), slope


@triton.jit
def _add_block(x, axis: tl.constexpr, m, s, q, r):
    """Running max, sum exp(x - m), sum exp(x - m) (x - m) and sum exp(x - m)^2 with a block of columns added."""
    top = tl.maximum(m, tl.max(x, axis))
    finite_top = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be nan: an empty set must stay empty
    d = x - (tl.expand_dims(finite_top, axis) if axis == 1 else finite_top)
    e = tl.exp(d)
    weight = tl.exp(m - finite_top)
    down = tl.where(m == -float("inf"), 0.0, m - finite_top)
    q = weight * (q + down * s) + tl.sum(e * tl.maximum(d, -104.0, propagate_nan=tl.PropagateNan.ALL), axis)
    return top, weight * s + tl.sum(e, axis), q, weight * weight * r + tl.sum(e * e, axis)


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
def product(a_block, a_offset, b_block, b_offset, b_step, depth,
            EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """A block of ``a @ b``. Every kernel that multiplies so adds in one order: the same operands give the same bits."""
    d = tl.arange(0, DEPTH)
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_depth(a_block, a_offset, d[None, :], depth - k, EVEN)
        b = load_depth(b_block, b_offset, d[:, None], depth - k, EVEN)
        z = tl.dot(a, b, z, input_precision="ieee")
        a_block += DEPTH
        b_block += b_step
    return z


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _stats_kernel(
    z_ptr, stride, columns, target_ptr, vocab_start, bias_ptr, inv_temperature_ptr, inv_temperature_stride, softcap,
    scale, max_ptr, sum_ptr, shift_ptr, squares_ptr, target_logit_ptr, logits_ptr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, SQUARES: tl.constexpr, LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_temperature = tl.load(inv_temperature_ptr + row * inv_temperature_stride)
    target = tl.load(target_ptr + row) - vocab_start
    m, s = tl.load(max_ptr + row), tl.load(sum_ptr + row)
    q, r = 0.0, 0.0
    if SHIFT:
        q = tl.load(shift_ptr + row)
    if SQUARES:
        r = tl.load(squares_ptr + row)
    if LOGITS:
        total = tl.load(logits_ptr + row)
    for start in range(0, columns, BLOCK):
        j, inside, x, _ = _load_block(
            z_ptr + row * stride, bias_ptr, start, columns, inv_temperature, softcap, scale, HAS_BIAS, SOFTCAP, BLOCK
        )
        tl.store(target_logit_ptr + row + tl.zeros_like(j), x, mask=(j == target) & (j < columns))
        m, s, q, r = _add_block(x, 0, m, s, q, r)
        if LOGITS:
            total += tl.sum(tl.where(inside, x, 0.0), 0)
    tl.store(max_ptr + row, m)
    tl.store(sum_ptr + row, s)
    if SHIFT:
        tl.store(shift_ptr + row, q)
    if SQUARES:
        tl.store(squares_ptr + row, r)
    if LOGITS:
        tl.store(logits_ptr + row, total)


@triton.jit
def _grad_kernel(
    z_ptr, stride, columns, target_ptr, vocab_start, bias_ptr, inv_temperature_ptr, inv_temperature_stride, softcap,
    scale, max_ptr, log_sum_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, out_ptr, out_stride,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_temperature = tl.load(inv_temperature_ptr + row * inv_temperature_stride)
    j, inside, x, slope = _load_block(
        z_ptr + row * stride, bias_ptr, tl.program_id(1) * BLOCK, columns, inv_temperature, softcap, scale,
        HAS_BIAS, SOFTCAP, BLOCK,
    )  # fmt: skip
    log_p = (x - tl.load(max_ptr + row)) - tl.load(log_sum_ptr + row)
    g = tl.load(grad_logprob_ptr + row)
    upstream_is_zero = g == 0.0
    if ENTROPY:
        h = tl.load(grad_entropy_ptr + row)
        factor = g + h * (tl.maximum(log_p, -87.0) + tl.load(entropy_ptr + row))  # p log p is 0 where p is
        upstream_is_zero = upstream_is_zero & (h == 0.0)
    else:
        factor = g
    dz = -tl.exp(log_p) * factor + tl.where(j == tl.load(target_ptr + row) - vocab_start, g, 0.0)
    dz *= slope
    dz = tl.where(upstream_is_zero, 0.0, dz)  # 0 * nan would be nan: a bad row that the loss does not see stays out
    tl.store(out_ptr + row * out_stride + j, dz.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _frozen_kernel(
    z_ptr, stride, columns, target_ptr, vocab_start, bias_ptr, inv_temperature_ptr, inv_temperature_stride, softcap,
    scale, max_ptr, sum_ptr, target_logit_ptr, sum_others_ptr, target_slope_ptr, accumulator_ptr, dim, out_ptr,
    out_stride, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_temperature = tl.load(inv_temperature_ptr + row * inv_temperature_stride)
    target = tl.load(target_ptr + row) - vocab_start
    before = tl.load(max_ptr + row)
    m, s = before, tl.load(sum_ptr + row)
    for start in range(0, columns, BLOCK):
        j, _, x, _ = _load_block(
            z_ptr + row * stride, bias_ptr, start, columns, inv_temperature, softcap, scale, HAS_BIAS, SOFTCAP, BLOCK
        )
        m, s, _, _ = _add_block(x, 0, m, s, 0.0, 0.0)
    tl.store(max_ptr + row, m)
    tl.store(sum_ptr + row, s)
    shift = tl.where(m == -float("inf"), 0.0, m)
    rescale = tl.exp(before - shift)
    others = tl.load(sum_others_ptr + row) * rescale
    for start in range(0, columns, BLOCK):
        j, inside, x, slope = _load_block(
            z_ptr + row * stride, bias_ptr, start, columns, inv_temperature, softcap, scale, HAS_BIAS, SOFTCAP, BLOCK
        )
        hit = (j == target) & inside
        tl.store(target_logit_ptr + row + tl.zeros_like(j), x, mask=hit)
        tl.store(target_slope_ptr + row + tl.zeros_like(j), slope, mask=hit)
        e = tl.where(hit, 0.0, tl.exp(x - shift))
        others += tl.sum(e, 0)
        tl.store(out_ptr + row * out_stride + j, (e * slope).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(sum_others_ptr + row, others)
    for start in range(0, dim, BLOCK):
        d = start + tl.arange(0, BLOCK)
        accumulator = accumulator_ptr + row * dim + d
        tl.store(accumulator, tl.load(accumulator, mask=d < dim) * rescale, mask=d < dim)


@triton.jit
def _fused_stats_kernel(
    hidden_ptr, weight_ptr, rows, dim, vocab, hidden_stride, weight_stride, weight_stride_d, target_ptr,
    inv_temperature_ptr, inv_temperature_stride, scale, row_blocks, splits, tiles_per_split, max_ptr, sum_ptr,
    target_logit_ptr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Neighbours have few row blocks among them, which stay in L2 while the weights pass by.
    row_block, split = tile_of(tl.program_id(0), row_blocks, splits, GROUP)
    first_row = row_block * ROWS
    i, d = first_row + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    row_inside = i < rows
    inv_temperature = tl.load(inv_temperature_ptr + i * inv_temperature_stride, mask=row_inside, other=1.0)
    target = tl.load(target_ptr + i, mask=row_inside, other=-1)
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # half the registers
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    a_offset = tl.where(row_inside, tl.arange(0, ROWS), 0)[:, None] * hidden_stride + d[None, :]
    tile_ptr = weight_ptr + split.to(tl.int64) * tiles_per_split * COLUMNS * weight_stride
    d_offset = d[:, None] * weight_stride_d
    for tile in range(split * tiles_per_split, min((split + 1) * tiles_per_split, tl.cdiv(vocab, COLUMNS))):
        j = tile * COLUMNS + tl.arange(0, COLUMNS)
        column_inside = j < vocab
        b_offset = tl.where(column_inside, tl.arange(0, COLUMNS), 0)[None, :] * weight_stride + d_offset
        a_block = hidden_ptr + first_row.to(tl.int64) * hidden_stride
        b_block = tile_ptr
        tile_ptr += COLUMNS * weight_stride
        z = product(a_block, a_offset, b_block, b_offset, DEPTH * weight_stride_d, dim, EVEN, ROWS, COLUMNS, DEPTH)
        x = _softmax_logits(z, 0.0, inv_temperature[:, None], 0.0, scale, False)
        if COLUMNS < 256 or (tile + 1) * COLUMNS > vocab:  # the large tile has no registers to spare for the mask
            x = tl.where(column_inside[None, :], x, -float("inf"))
        # A row's target is in one tile: the sum picks it. Where that is, the row's numbers tell; to ask the tile would
        # take twice the registers.
        target_logit = tl.sum(tl.where(j[None, :] == target[:, None], x, 0.0), 1)
        in_tile = (target >= tile * COLUMNS) & (target < (tile + 1) * COLUMNS)
        tl.store(target_logit_ptr + i, target_logit, mask=row_inside & in_tile)
        m, s, _, _ = _add_block(x, 1, m, s, 0.0, 0.0)
    out = split * rows + i
    tl.store(max_ptr + out, m, mask=row_inside)
    tl.store(sum_ptr + out, s, mask=row_inside)


@triton.jit
def _fused_grad_kernel(
    hidden_ptr, weight_ptr, rows, dim, columns, hidden_stride, weight_stride, weight_stride_d, target_ptr,
    vocab_start, inv_temperature_ptr, inv_temperature_stride, scale, row_blocks, column_blocks, max_ptr, log_sum_ptr,
    grad_logprob_ptr, out_ptr, out_stride,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_of(tl.program_id(0), row_blocks, column_blocks, GROUP)
    first_row, first_column = row_block * ROWS, column_block * COLUMNS
    i, d = first_row + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    j = first_column + tl.arange(0, COLUMNS)
    row_inside, column_inside = i < rows, j < columns
    a_offset = tl.where(row_inside, tl.arange(0, ROWS), 0)[:, None] * hidden_stride + d[None, :]
    b_offset = tl.where(column_inside, tl.arange(0, COLUMNS), 0)[None, :] * weight_stride + d[:, None] * weight_stride_d
    a_block = hidden_ptr + first_row.to(tl.int64) * hidden_stride
    b_block = weight_ptr + first_column.to(tl.int64) * weight_stride
    z = product(a_block, a_offset, b_block, b_offset, DEPTH * weight_stride_d, dim, EVEN, ROWS, COLUMNS, DEPTH)
    inv_temperature = tl.load(inv_temperature_ptr + i * inv_temperature_stride, mask=row_inside, other=1.0)[:, None]
    x = _softmax_logits(z, 0.0, inv_temperature, 0.0, scale, False)
    maximum = tl.load(max_ptr + i, mask=row_inside, other=0.0)[:, None]
    log_p = (x - maximum) - tl.load(log_sum_ptr + i, mask=row_inside, other=0.0)[:, None]
    g = tl.load(grad_logprob_ptr + i, mask=row_inside, other=0.0)[:, None]
    target = tl.load(target_ptr + i, mask=row_inside, other=-1) - vocab_start - first_column
    target = tl.where((target >= 0) & (target < COLUMNS), target, -1).to(tl.int32)  # half the registers
    dz = -tl.exp(log_p) * g + tl.where(tl.arange(0, COLUMNS)[None, :] == target[:, None], g, 0.0)
    dz = tl.where(g == 0.0, 0.0, dz * (scale * inv_temperature))  # as in _grad_kernel
    out = out_ptr + first_row.to(tl.int64) * out_stride + first_column
    out_offset = tl.arange(0, ROWS)[:, None] * out_stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + out_offset, dz.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


# ---- the compiled operators' signatures -----------------------------------------------------------------------------


def _problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale) -> tuple:
    return (
        logits, logits.stride(0), logits.shape[1], target, vocab_start, bias, inv_temperature,
        int(inv_temperature.shape[0] != 1), softcap, scale,
    )  # fmt: skip


@on_its_device
def logprob_stats_(
    logits: Tensor, target: Tensor, vocab_start: int, bias: Tensor | None, inv_temperature: Tensor, softcap: float,
    scale: float, maximum: Tensor, sum_exp: Tensor, shift: Tensor | None, squares: Tensor | None, target_logit: Tensor,
    sum_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds a tile of logits (R, C) to the running statistics of its rows."""
    _stats_kernel[(logits.shape[0],)](
        *_problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale),
        maximum, sum_exp, shift, squares, target_logit, sum_logits,
        HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, SHIFT=shift is not None, SQUARES=squares is not None,
        LOGITS=sum_logits is not None, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip


@on_its_device
def logprob_grad_(
    logits: Tensor, target: Tensor, vocab_start: int, bias: Tensor | None, inv_temperature: Tensor, softcap: float,
    scale: float, maximum: Tensor, log_sum: Tensor, entropy: Tensor | None, grad_logprob: Tensor,
    grad_entropy: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Writes the gradient of a tile of raw logits to ``out``, which may be the logits themselves."""
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
    _grad_kernel[grid](
        *_problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale),
        maximum, log_sum, entropy, grad_logprob, grad_entropy, out, out.stride(0),
        HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, ENTROPY=grad_entropy is not None, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip


@on_its_device
def logprob_frozen_(
    logits: Tensor, target: Tensor, vocab_start: int, bias: Tensor | None, inv_temperature: Tensor, softcap: float,
    scale: float, maximum: Tensor, sum_exp: Tensor, target_logit: Tensor, sum_others: Tensor, target_slope: Tensor,
    accumulator: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Writes exp(x - max) dx/dz to ``out``, 0 at the target, and scales what was accumulated to the new maximum."""
    _frozen_kernel[(logits.shape[0],)](
        *_problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale),
        maximum, sum_exp, target_logit, sum_others, target_slope, accumulator, accumulator.shape[1], out,
        out.stride(0), HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip


# ---- GEMMs without logits in memory ---------------------------------------------------------------------------------

_PROGRAMS = 4 * 132  # enough to fill a large GPU several times over; more splits only mean more partial results


@on_its_device
def fused_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, inv_temperature: Tensor, scale: float, maximum: Tensor,
    sum_exp: Tensor, target_logit: Tensor,
) -> None:  # fmt: skip
    """Statistics of whole rows (R,) from hidden (R, D) and weight (V, D): overwrites all but ``target_logit``."""
    (num_rows, dim), vocab = hidden.shape, weight.shape[0]
    shape = gemm_tile(hidden)
    row_blocks, tiles = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(vocab, shape["COLUMNS"])
    if row_blocks == 0:
        return
    splits = min(tiles, max(_PROGRAMS // row_blocks, 1))
    tiles_per_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, tiles_per_split)
    partial = hidden.new_zeros(2, splits, num_rows, dtype=torch.float32)
    _fused_stats_kernel[(row_blocks * splits,)](
        hidden, weight, num_rows, dim, vocab, hidden.stride(0), *weight.stride(), target, inv_temperature,
        int(inv_temperature.shape[0] != 1), scale, row_blocks, splits, tiles_per_split, *partial, target_logit,
        EVEN=dim % shape["DEPTH"] == 0, **shape, **SCHEDULE,
    )  # fmt: skip
    parts = Sums(*partial, None, None, target_logit).at(partial[0].amax(0))
    maximum.copy_(parts.maximum)
    sum_exp.copy_(parts.sum_exp.sum(0))


@on_its_device
def fused_grad(
    hidden: Tensor, weight: Tensor, target: Tensor, vocab_start: int, inv_temperature: Tensor, scale: float,
    maximum: Tensor, log_sum: Tensor, grad_logprob: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of the raw logits of hidden (R, D) and weight (C, D) to ``out`` (R, C)."""
    (num_rows, dim), columns = hidden.shape, weight.shape[0]
    shape = gemm_tile(hidden)
    row_blocks, column_blocks = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(columns, shape["COLUMNS"])
    _fused_grad_kernel[(row_blocks * column_blocks,)](
        hidden, weight, num_rows, dim, columns, hidden.stride(0), *weight.stride(), target, vocab_start,
        inv_temperature, int(inv_temperature.shape[0] != 1), scale, row_blocks, column_blocks, maximum, log_sum,
        grad_logprob, out, out.stride(0), EVEN=dim % shape["DEPTH"] == 0, **shape, **SCHEDULE,
    )  # fmt: skip
