"""Tiles of the logits: their GEMMs, and how rows and columns are cut into them.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlft_fast.ops import library as library  # registers torch.ops.rlft_fast
from rlft_fast.ops.precision import rounds_in_kernel, sums_in_float32

# Columns of a tile that all threads share, and of a tile that one thread has for itself. The logits and weight rows
# of a thread's own tile stay in the thread's L2 between the GEMMs and the epilogue. Powers of two would make rows
# compete for the same sets of the cache: they were 5 % slower at (2048, 576, 49152) on two cores, and so were 4096
# shared columns and 1008 own columns. From 1024 rows on the logits do not stay in L2 anyway, and twice the columns move
# dhidden half as often: 5 % faster. All are multiples of kBlock in csrc/cpu/logprob.h, so that all paths add in one
# order.
TILE_COLUMNS = 1984
_THREAD_TILE_COLUMNS = 496
_MANY_ROWS = 1024
# On a GPU the wider a tile, the less often dhidden is read and written. Forward passes add whole blocks of kBlock
# columns (csrc/cuda/logprob.cu), so that all of them add in one order.
GPU_TILE_COLUMNS = 16384
_GPU_BLOCK = 8192
_GPU_COLUMN_MULTIPLE = 2048
_ALIGNED_COLUMNS = 64  # 128 bytes of bfloat16: a line of the cache, and more than TMA and any vector asks for
# Rows of logits at a time in the loss. On a CPU a GEMM of 128 rows takes a quarter longer per row than a GEMM of all
# rows, 336 rows a tenth, 416 rows a twentieth; more rows gain little. At (1024, 896, 151936) and (2048, 576, 49152).
CPU_LOGIT_ROWS = 480
# On a GPU these rows fill a GEMM over the vocabulary, and are few beside the dlogits of all rows. Where hidden states
# are narrow, a chunk's GEMM is short beside its launches, and a chunk has twice the rows.
GPU_LOGIT_ROWS = 512
_NARROW_HIDDEN = 2048
ROW_MULTIPLE = {"cpu": 16, "cuda": 128}  # of the GEMM's tiles


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand as the GEMM multiplies it: rounded to ``dtype``, and in `operand_dtype`."""
    return x.to(dtype).to(operand_dtype(dtype, x.device.type))


def float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


def operand_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Float32 on a CPU, whose GEMM of a narrower dtype would round the logits."""
    return torch.float32 if device_type == "cpu" else dtype


def multiply(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False, rounded_to: torch.dtype | None = None
) -> None:
    """``out (+)= a @ b``, summed in float32. What is accumulated is float32 or of the operands' dtype.

    Operands may be rounded to ``rounded_to``, see `sums_in_float32`. On a CPU b may be narrower than a.
    """
    if out.dtype == torch.float32 and rounds_in_kernel(a.device.type, rounded_to):
        torch.ops.rlft_fast.multiply_rounded_(a, b, out, accumulate)
        return
    b = b.to(a.dtype)
    with sums_in_float32(a, rounded_to):
        if out.dtype == a.dtype:
            torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
        elif out.dtype != torch.float32:  # rounded once, from a sum in float32
            assert not accumulate
            total = torch.empty_like(out, dtype=torch.float32)
            multiply(a, b, out=total, rounded_to=rounded_to)
            out.copy_(total)
        elif accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)


# ---- how rows and columns are cut ------------------------------------------------------------------------------------


class Tile:
    """Memory for the logits of a tile, and for the operand of the next GEMM that is computed from them.

    Without logits, ``logits`` are the results, too.
    """

    def __init__(self, hidden_RD: Tensor, columns: int, has_logits: bool = True) -> None:
        self.results = hidden_RD.new_empty(hidden_RD.shape[0], columns)
        is_narrow = has_logits and hidden_RD.dtype != torch.float32
        self.logits = torch.empty_like(self.results, dtype=torch.float32) if is_narrow else self.results

    @staticmethod
    def bytes_per_logit(dtype: torch.dtype, has_logits: bool = True) -> int:
        """Of operands of that dtype."""
        return dtype.itemsize if dtype == torch.float32 or not has_logits else 4 + dtype.itemsize

    def views(self, columns: int) -> tuple[Tensor, Tensor]:
        """(R, columns) logits and results; the same memory where operands are float32.

        A narrow tile keeps the distance between rows, so that every row begins at an aligned address.
        """
        return self.logits[:, :columns], self.results[:, :columns]


def thread_tile_columns(num_rows: int) -> int:
    """Columns of the tile of one CPU thread."""
    return 2 * _THREAD_TILE_COLUMNS if num_rows >= _MANY_ROWS else _THREAD_TILE_COLUMNS


def padded_columns(columns: int) -> int:
    """Distance between rows of so many columns, in elements, at which every row begins at an aligned address.

    At an odd distance a vendor's GEMM reads and writes only one or two elements at a time.
    """
    return -(-columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def tile_shape(num_rows: int, like: Tensor, workspace_mib: int) -> tuple[int, int]:
    """Most rows and columns of a tile of a forward pass: logits alone within the workspace."""
    logits = workspace_mib * 2**20 // 4
    if not like.is_cuda:
        return rounded_rows(logits // TILE_COLUMNS, "cpu"), TILE_COLUMNS
    columns = min(max(logits // max(num_rows, 1) // _GPU_BLOCK * _GPU_BLOCK, _GPU_BLOCK), GPU_TILE_COLUMNS)
    return rounded_rows(logits // columns, "cuda"), columns


def gpu_logit_rows(dim: int) -> int:
    """Most rows of logits at a time in the loss on a GPU."""
    return 2 * GPU_LOGIT_ROWS if dim < _NARROW_HIDDEN else GPU_LOGIT_ROWS


def rounded_columns(limit: int, like: Tensor) -> int:
    """At most ``limit`` columns, at most the widest tile, at least one; whole blocks where there is room."""
    limit = max(min(limit, GPU_TILE_COLUMNS if like.is_cuda else TILE_COLUMNS), 1)
    multiple = _GPU_COLUMN_MULTIPLE if like.is_cuda and limit >= _GPU_COLUMN_MULTIPLE else _ALIGNED_COLUMNS
    return limit - limit % multiple if limit > multiple else limit


def rounded_rows(limit: int, device_type: str) -> int:
    """At most ``limit`` rows, at least one, and whole tiles of the GEMM where there is room for one."""
    multiple = ROW_MULTIPLE[device_type]
    return max(limit - limit % multiple if limit > multiple else limit, 1)


def row_chunks(num_rows: int, limit: int, device_type: str) -> Iterator[slice]:
    """Slices of at most ``limit`` rows, as equal as whole tiles of the GEMM allow.

    No slice has few rows: GEMMs of few rows run another kernel, which gives a row other bits.
    """
    multiple = ROW_MULTIPLE[device_type]
    multiple = multiple if limit % multiple == 0 else 1
    num_chunks, num_tiles = max(-(-num_rows // limit), 1), -(-num_rows // multiple)
    for i in range(num_chunks if num_rows else 0):
        first, last = i * num_tiles // num_chunks, (i + 1) * num_tiles // num_chunks
        yield slice(first * multiple, min(last * multiple, num_rows))


def in_huge_pages(fresh: Tensor) -> Tensor:
    """The tensor itself, before it is first written: on the CPU page faults would cost more than writing it does."""
    if fresh.device.type == "cpu":
        torch.ops.rlft_fast.use_huge_pages_(fresh)
    return fresh
