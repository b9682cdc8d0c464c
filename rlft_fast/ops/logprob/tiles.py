"""What the algorithms of `linear_logprob` share: tiles of the logits, GEMMs, statistics of rows, shards, gradients.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlft_fast.ops import library as library  # registers torch.ops.rlft_fast
from rlft_fast.ops.precision import sums_in_float32

# Columns of a tile that all threads share, and of one that a thread has for itself, whose logits and weight rows then
# stay in its L2 between the GEMMs and the epilogue. No powers of two, which make rows compete for the same sets of the
# cache: 5 % slower at (2048, 576, 49152) on two cores, as were 4096 shared columns or 1008 of one's own. Logits of many
# rows do not stay there anyway, and then dhidden is moved half as often with twice the columns: 5 % faster from 1024
# rows on. All are multiples of kBlock in csrc/cpu/logprob.h, so that all paths add in one order.
TILE_COLUMNS = 1984
_THREAD_TILE_COLUMNS = 496
_MANY_ROWS = 1024
# On a GPU the wider a tile, the less often dhidden is read and written. Forward passes add blocks of kBlock columns
# (csrc/cuda/logprob.cu), and take whole ones, so that they all add in one order.
GPU_TILE_COLUMNS = 16384
_GPU_BLOCK = 8192
_GPU_COLUMN_MULTIPLE = 2048
_ALIGNED_COLUMNS = 64  # 128 bytes of bfloat16: a line of the cache, and more than TMA and any vector asks for
# Rows of logits at a time in the loss. On a CPU, GEMMs of 128 rows take a quarter longer per row than those of all, of
# 336 rows a tenth, of 416 a twentieth, and more rows gain little: at (1024, 896, 151936) and (2048, 576, 49152).
CPU_LOGIT_ROWS = 480
# On a GPU enough for a full GEMM of the vocabulary, and little beside dlogits of all rows.
GPU_LOGIT_ROWS = 512
ROW_MULTIPLE = {"cpu": 16, "cuda": 128}  # of the GEMM's tiles


# ---- the projection and its GEMMs -----------------------------------------------------------------------------------


class Head(NamedTuple):
    """The projection, or this rank's rows of it, and what is done to its logits before the softmax."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float
    scale: float
    backend: str  # "native", "triton", or "triton_fused": a forward that stores no logits
    group: str = ""  # name of the process group whose ranks hold the other rows; "": there are none

    @property
    def vocab(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def kernels(self) -> Any:
        """Who computes between the GEMMs: ``logprob_stats_``, ``logprob_grad_``, ``logprob_frozen_``."""
        if self.backend != "native":
            from rlft_fast.ops.logprob import triton

            return triton
        return torch.ops.rlft_fast

    def tiles(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Vocabulary slices with their weight rows and bias, in the dtype that the GEMMs multiply in."""
        bias = float_bias(self.bias_V)
        for start in range(0, self.vocab, columns):
            tile = slice(start, min(start + columns, self.vocab))
            yield tile, operand(self.weight_VD[tile]), None if bias is None else bias[tile]


def operand(x: Tensor) -> Tensor:
    """What the GEMM multiplies: CPUs have no fast half-precision GEMM, so tiles are widened there as needed."""
    return x.to(torch.float32) if x.device.type == "cpu" else x


def float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


def operand_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "cpu" else x.dtype


def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out (+)= a @ b``, summed in float32; ``out`` is float32 or of the operands' dtype."""
    with sums_in_float32(a):
        if out.dtype == a.dtype:
            torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
        elif a.is_cuda:
            if accumulate:
                torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
            else:
                torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:  # a CPU multiplies in float32 alone: `out` is narrower than its operands
            out.copy_(torch.mm(a, b, out=torch.empty(out.shape, dtype=a.dtype)))


def multiply_rows(a: Tensor, b: Tensor, out: Tensor, count: Tensor | None, accumulate: bool = False) -> None:
    """``out (+)= a @ b``, of the first ``count`` rows where that is given (on a GPU, by Triton)."""
    if count is None:
        multiply(a, b, out, accumulate)
    else:
        from rlft_fast.ops.logprob import triton_gemm

        triton_gemm.multiply_rows(a, b, out, count, accumulate)


def multiply_columns(a: Tensor, b: Tensor, out: Tensor, count: Tensor | None) -> None:
    """``out = a.T @ b`` over all rows, or the first ``count`` (on a GPU, by Triton)."""
    if count is None:
        multiply(a.T, b, out)
    else:
        from rlft_fast.ops.logprob import triton_gemm

        triton_gemm.multiply_columns(a, b, out, count)


# ---- how rows and columns are cut -----------------------------------------------------------------------------------


class Tile:
    """Memory for the logits of a tile, and for what replaces them as an operand of the next GEMM."""

    def __init__(self, rows: Rows, columns: int) -> None:
        shape, dtype = (rows.target_R.shape[0], columns), rows.hidden_RD.dtype
        self.logits = rows.hidden_RD.new_empty(shape, dtype=torch.float32)
        self.results = self.logits if dtype == torch.float32 else self.logits.new_empty(shape, dtype=dtype)

    @staticmethod
    def bytes_per_logit(like: Tensor) -> int:
        dtype = operand_dtype(like)
        return 4 if dtype == torch.float32 else 4 + dtype.itemsize

    def views(self, columns: int) -> tuple[Tensor, Tensor]:
        """(R, columns) logits and results; the same memory where operands are float32.

        A narrow tile keeps the distance of the rows: they begin where vectors of elements may.
        """
        return self.logits[:, :columns], self.results[:, :columns]


def thread_tile_columns(num_rows: int) -> int:
    """Columns of a tile that a thread of a CPU has for itself."""
    return 2 * _THREAD_TILE_COLUMNS if num_rows >= _MANY_ROWS else _THREAD_TILE_COLUMNS


def padded_columns(columns: int) -> int:
    """Distance of rows of so many columns, in elements, at which each begins where vectors of elements may.

    Without it, at an odd vocabulary, a vendor's GEMM neither reads nor writes more than one or two elements at a time.
    """
    return -(-columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def tile_shape(num_rows: int, like: Tensor, workspace_mib: int) -> tuple[int, int]:
    """Most rows and columns of a tile of a forward pass: logits alone within the workspace."""
    logits = workspace_mib * 2**20 // 4
    if not like.is_cuda:
        return rounded_rows(logits // TILE_COLUMNS, "cpu"), TILE_COLUMNS
    columns = min(max(logits // max(num_rows, 1) // _GPU_BLOCK * _GPU_BLOCK, _GPU_BLOCK), GPU_TILE_COLUMNS)
    return rounded_rows(logits // columns, "cuda"), columns


def rounded_columns(limit: int, like: Tensor) -> int:
    """At most ``limit`` columns and those of the widest tile, at least one, and whole blocks where there is room."""
    limit = max(min(limit, GPU_TILE_COLUMNS if like.is_cuda else TILE_COLUMNS), 1)
    multiple = _GPU_COLUMN_MULTIPLE if like.is_cuda and limit >= _GPU_COLUMN_MULTIPLE else _ALIGNED_COLUMNS
    return limit - limit % multiple if limit > multiple else limit


def rounded_rows(limit: int, device_type: str) -> int:
    """At most ``limit`` rows, at least one, and whole tiles of the GEMM where there is room for one."""
    multiple = ROW_MULTIPLE[device_type]
    return max(limit - limit % multiple if limit > multiple else limit, 1)


def row_chunks(num_rows: int, limit: int, device_type: str) -> Iterator[slice]:
    """Slices of at most ``limit`` rows, as equal as whole tiles of the GEMM allow, and none of few rows.

    Among few rows a row has other bits.
    """
    multiple = ROW_MULTIPLE[device_type]
    multiple = multiple if limit % multiple == 0 else 1
    num_chunks, num_tiles = max(-(-num_rows // limit), 1), -(-num_rows // multiple)
    for i in range(num_chunks if num_rows else 0):
        first, last = i * num_tiles // num_chunks, (i + 1) * num_tiles // num_chunks
        yield slice(first * multiple, min(last * multiple, num_rows))


# ---- rows and their statistics --------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Some rows of the problem, gathered: all that a chunk needs besides the head."""

    hidden_RD: Tensor
    target_R: Tensor
    inv_temperature: Tensor  # (R,) or (1,)
    threshold: Tensor | None = None  # (R,); None: every logit counts

    @staticmethod
    def gather(
        hidden: Tensor, target: Tensor, inv_temperature: Tensor, index: Tensor, threshold: Tensor | None = None
    ) -> Rows:
        whole = index.shape[0] == hidden.shape[0]
        if whole and not index.is_cuda and torch.equal(index, torch.arange(index.shape[0])):
            return Rows(operand(hidden).contiguous(), target.contiguous(), inv_temperature, threshold)
        return Rows(
            operand(hidden[index]).contiguous(), target[index],
            inv_temperature if inv_temperature.shape[0] == 1 else inv_temperature[index],
            None if threshold is None else threshold[index],
        )  # fmt: skip


class Stats(NamedTuple):
    """Per row; the log-normaliser is ``maximum + log_sum``, kept apart because rounding their sum costs digits of p."""

    logprob: Tensor
    entropy: Tensor | None
    sum_prob_squared: Tensor | None
    top1: Tensor
    maximum: Tensor
    log_sum: Tensor


class Sums(NamedTuple):
    """Per row, over the vocabulary seen so far; None for what nobody asks for."""

    maximum: Tensor
    sum_exp: Tensor  # of exp(x - maximum)
    shift: Tensor | None  # sum of exp(x - maximum) (x - maximum)
    squares: Tensor | None  # sum of exp(x - maximum)^2
    target_logit: Tensor  # nan until the target has been seen: a target outside the vocabulary must not look valid

    @staticmethod
    def of_nothing(rows: Rows, return_entropy: bool = False, return_sum_prob_squared: bool = False) -> Sums:
        maximum, sum_exp, shift, squares, target_logit = rows.hidden_RD.new_zeros(
            5, rows.target_R.shape[0], dtype=torch.float32
        )
        return Sums(
            maximum.fill_(-torch.inf), sum_exp, shift if return_entropy else None,
            squares if return_sum_prob_squared else None, target_logit.fill_(torch.nan),
        )  # fmt: skip

    def at(self, top: Tensor) -> Sums:
        """The same sums with ``top``, no less than the maximum, in its place: such sums can be added."""
        down = (self.maximum - top).nan_to_num(nan=0.0, neginf=-torch.finfo(torch.float32).max)  # no 0 * -inf
        factor = down.exp()
        return Sums(
            top, self.sum_exp * factor,
            None if self.shift is None else (self.shift + down * self.sum_exp) * factor,
            None if self.squares is None else self.squares * factor.square(), self.target_logit,
        )  # fmt: skip

    def finish(self, head: Head) -> Stats:
        maximum, sum_exp, shift, squares, target_logit = _merge_shards(head.group, self) if head.group else self
        log_sum = sum_exp.log()
        return Stats(
            logprob=(target_logit - maximum) - log_sum,
            entropy=None if shift is None else log_sum - shift / sum_exp,
            sum_prob_squared=None if squares is None else squares / sum_exp.square(),
            top1=target_logit == maximum,
            maximum=maximum,
            log_sum=log_sum,
        )


def per_token_results(hidden: Tensor, *asked_for: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(T,) logprob, and (T,) or empty entropy, sum_prob_squared and top1: zeros, which is what ignored rows keep."""
    num_tokens = hidden.shape[0]
    entropy, sum_prob_squared, top1 = (num_tokens if asked else 0 for asked in asked_for)
    return (
        hidden.new_zeros(num_tokens, dtype=torch.float32), hidden.new_zeros(entropy, dtype=torch.float32),
        hidden.new_zeros(sum_prob_squared, dtype=torch.float32), hidden.new_zeros(top1, dtype=torch.bool),
    )  # fmt: skip


# ---- a vocabulary sharded over processes ----------------------------------------------------------------------------


def _merge_shards(group: str, own: Sums) -> Sums:
    """Over all vocabulary shards. Only the shard of the target knows its logit."""
    top = own.maximum.clone()
    _all_reduce(top, group, dist.ReduceOp.MAX)
    parts = own.at(top)
    sums = {
        "target_logit": own.target_logit.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
        "seen": own.target_logit.isnan().logical_not().float(),
        "sum_exp": parts.sum_exp,
    }
    if parts.shift is not None:
        sums["shift"] = parts.shift
    if parts.squares is not None:
        sums["squares"] = parts.squares
    total = torch.stack(list(sums.values()))
    _all_reduce(total, group)
    merged = dict(zip(sums, total, strict=True))
    return Sums(
        top, merged["sum_exp"], merged.get("shift"), merged.get("squares"),
        merged["target_logit"].masked_fill(merged["seen"] == 0, torch.nan),
    )  # fmt: skip


def _all_reduce(tensor: Tensor, group: str, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    # An op's schema carries strings: the name stands for the group, as in torch's own functional collectives.
    dist.all_reduce(tensor, operation, group=cast(Any, dist.distributed_c10d)._resolve_process_group(group))


def rebase_targets(target: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Targets counted from this rank's first vocabulary id, and (N, 3) every rank's V, D and T; one collective."""
    own = torch.tensor([*weight.shape, target.shape[0]]).to(target.device, non_blocking=True)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    shapes = torch.stack(sizes)
    return target - shapes[: group.rank(), 0].sum(), shapes


# ---- gradients ------------------------------------------------------------------------------------------------------


def empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and needed
        else hidden.new_empty(0)
        for tensor, needed in zip((hidden, weight, bias), needs_grad, strict=True)
    )


def seen_rows(grad_logprob: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """(R,) bool: the rows that the loss sees: not clipped, advantage not zero, not masked."""
    seen = grad_logprob != 0
    return seen if grad_entropy is None else seen | (grad_entropy != 0)


class Gradients(NamedTuple):
    """Outputs of a backward pass in the inputs' dtypes, each empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @staticmethod
    def allocate(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> Gradients:
        grads = Gradients(*map(in_huge_pages, empty_gradients(hidden, weight, bias, needs)))
        grads.hidden.zero_()
        return grads

    def accumulators(self, in_float: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where parts of dweight and dbias are added up: float32, or the outputs themselves; None if not needed."""
        weight_sum, bias_sum = (
            None if not x.numel() else x if x.dtype == torch.float32 or not in_float
            else in_huge_pages(torch.empty_like(x, dtype=torch.float32))
            for x in (self.weight, self.bias)
        )  # fmt: skip
        return weight_sum, bias_sum

    def round_from(self, weight_sum: Tensor | None, bias_sum: Tensor | None, empty: bool) -> None:
        """Takes over the accumulators, which are without content if nothing was added."""
        for out, total in ((self.weight, weight_sum), (self.bias, bias_sum)):
            if empty:
                out.zero_()
            elif total is not None and total is not out:
                out.copy_(total)

    def set_hidden(self, index: Tensor, grad_rows: Tensor, head: Head) -> None:
        """Stores complete rows of dhidden; where the vocabulary is sharded, every rank holds a part of their sum."""
        if head.group:
            _all_reduce(grad_rows, head.group)
        self.hidden[index] = grad_rows.to(self.hidden.dtype)


def scatter_gradients(grads, needs, num_inputs: int) -> tuple[Tensor | None, ...]:
    """Gradients at the positions of (hidden, weight, ., ., bias) among ``num_inputs`` op inputs."""
    d_hidden, d_weight, d_bias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (d_hidden, d_weight, None, None, d_bias, *[None] * (num_inputs - 5))


def in_huge_pages(fresh: Tensor) -> Tensor:
    """The tensor itself, before it is first written: on the CPU page faults would cost more than writing it does."""
    if fresh.device.type == "cpu":
        torch.ops.rlft_fast.use_huge_pages_(fresh)
    return fresh
