"""What happens between the GEMMs of `linear_logprob`, in Triton, and a forward pass that never stores a logit.

The equations are those of ``csrc/cpu/logprob_rows.cpp``. The first three functions have the signatures of the compiled
operators of the same names. On the CPU they run in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.

    logprob_stats_    reads a logits tile once
    logprob_grad_     reads it once, writes dlogits once, in the dtype of the GEMM that follows
    logprob_frozen_   reads it twice, the second time from cache, and writes once
    fused_stats       a GEMM whose epilogue sums as logprob_stats_ does: no logit leaves the registers
    fused_grad        the same GEMM with logprob_grad_ as its epilogue: of a tile, dlogits alone are written
    fused_odds        the same GEMM, which writes exp(x - r) for an r that is known before the row's sum is (odds.py)

The last three take plain logits: with a bias or a soft-cap, the large tile would not fit the registers.

Deterministic: a row belongs to one program, or to one per vocabulary split, and splits are merged in their order.
"""

# pyrefly: ignore-errors
# (launch options and the code inside kernels are no Python that a type checker knows)

from __future__ import annotations

import functools
import math

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
    def launch(first: Tensor, *arguments, **options):
        with torch.cuda.device_of(first):
            return function(first, *arguments, **options)

    return launch


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def gemm_tile(operand: Tensor) -> dict[str, int]:
    """The tile of a GEMM whose operands' rows are ``operand``'s; masks of an uneven depth would spill the large one."""
    is_even = operand.shape[1] % _LARGE["DEPTH"] == 0
    is_large = operand.element_size() == 2 and is_even and is_hopper(operand.device)
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
    """Running max, sum exp(x - m) less 1, sum exp(x - m) (x - m) and sum exp(x - m)^2 with a block of columns added."""
    top = tl.maximum(m, tl.max(x, axis))
    finite_top = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be nan: an empty set must stay empty
    d = x - (tl.expand_dims(finite_top, axis) if axis == 1 else finite_top)
    e = tl.exp(d)
    weight = tl.exp(m - finite_top)
    down = tl.where(m == -float("inf"), 0.0, m - finite_top)
    q = weight * (q + down * (1.0 + s)) + tl.sum(e * tl.maximum(d, -104.0, propagate_nan=tl.PropagateNan.ALL), axis)
    s = tl.where(m == top, s, weight * (1.0 + s)) + tl.sum(tl.where(e == 1.0, 0.0, e), axis)
    s += tl.sum((e == 1.0).to(tl.float32), axis) - (m < top).to(tl.float32)  # the tops, less the one that is left out
    return top, s, q, weight * weight * r + tl.sum(e * e, axis)


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
    scale, max_ptr, excess_ptr, shift_ptr, squares_ptr, target_logit_ptr, logits_ptr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, SQUARES: tl.constexpr, LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_temperature = tl.load(inv_temperature_ptr + row * inv_temperature_stride)
    target = tl.load(target_ptr + row) - vocab_start
    m, s = tl.load(max_ptr + row), tl.load(excess_ptr + row)
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
    tl.store(excess_ptr + row, s)
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
    scale, max_ptr, excess_ptr, target_logit_ptr, sum_others_ptr, target_slope_ptr, accumulator_ptr, dim, out_ptr,
    out_stride, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_temperature = tl.load(inv_temperature_ptr + row * inv_temperature_stride)
    target = tl.load(target_ptr + row) - vocab_start
    before = tl.load(max_ptr + row)
    m, s = before, tl.load(excess_ptr + row)
    for start in range(0, columns, BLOCK):
        j, _, x, _ = _load_block(
            z_ptr + row * stride, bias_ptr, start, columns, inv_temperature, softcap, scale, HAS_BIAS, SOFTCAP, BLOCK
        )
        m, s, _, _ = _add_block(x, 0, m, s, 0.0, 0.0)
    tl.store(max_ptr + row, m)
    tl.store(excess_ptr + row, s)
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
def _halves(z, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns."""
    return z.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def _add_logits(z, first_column, vocab, inv_temperature, scale, target, m, s,
                LARGE: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`_add_block` of some columns of raw logits, and the rows' target logits where they are in them, else 0."""
    j = first_column + tl.arange(0, COLUMNS)
    x = _softmax_logits(z, 0.0, inv_temperature[:, None], 0.0, scale, False)
    if not LARGE or first_column + COLUMNS > vocab:  # the large tile has no registers to spare for the mask
        x = tl.where((j < vocab)[None, :], x, -float("inf"))
    target_logit = tl.sum(tl.where(j[None, :] == target[:, None], x, 0.0), 1)
    m, s, _, _ = _add_block(x, 1, m, s, 0.0, 0.0)
    return m, s, target_logit


@triton.jit
def _fused_stats_kernel(
    hidden_ptr, weight_ptr, rows, dim, vocab, hidden_stride, weight_stride, weight_stride_d, target_ptr,
    inv_temperature_ptr, inv_temperature_stride, scale, row_blocks, splits, tiles_per_split, max_ptr, excess_ptr,
    target_logit_ptr, chosen_ptr,
    LARGE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # Neighbours have few row blocks among them, which stay in L2 while the weights pass by.
    row_block, split = tile_of(tl.program_id(0), row_blocks, splits, GROUP)
    first_row = row_block * ROWS
    i, d = first_row + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    row_inside = i < rows
    inv_temperature = tl.load(inv_temperature_ptr + i * inv_temperature_stride, mask=row_inside, other=1.0)
    target = tl.load(target_ptr + i, mask=row_inside, other=-1)
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # half the registers
    m, s = tl.full((ROWS,), -float("inf"), tl.float32), tl.full((ROWS,), -1.0, tl.float32)
    a_offset = tl.where(row_inside, tl.arange(0, ROWS), 0)[:, None] * hidden_stride + d[None, :]
    tile_ptr = weight_ptr + split.to(tl.int64) * tiles_per_split * COLUMNS * weight_stride
    d_offset = d[:, None] * weight_stride_d
    first = split * tiles_per_split
    last = min(first + tiles_per_split, tl.cdiv(vocab, COLUMNS))
    if chosen_ptr is not None:
        is_chosen = tl.max(tl.load(chosen_ptr + i, mask=row_inside, other=0).to(tl.int32), 0) > 0
        last = tl.where(is_chosen, last, first)
    for tile in range(first, last):
        j = tile * COLUMNS + tl.arange(0, COLUMNS)
        column_inside = j < vocab
        b_offset = tl.where(column_inside, tl.arange(0, COLUMNS), 0)[None, :] * weight_stride + d_offset
        a_block = hidden_ptr + first_row.to(tl.int64) * hidden_stride
        b_block = tile_ptr
        tile_ptr += COLUMNS * weight_stride
        z = product(a_block, a_offset, b_block, b_offset, DEPTH * weight_stride_d, dim, EVEN, ROWS, COLUMNS, DEPTH)
        # A row's target is in one tile: the sum picks it. Where that is, the row's numbers tell; to ask the tile would
        # take twice the registers.
        if LARGE:  # exponentials of the whole large tile would not fit the registers beside its logits
            left, right = _halves(z, ROWS, COLUMNS)
            m, s, target_logit = _add_logits(
                left, tile * COLUMNS, vocab, inv_temperature, scale, target, m, s, LARGE, COLUMNS // 2
            )
            m, s, in_right = _add_logits(
                right, tile * COLUMNS + COLUMNS // 2, vocab, inv_temperature, scale, target, m, s, LARGE, COLUMNS // 2
            )
            target_logit += in_right
        else:
            m, s, target_logit = _add_logits(
                z, tile * COLUMNS, vocab, inv_temperature, scale, target, m, s, LARGE, COLUMNS
            )
        in_tile = (target >= tile * COLUMNS) & (target < (tile + 1) * COLUMNS)
        tl.store(target_logit_ptr + i, target_logit, mask=row_inside & in_tile)
    out = split * rows + i
    tl.store(max_ptr + out, m, mask=row_inside)
    tl.store(excess_ptr + out, s, mask=row_inside)


@triton.jit
def _factor_and_base(i, row_inside, inv_temperature_ptr, inv_temperature_stride, scale, reference_ptr):
    """A logit z has the odds 2^(factor z - base) against its row's reference."""
    inv_temperature = tl.load(inv_temperature_ptr + i * inv_temperature_stride, mask=row_inside, other=1.0)
    factor = scale * inv_temperature * 1.4426950408889634
    return factor, tl.load(reference_ptr + i, mask=row_inside, other=0.0) * factor


@triton.jit
def _odds_with_target(z, first_column, vocab, factor, base, target, target_z_ptr, COLUMNS: tl.constexpr):
    """Sums of the odds of columns among which may be targets, or the end; stores the targets' z."""
    local = target - first_column
    column = tl.arange(0, COLUMNS)[None, :]
    is_target = column == local[:, None]
    is_here = (local >= 0) & (local < COLUMNS)
    if tl.max(is_here.to(tl.int32), 0) > 0:
        tl.store(target_z_ptr, tl.sum(tl.where(is_target, z, 0.0), 1), mask=is_here)
        z = tl.where(is_target, -float("inf"), z)
    z = tl.where(column >= vocab - first_column, -float("inf"), z)
    return tl.sum(tl.exp2(z * factor[:, None] - base[:, None]), 1)


@triton.jit
def _fused_sums_kernel(
    hidden_ptr, weight_ptr, rows, dim, vocab, hidden_stride, weight_stride, weight_stride_d, target_ptr,
    inv_temperature_ptr, inv_temperature_stride, scale, row_blocks, splits, tiles_per_split, reference_ptr, sum_ptr,
    target_z_ptr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row_block, split = tile_of(tl.program_id(0), row_blocks, splits, GROUP)
    first_row = row_block * ROWS
    i, d = first_row + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    row_inside = i < rows
    factor, base = _factor_and_base(
        i, row_inside, inv_temperature_ptr, inv_temperature_stride, scale, reference_ptr
    )  # fmt: skip
    target = tl.load(target_ptr + i, mask=row_inside, other=-1)
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # half the registers
    s = tl.zeros((ROWS,), tl.float32)
    a_offset = tl.where(row_inside, tl.arange(0, ROWS), 0)[:, None] * hidden_stride + d[None, :]
    tile_ptr = weight_ptr + split.to(tl.int64) * tiles_per_split * COLUMNS * weight_stride
    d_offset = d[:, None] * weight_stride_d
    for tile in range(split * tiles_per_split, min((split + 1) * tiles_per_split, tl.cdiv(vocab, COLUMNS))):
        first_column = tile * COLUMNS
        column_inside = first_column + tl.arange(0, COLUMNS) < vocab
        b_offset = tl.where(column_inside, tl.arange(0, COLUMNS), 0)[None, :] * weight_stride + d_offset
        a_block = hidden_ptr + first_row.to(tl.int64) * hidden_stride
        b_block = tile_ptr
        tile_ptr += COLUMNS * weight_stride
        z = product(a_block, a_offset, b_block, b_offset, DEPTH * weight_stride_d, dim, EVEN, ROWS, COLUMNS, DEPTH)
        is_here = (target >= first_column) & (target < first_column + COLUMNS)
        if (first_column + COLUMNS > vocab) | (tl.max(is_here.to(tl.int32), 0) > 0):
            if COLUMNS > 64:  # masks of so many logits do not fit the registers beside them
                left, right = _halves(z, ROWS, COLUMNS)
                s += _odds_with_target(left, first_column, vocab, factor, base, target, target_z_ptr + i, COLUMNS // 2)
                first_column += COLUMNS // 2
                s += _odds_with_target(right, first_column, vocab, factor, base, target, target_z_ptr + i, COLUMNS // 2)
            else:
                s += _odds_with_target(z, first_column, vocab, factor, base, target, target_z_ptr + i, COLUMNS)
        else:
            # A multiply-add, an ex2 and an addition for each logit: the tensor cores wait meanwhile.
            s += tl.sum(tl.exp2(z * factor[:, None] - base[:, None]), 1)
    tl.store(sum_ptr + split * rows + i, s, mask=row_inside)


@triton.jit
def _finish_sums_kernel(
    rows, splits, inv_temperature_ptr, inv_temperature_stride, scale, reference_ptr, sum_ptr, most, max_ptr,
    excess_ptr, target_logit_ptr, bad_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_inside = i < rows
    factor, base = _factor_and_base(
        i, row_inside, inv_temperature_ptr, inv_temperature_stride, scale, reference_ptr
    )  # fmt: skip
    s = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        s += tl.load(sum_ptr + split * rows + i, mask=row_inside, other=0.0)
    z = tl.load(target_logit_ptr + i, mask=row_inside, other=0.0)
    inv_temperature = tl.load(inv_temperature_ptr + i * inv_temperature_stride, mask=row_inside, other=1.0)
    x = _softmax_logits(z, 0.0, inv_temperature, 0.0, scale, False)
    drop = z.to(tl.float64) * factor - base  # the GEMM adds in another order than the reference's dot product
    is_good = (s <= most) & (tl.abs(drop) <= 1.0)  # false for nan
    others = tl.where(is_good, s.to(tl.float64) * tl.exp2(-drop), 0.0)
    # In place of the maximum: the target's logit, so that no digit is lost where the target is certain, or 4 less than
    # the log-normaliser, so that the two differences of a log-probability round numbers of about the same size.
    maximum = (x + tl.log(tl.maximum(others * 0.0183, 1.0))).to(tl.float32)
    down = x.to(tl.float64) - maximum
    excess = tl.where(down < 0.0, (1.0 + others) * tl.exp(down) - 1.0, others)
    tl.store(max_ptr + i, maximum, mask=row_inside)
    tl.store(excess_ptr + i, excess.to(tl.float32), mask=row_inside)
    tl.store(target_logit_ptr + i, x, mask=row_inside)
    tl.store(bad_ptr + i, is_good == 0, mask=row_inside)


@triton.jit
def _fused_grad_kernel(
    hidden_ptr, weight_ptr, rows, dim, columns, hidden_stride, weight_stride, weight_stride_d, target_ptr,
    vocab_start, inv_temperature_ptr, inv_temperature_stride, scale, row_blocks, column_blocks, max_ptr, log_sum_ptr,
    entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, out_ptr, out_stride,
    ENTROPY: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
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
    upstream_is_zero = g == 0.0
    factor = g
    if ENTROPY:  # as in _grad_kernel
        h = tl.load(grad_entropy_ptr + i, mask=row_inside, other=0.0)[:, None]
        entropy = tl.load(entropy_ptr + i, mask=row_inside, other=0.0)[:, None]
        factor = g + h * (tl.maximum(log_p, -87.0) + entropy)
        upstream_is_zero = upstream_is_zero & (h == 0.0)
    dz = -tl.exp(log_p) * factor + tl.where(tl.arange(0, COLUMNS)[None, :] == target[:, None], g, 0.0)
    dz = tl.where(upstream_is_zero, 0.0, dz * (scale * inv_temperature))  # as in _grad_kernel
    out = out_ptr + first_row.to(tl.int64) * out_stride + first_column
    out_offset = tl.arange(0, ROWS)[:, None] * out_stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + out_offset, dz.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def _target_logits_kernel(
    hidden_ptr, weight_ptr, dim, vocab, hidden_stride, weight_stride, weight_stride_d, target_ptr, target_z_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    is_known = (target >= 0) & (target < vocab)
    weight_row = weight_ptr + tl.where(is_known, target, 0) * weight_stride
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, dim, BLOCK):
        d = (start + tl.arange(0, BLOCK)).to(tl.int64)
        a = tl.load(hidden_ptr + row * hidden_stride + d, mask=d < dim, other=0.0).to(tl.float32)
        b = tl.load(weight_row + d * weight_stride_d, mask=d < dim, other=0.0).to(tl.float32)
        products += a * b
    tl.store(target_z_ptr + row, tl.where(is_known, tl.sum(products, 0), float("nan")))


@triton.jit
def _write_odds(
    z, first_column, vocab, row_inside, factor, base, target, s, q, out, out_stride,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the odds of some columns; returns the sums with these columns added."""
    j = tl.arange(0, COLUMNS)
    if MASKED:
        column_inside = (first_column + j < vocab)[None, :]
        z = tl.where(column_inside & (j[None, :] != (target - first_column)[:, None]), z, -float("inf"))
    x = z * factor[:, None] - base[:, None]
    e = tl.exp2(x)
    s += tl.sum(e, 1)
    if SHIFT:
        if MASKED:  # 0 * -inf would be nan; elsewhere the nan has the row computed again, as masked
            x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
        q += tl.sum(e * x, 1)
    if AGAIN:
        e = tl.where(e < float("inf"), e, 0.0)  # a bad row that the loss does not see must not reach dweight
    offset = tl.arange(0, ROWS)[:, None] * out_stride + j[None, :]
    inside = row_inside[:, None] & column_inside if MASKED else row_inside[:, None]
    tl.store(out + first_column + offset, e.to(out.dtype.element_ty), mask=inside)
    return s, q


@triton.jit
def _write_halves(
    z, first_column, vocab, row_inside, factor, base, target, s, q, out, out_stride,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_write_odds`, WIDTH columns at a time: odds of more would not fit the registers beside their logits."""
    if COLUMNS <= WIDTH:
        return _write_odds(
            z, first_column, vocab, row_inside, factor, base, target, s, q, out, out_stride, SHIFT, MASKED, AGAIN,
            ROWS, COLUMNS,
        )  # fmt: skip
    else:
        left, right = _halves(z, ROWS, COLUMNS)
        s, q = _write_halves(
            left, first_column, vocab, row_inside, factor, base, target, s, q, out, out_stride, SHIFT, MASKED, AGAIN,
            WIDTH, ROWS, COLUMNS // 2,
        )  # fmt: skip
        return _write_halves(
            right, first_column + COLUMNS // 2, vocab, row_inside, factor, base, target, s, q, out, out_stride, SHIFT,
            MASKED, AGAIN, WIDTH, ROWS, COLUMNS // 2,
        )  # fmt: skip


@triton.jit
def _fused_odds_kernel(
    hidden_ptr, weight_ptr, rows, dim, vocab, hidden_stride, weight_stride, weight_stride_d, target_ptr, factor_ptr,
    base_ptr, row_blocks, splits, tiles_per_split, chosen_ptr, out_ptr, out_stride, sum_ptr, shift_ptr,
    SHIFT: tl.constexpr, AGAIN: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_block, split = tile_of(tl.program_id(0), row_blocks, splits, GROUP)
    first_row = row_block * ROWS
    i, d = first_row + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    row_inside = i < rows
    factor = tl.load(factor_ptr + i, mask=row_inside, other=0.0)
    base = tl.load(base_ptr + i, mask=row_inside, other=0.0)
    target = tl.load(target_ptr + i, mask=row_inside, other=-1)
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # half the registers
    s, q = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    a_offset = tl.where(row_inside, tl.arange(0, ROWS), 0)[:, None] * hidden_stride + d[None, :]
    tile_ptr = weight_ptr + split.to(tl.int64) * tiles_per_split * COLUMNS * weight_stride
    d_offset = d[:, None] * weight_stride_d
    out = out_ptr + first_row.to(tl.int64) * out_stride
    first = split * tiles_per_split
    last = min(first + tiles_per_split, tl.cdiv(vocab, COLUMNS))
    if AGAIN:
        is_chosen = tl.max(tl.load(chosen_ptr + i, mask=row_inside, other=0).to(tl.int32), 0) > 0
        last = tl.where(is_chosen, last, first)
    for tile in range(first, last):
        j = tile * COLUMNS
        b_offset = tl.where(j + tl.arange(0, COLUMNS) < vocab, tl.arange(0, COLUMNS), 0)[None, :] * weight_stride
        a_block = hidden_ptr + first_row.to(tl.int64) * hidden_stride
        b_block = tile_ptr
        tile_ptr += COLUMNS * weight_stride
        z = product(
            a_block, a_offset, b_block, b_offset + d_offset, DEPTH * weight_stride_d, dim, EVEN, ROWS, COLUMNS, DEPTH
        )
        is_here = (target >= j) & (target < j + COLUMNS)
        if AGAIN or ((j + COLUMNS > vocab) | (tl.max(is_here.to(tl.int32), 0) > 0)):
            s, q = _write_halves(
                z, j, vocab, row_inside, factor, base, target, s, q, out, out_stride, SHIFT, True, AGAIN,
                WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            s, q = _write_halves(
                z, j, vocab, row_inside, factor, base, target, s, q, out, out_stride, SHIFT, False, AGAIN,
                WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
    at = split * rows + i
    tl.store(sum_ptr + at, s, mask=row_inside)
    if SHIFT:
        tl.store(shift_ptr + at, q, mask=row_inside)


# ---- the compiled operators' signatures -----------------------------------------------------------------------------


def _problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale) -> tuple:
    return (
        logits, logits.stride(0), logits.shape[1], target, vocab_start, bias, inv_temperature,
        int(inv_temperature.shape[0] != 1), softcap, scale,
    )  # fmt: skip


@on_its_device
def logprob_stats_(
    logits: Tensor, target: Tensor, vocab_start: int, bias: Tensor | None, inv_temperature: Tensor, softcap: float,
    scale: float, maximum: Tensor, excess: Tensor, shift: Tensor | None, squares: Tensor | None, target_logit: Tensor,
    sum_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds a tile of logits (R, C) to the running statistics of its rows."""
    _stats_kernel[(logits.shape[0],)](
        *_problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale),
        maximum, excess, shift, squares, target_logit, sum_logits,
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
    scale: float, maximum: Tensor, excess: Tensor, target_logit: Tensor, sum_others: Tensor, target_slope: Tensor,
    accumulator: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Writes exp(x - max) dx/dz to ``out``, 0 at the target, and scales what was accumulated to the new maximum."""
    _frozen_kernel[(logits.shape[0],)](
        *_problem(logits, target, vocab_start, bias, inv_temperature, softcap, scale),
        maximum, excess, target_logit, sum_others, target_slope, accumulator, accumulator.shape[1], out,
        out.stride(0), HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip


# ---- GEMMs without logits in memory ---------------------------------------------------------------------------------

_PROGRAMS = 4 * 132  # enough to fill a large GPU several times over; more splits only mean more partial results


def _splits(num_rows: int, vocab: int, shape: dict[str, int], least: int = 1) -> tuple[int, int, int]:
    """Blocks of rows, parts of the vocabulary that have a program of their own, and tiles in each part."""
    row_blocks, tiles = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(vocab, shape["COLUMNS"])
    splits = min(tiles, max(_PROGRAMS // row_blocks, least))
    tiles_per_split = triton.cdiv(tiles, splits)
    return row_blocks, triton.cdiv(tiles, tiles_per_split), tiles_per_split


# The odds of the others against a row's target are at most this, or the row is computed again with a running maximum.
# The larger the odds, the fewer digits their exponents have behind the point, and the less probable is the target: no
# sampler draws a token of probability 1e-10.
_MOST_SUMMED_ODDS = 2.0**32
_SPLITS_OF_FEW = 32  # so that the programs of one block of rows are no long tail


@on_its_device
def fused_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, inv_temperature: Tensor, scale: float, needs_maximum: bool,
    maximum: Tensor, excess: Tensor, target_logit: Tensor,
) -> None:  # fmt: skip
    """Statistics of whole rows (R,) from hidden (R, D) and weight (V, D): overwrites all but ``target_logit``.

    Unless ``needs_maximum``, another reference stands in place of the maximum of most rows: the target's logit is known
    before the row is, so that the exponentials need no running maximum. Rows whose target is too unlikely for that, or
    that have no finite target logit, are computed again with a running maximum, beside all rows of their blocks, whose
    results stay as they are. The host does not wait to know whether there is such a row.
    """
    if hidden.shape[0] == 0:
        return
    temperature = inv_temperature, int(inv_temperature.shape[0] != 1), scale
    problem = hidden, weight, target, temperature
    if needs_maximum:
        maximum_again, excess_again = _stats_with_maximum(*problem, target_logit, None)
        maximum.copy_(maximum_again)
        excess.copy_(excess_again)
        return
    is_bad = _stats_at_targets(*problem, maximum, excess, target_logit)
    maximum_again, excess_again = _stats_with_maximum(*problem, target_logit, is_bad)
    torch.where(is_bad, maximum_again, maximum, out=maximum)
    torch.where(is_bad, excess_again, excess, out=excess)


def _stats_with_maximum(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: tuple, target_logit: Tensor, chosen: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Maximum and excess of all rows, or of the chosen rows and of all rows in their blocks."""
    partial = _partial_stats(hidden, weight, target, temperature, target_logit, chosen)
    parts, is_top = Sums(*partial, None, None, target_logit).at(partial[0].amax(0))
    return parts.maximum, parts.excess.sum(0) + (is_top.sum(0) - 1)


def _partial_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: tuple, target_logit: Tensor, chosen: Tensor | None
) -> Tensor:
    """(2, splits, R) maximum and excess of each split of the vocabulary."""
    (num_rows, dim), vocab = hidden.shape, weight.shape[0]
    shape = gemm_tile(hidden)
    least_splits = 1 if chosen is None else _SPLITS_OF_FEW
    row_blocks, splits, tiles_per_split = _splits(num_rows, vocab, shape, least_splits)
    partial = hidden.new_zeros(2, splits, num_rows, dtype=torch.float32)
    _fused_stats_kernel[(row_blocks * splits,)](
        hidden, weight, num_rows, dim, vocab, hidden.stride(0), *weight.stride(), target, *temperature, row_blocks,
        splits, tiles_per_split, *partial, target_logit, chosen,
        LARGE=shape == _LARGE, EVEN=dim % shape["DEPTH"] == 0, **shape, **SCHEDULE,
    )  # fmt: skip
    return partial


def _stats_at_targets(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: tuple, maximum: Tensor, excess: Tensor,
    target_logit: Tensor,
) -> Tensor:  # fmt: skip
    """Fills the statistics; returns which rows' must be computed again, (R,) bool."""
    (num_rows, dim), vocab = hidden.shape, weight.shape[0]
    reference = _target_z(hidden, weight, target)
    shape = gemm_tile(hidden)
    row_blocks, splits, tiles_per_split = _splits(num_rows, vocab, shape)
    sums = hidden.new_empty(splits, num_rows, dtype=torch.float32)
    _fused_sums_kernel[(row_blocks * splits,)](
        hidden, weight, num_rows, dim, vocab, hidden.stride(0), *weight.stride(), target, *temperature, row_blocks,
        splits, tiles_per_split, reference, sums, target_logit,
        EVEN=dim % shape["DEPTH"] == 0, **shape, **SCHEDULE,
    )  # fmt: skip
    is_bad = torch.empty_like(maximum, dtype=torch.bool)
    _finish_sums_kernel[(triton.cdiv(num_rows, 256),)](
        num_rows, splits, *temperature, reference, sums, _MOST_SUMMED_ODDS, maximum, excess, target_logit, is_bad,
        BLOCK=256, **LAUNCH,
    )  # fmt: skip
    return is_bad


def _target_z(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """(R,) raw logits by one dot product for each row, nan for a target outside the vocabulary."""
    (num_rows, dim), vocab = hidden.shape, weight.shape[0]
    target_z = hidden.new_empty(num_rows, dtype=torch.float32)
    _target_logits_kernel[(num_rows,)](
        hidden, weight, dim, vocab, hidden.stride(0), *weight.stride(), target, target_z, BLOCK=BLOCK, **LAUNCH
    )
    return target_z


@on_its_device
def fused_grad(
    hidden: Tensor, weight: Tensor, target: Tensor, vocab_start: int, inv_temperature: Tensor, scale: float,
    maximum: Tensor, log_sum: Tensor, entropy: Tensor | None, grad_logprob: Tensor, grad_entropy: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of the raw logits of hidden (R, D) and weight (C, D) to ``out`` (R, C)."""
    (num_rows, dim), columns = hidden.shape, weight.shape[0]
    shape = gemm_tile(hidden)
    row_blocks, column_blocks = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(columns, shape["COLUMNS"])
    _fused_grad_kernel[(row_blocks * column_blocks,)](
        hidden, weight, num_rows, dim, columns, hidden.stride(0), *weight.stride(), target, vocab_start,
        inv_temperature, int(inv_temperature.shape[0] != 1), scale, row_blocks, column_blocks, maximum, log_sum,
        entropy, grad_logprob, grad_entropy, out, out.stride(0), ENTROPY=grad_entropy is not None,
        EVEN=dim % shape["DEPTH"] == 0, **shape, **SCHEDULE,
    )  # fmt: skip


# Odds are multiplied by weights and added up in float32, and hidden states are divided by their sums in the operands'
# dtype: both have room above and below. A smaller sum belongs to a log-probability above -44.
_MOST_ODDS = 2.0**64
# Columns whose odds fit the registers beside the large tile's logits, by (with_shift, AGAIN).
_WIDTHS = {(False, False): 64, (False, True): 64, (True, False): 32, (True, True): 64}


@on_its_device
def fused_odds(
    hidden: Tensor, weight: Tensor, target: Tensor, inv_temperature: Tensor, scale: float, with_shift: bool,
    odds: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Writes exp(x - r) of the logits x of hidden (R, D) and weight (V, D) to ``odds`` (R, V), 0 at the target.

    r is the target's logit, rounded, for which no pass over the row is needed. Where the sum of a row is too large
    then, or nan, its block of rows is computed again with the row's largest logit for r; the block's other rows keep
    their r. The host does not wait to know whether there is such a row, because the programs of other blocks end at
    once. The scale must be positive.

    Returns:
        (R,) each: the sums of ``odds``, r and r less the target's logit in float64, and the sums of exp(x - r) (x - r)
        or None. The sum is nan where the target's logit is not finite, or the target is not in the vocabulary.
    """
    (num_rows, dim), vocab = hidden.shape, weight.shape[0]
    if num_rows == 0:
        nothing = hidden.new_empty(0, dtype=torch.float32)
        return nothing, nothing.double(), nothing.double(), nothing if with_shift else None
    target_z = _target_z(hidden, weight, target)
    slope = (inv_temperature * scale).expand(num_rows)
    factor = (slope / math.log(2)).contiguous()
    shape = gemm_tile(hidden)

    def compute(base: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sums of 2^(factor z - base) and shift, of all rows, or of the chosen rows and all rows in their blocks."""
        row_blocks, splits, tiles_per_split = _splits(
            num_rows, vocab, shape, 1 if chosen is None else _SPLITS_OF_FEW
        )  # fmt: skip
        width = _WIDTHS[with_shift, chosen is not None] if shape == _LARGE else shape["COLUMNS"]
        sums = hidden.new_empty(2 if with_shift else 1, splits, num_rows, dtype=torch.float32)
        _fused_odds_kernel[(row_blocks * splits,)](
            hidden, weight, num_rows, dim, vocab, hidden.stride(0), *weight.stride(), target, factor, base, row_blocks,
            splits, tiles_per_split, chosen, odds, odds.stride(0), sums[0], sums[1] if with_shift else None,
            SHIFT=with_shift, AGAIN=chosen is not None, WIDTH=width, EVEN=dim % shape["DEPTH"] == 0, **shape,
            **SCHEDULE,
        )  # fmt: skip
        return sums[0].sum(0), sums[1].sum(0) if with_shift else None

    base = target_z * factor
    sum_odds, shift = compute(base, None)
    is_bad = (sum_odds <= _MOST_ODDS).logical_not()
    if shift is not None:
        is_bad |= shift.isnan()
    temperature = inv_temperature, int(inv_temperature.shape[0] != 1), scale
    maximum = _partial_stats(hidden, weight, target, temperature, torch.empty_like(base), is_bad)[0].amax(0)
    base = torch.where(is_bad, maximum / math.log(2), base)
    sum_again, shift_again = compute(base, is_bad)
    if shift is not None:
        shift = shift_again.where(is_bad, shift) * math.log(2)
    sum_odds = sum_again.where(is_bad, sum_odds) + 0 * target_z
    # Which logit has the odds 1: exact, because the base is rounded, and rounded odds would all be off together.
    reference = base.double() / factor * slope
    return sum_odds, reference, reference - target_z.double() * slope, shift
