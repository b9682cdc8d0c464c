"""The algorithms behind `linear_logprob`: GEMMs over tiles of the logits, and what happens between them.

The (T, V) logits are by far the largest tensor of a policy update. Here they exist one tile at a time: the GEMMs are
the vendor's, and one kernel per tile does everything between them (``csrc/cpu/logprob.cpp`` holds the equations).
Callers have checked every argument.

    no grad              1 GEMM    logits tile -> online softmax statistics
    with backward        4 GEMMs   backward recomputes the logits per vocabulary tile from the saved normaliser, so
                                   every row of dW is reduced over all tokens at once and written once; rows without
                                   upstream gradient are left out, on a GPU by Triton's GEMMs, which stop at a row
                                   number that they read there
    frozen weight        2 GEMMs   U = (onehot - P) W is built while the logits are there; backward scales its rows
    linear_logprob_loss  3 GEMMs   the loss is known per token, so logits become dlogits in place in the forward

The forward of all four adds the same blocks of columns in the same order, and the vendor's GEMM gives a row the same
bits among few rows and many, so their log-probabilities are equal bit for bit: a policy ratio between a no-grad pass
and the first gradient pass is exactly 1.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlft_fast.ops import _library as _library  # registers torch.ops.rlft_fast
from rlft_fast.ops.reference import LossFunction

# Columns of a tile that all threads share, and of one that a thread has for itself, whose logits and weight rows then
# stay in its L2 between the GEMMs and the epilogue. No powers of two, which make rows compete for the same sets of the
# cache: 5 % slower at (2048, 576, 49152) on two cores, as were 4096 shared columns or 1008 of one's own. Both are
# multiples of kBlock in csrc/cpu/logprob.cpp, so that all paths add in one order.
_TILE_COLUMNS = 1984
_THREAD_TILE_COLUMNS = 496
# On a GPU the wider a tile, the less often dhidden is read and written; a multiple of kBlock in csrc/cuda/logprob.cu.
_GPU_TILE_COLUMNS = 16384
_GPU_COLUMN_MULTIPLE = 2048
# Rows of logits at a time in the loss: enough for a full GEMM of the vocabulary, and little beside dlogits of all rows.
_GPU_LOGIT_ROWS = 512
_ROW_MULTIPLE = {"cpu": 16, "cuda": 128}  # of the GEMM's tiles

loss_functions: dict[int, LossFunction] = {}  # an op's schema cannot carry a callable: it travels as a handle


@torch.compiler.assume_constant_result
def compiled_handle(loss_fn: LossFunction) -> int:
    """A handle that lives as long as the process, as the compiled graph that holds it may."""
    handle = id(loss_fn)
    loss_functions[handle] = loss_fn
    return handle


# ---- tiles ----------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
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
            from rlft_fast.ops import triton_logprob

            return triton_logprob
        return torch.ops.rlft_fast

    def multiply_rows(self, a: Tensor, b: Tensor, out: Tensor, count: Tensor | None, accumulate: bool = False) -> None:
        """``out (+)= a @ b``, of the first ``count`` rows where that is given."""
        if count is None:
            _multiply(a, b, out, accumulate)
        else:
            self.kernels.multiply_rows(a, b, out, count, accumulate)

    def multiply_columns(self, a: Tensor, b: Tensor, out: Tensor, count: Tensor | None) -> None:
        """``out = a.T @ b`` over all rows, or the first ``count``."""
        if count is None:
            _multiply(a.T, b, out)
        else:
            self.kernels.multiply_columns(a, b, out, count)

    def tiles(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Vocabulary slices with their weight rows and bias, in the dtype that the GEMMs multiply in."""
        bias = _float_bias(self.bias_V)
        for start in range(0, self.vocab, columns):
            tile = slice(start, min(start + columns, self.vocab))
            yield tile, _operand(self.weight_VD[tile]), None if bias is None else bias[tile]


def _operand(x: Tensor) -> Tensor:
    """What the GEMM multiplies: CPUs have no fast half-precision GEMM, so tiles are widened there as needed."""
    return x.to(torch.float32) if x.device.type == "cpu" else x


def _float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)


def _operand_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "cpu" else x.dtype


def _multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out (+)= a @ b``, summed in float32; ``out`` is float32 or of the operands' dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.is_cuda:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:  # a CPU multiplies in float32 alone: `out` is narrower than its operands
        out.copy_(torch.mm(a, b, out=torch.empty(out.shape, dtype=a.dtype)))


class _Tile:
    """Memory for the logits of a tile, and for what replaces them as an operand of the next GEMM."""

    def __init__(self, rows: _Rows, columns: int) -> None:
        num_rows = rows.target_R.shape[0]
        dtype = rows.hidden_RD.dtype
        self.logits = rows.hidden_RD.new_empty(num_rows * columns, dtype=torch.float32)
        self.results = self.logits if dtype == torch.float32 else self.logits.new_empty(num_rows * columns, dtype=dtype)
        self.num_rows = num_rows

    @staticmethod
    def bytes_per_logit(like: Tensor) -> int:
        dtype = _operand_dtype(like)
        return 4 if dtype == torch.float32 else 4 + dtype.itemsize

    def views(self, columns: int) -> tuple[Tensor, Tensor]:
        """(R, columns) logits and results; the same memory where operands are float32."""
        shape = self.num_rows, columns
        size = self.num_rows * columns
        return self.logits[:size].view(shape), self.results[:size].view(shape)


def _tile_shape(num_rows: int, like: Tensor, workspace_mib: int) -> tuple[int, int]:
    """Most rows and columns of a tile of a forward pass: logits alone within the workspace."""
    logits = workspace_mib * 2**20 // 4
    if not like.is_cuda:
        return _rounded_rows(logits // _TILE_COLUMNS, like), _TILE_COLUMNS
    columns = min(logits // max(num_rows, 1), _GPU_TILE_COLUMNS) // _GPU_COLUMN_MULTIPLE * _GPU_COLUMN_MULTIPLE
    columns = max(columns, _GPU_COLUMN_MULTIPLE)
    return _rounded_rows(logits // columns, like), columns


def _rounded_rows(limit: int, like: Tensor) -> int:
    """At most ``limit`` rows, at least one, and whole tiles of the GEMM where there is room for one."""
    multiple = _ROW_MULTIPLE[like.device.type]
    return max(limit - limit % multiple if limit > multiple else limit, 1)


def _row_chunks(num_rows: int, limit: int, like: Tensor) -> Iterator[slice]:
    """Slices of at most ``limit`` rows, evenly divided."""
    num_chunks = max(-(-num_rows // limit), 1)
    multiple = _ROW_MULTIPLE[like.device.type]
    even = -(-num_rows // num_chunks)
    step = max(min(limit, -(-even // multiple) * multiple), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


class _Rows(NamedTuple):
    """Some rows of the problem, gathered: all that a chunk needs besides the head."""

    hidden_RD: Tensor
    target_R: Tensor
    inv_temperature: Tensor  # (R,) or (1,)

    @staticmethod
    def gather(hidden: Tensor, target: Tensor, inv_temperature: Tensor, index: Tensor) -> _Rows:
        whole = index.shape[0] == hidden.shape[0]
        if whole and not index.is_cuda and torch.equal(index, torch.arange(index.shape[0])):
            return _Rows(_operand(hidden), target.contiguous(), inv_temperature)
        per_row = inv_temperature if inv_temperature.shape[0] == 1 else inv_temperature[index]
        return _Rows(_operand(hidden[index]), target[index], per_row)


class _Stats(NamedTuple):
    """Per row; the log-normaliser is ``maximum + log_sum``, kept apart because rounding their sum costs digits of p."""

    logprob: Tensor
    entropy: Tensor | None
    sum_prob_squared: Tensor | None
    top1: Tensor
    maximum: Tensor
    log_sum: Tensor


class _Sums(NamedTuple):
    """Per row, over the vocabulary seen so far; None for what nobody asks for."""

    maximum: Tensor
    sum_exp: Tensor  # of exp(x - maximum)
    shift: Tensor | None  # sum of exp(x - maximum) (x - maximum)
    squares: Tensor | None  # sum of exp(x - maximum)^2
    target_logit: Tensor  # nan until the target has been seen: a target outside the vocabulary must not look valid

    @staticmethod
    def of_nothing(rows: _Rows, return_entropy: bool = False, return_sum_prob_squared: bool = False) -> _Sums:
        maximum, sum_exp, shift, squares, target_logit = rows.hidden_RD.new_zeros(
            5, rows.target_R.shape[0], dtype=torch.float32
        )
        return _Sums(
            maximum.fill_(-torch.inf), sum_exp, shift if return_entropy else None,
            squares if return_sum_prob_squared else None, target_logit.fill_(torch.nan),
        )  # fmt: skip

    def finish(self, head: _Head) -> _Stats:
        maximum, sum_exp, shift, squares, target_logit = _merge_shards(head.group, self) if head.group else self
        log_sum = sum_exp.log()
        return _Stats(
            logprob=(target_logit - maximum) - log_sum,
            entropy=None if shift is None else log_sum - shift / sum_exp,
            sum_prob_squared=None if squares is None else squares / sum_exp.square(),
            top1=target_logit == maximum,
            maximum=maximum,
            log_sum=log_sum,
        )


def _forward_chunk(head: _Head, rows: _Rows, columns: int, sums: _Sums) -> _Stats:
    """Statistics of one chunk, tile by tile in the same memory."""
    if head.backend == "triton_fused":
        head.kernels.fused_stats(
            rows.hidden_RD, _operand(head.weight_VD), rows.target_R, _float_bias(head.bias_V), rows.inv_temperature,
            head.softcap, head.scale, *sums,
        )  # fmt: skip
        return sums.finish(head)
    scratch = rows.hidden_RD.new_empty(rows.hidden_RD.shape[0] * columns, dtype=torch.float32)
    num_rows = rows.hidden_RD.shape[0]
    # One GEMM for forward and backward: errors of its rounding cancel in p - 1 only if they are the same ones.
    count = scratch.new_full((), num_rows, dtype=torch.int32) if head.backend == "triton" else None
    for tile, weight, bias in head.tiles(columns):
        z = scratch[: num_rows * weight.shape[0]].view(num_rows, -1)
        head.multiply_rows(rows.hidden_RD, weight.T, z, count)
        head.kernels.logprob_stats_(
            z, rows.target_R, tile.start, bias, rows.inv_temperature, head.softcap, head.scale, *sums
        )
    return sums.finish(head)


def _merge_shards(group: str, own: _Sums) -> _Sums:
    """Over all vocabulary shards. Only the shard of the target knows its logit."""
    top = own.maximum.clone()
    _all_reduce(top, group, dist.ReduceOp.MAX)
    down = (own.maximum - top).nan_to_num(nan=0.0, neginf=-torch.finfo(torch.float32).max)  # 0 * -inf would be NaN
    factor = down.exp()
    sums = {
        "target_logit": own.target_logit.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
        "seen": own.target_logit.isfinite().float(),
        "sum_exp": own.sum_exp * factor,
    }
    if own.shift is not None:
        sums["shift"] = (own.shift + down * own.sum_exp) * factor
    if own.squares is not None:
        sums["squares"] = own.squares * factor.square()
    total = torch.stack(list(sums.values()))
    _all_reduce(total, group)
    merged = dict(zip(sums, total, strict=True))
    return _Sums(
        top, merged["sum_exp"], merged.get("shift"), merged.get("squares"),
        merged["target_logit"].masked_fill(merged["seen"] == 0, torch.nan),
    )  # fmt: skip


def _all_reduce(tensor: Tensor, group: str, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    # An op's schema carries strings: the name stands for the group, as in torch's own functional collectives.
    dist.all_reduce(tensor, operation, group=cast(Any, dist.distributed_c10d)._resolve_process_group(group))


def rebase_targets(target: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Targets counted from this rank's first vocabulary id, and (N, 3) every rank's V, D and T; one collective."""
    own = torch.tensor([*weight.shape, target.shape[0]], device=target.device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    shapes = torch.stack(sizes)
    return target - shapes[: group.rank(), 0].sum(), shapes


# ---- forward only, and forward + recomputing backward ---------------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, backend: str, group: str, workspace_mib: int, return_entropy: bool,
    return_sum_prob_squared: bool, return_top1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(logprob (T,), entropy, sum_prob_squared, top1: (T,) or empty, (maximum, log_sum) (2, A) of the active rows)."""
    head = _Head(weight, bias, softcap, scale, backend, group)
    results = _per_token_results(hidden, return_entropy, return_sum_prob_squared, return_top1)
    num_active = active_index.shape[0]
    normalizer = hidden.new_empty(2, num_active, dtype=torch.float32)
    limit, columns = _tile_shape(num_active, hidden, workspace_mib)
    if backend == "triton_fused":
        limit = max(num_active, 1)
    for chunk in _row_chunks(num_active, limit, hidden):
        index = active_index[chunk]
        rows = _Rows.gather(hidden, target, inv_temperature, index)
        stats = _forward_chunk(head, rows, columns, _Sums.of_nothing(rows, return_entropy, return_sum_prob_squared))
        normalizer[:, chunk] = torch.stack([stats.maximum, stats.log_sum])
        for result, values in zip(results, stats, strict=False):
            if values is not None and result.shape[0]:
                result[index] = values
    return *results, normalizer


def _in_huge_pages(fresh: Tensor) -> Tensor:
    """The tensor itself, before it is first written: on the CPU page faults would cost more than writing it does."""
    if fresh.device.type == "cpu":
        torch.ops.rlft_fast.use_huge_pages_(fresh)
    return fresh


def _per_token_results(hidden: Tensor, *asked_for: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(T,) logprob, and (T,) or empty entropy, sum_prob_squared and top1: zeros, which is what ignored rows keep."""
    num_tokens = hidden.shape[0]
    entropy, sum_prob_squared, top1 = (num_tokens if asked else 0 for asked in asked_for)
    return (
        hidden.new_zeros(num_tokens, dtype=torch.float32), hidden.new_zeros(entropy, dtype=torch.float32),
        hidden.new_zeros(sum_prob_squared, dtype=torch.float32), hidden.new_zeros(top1, dtype=torch.bool),
    )  # fmt: skip


@_linear_logprob.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, backend, group, workspace_mib,
      *asked_for):  # fmt: skip
    return *_per_token_results(hidden, *asked_for), hidden.new_empty(2, *active_index.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, backend: str, group: str, workspace_mib: int,
    normalizer: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None, needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight, dbias), each empty if not needed: three GEMMs, vocabulary tile by vocabulary tile."""
    head = _Head(weight, bias, softcap, scale, backend, group)
    grads = _Gradients.allocate(hidden, weight, bias, needs_grad)
    upstream = grad_logprob[active_index]
    upstream_entropy = None if grad_entropy is None else grad_entropy[active_index]
    seen = (upstream != 0) if upstream_entropy is None else (upstream != 0) | (upstream_entropy != 0)
    keep, count = _seen_first(seen, backend)
    active_index, normalizer, upstream = active_index[keep], normalizer[:, keep], upstream[keep]
    upstream_entropy = None if upstream_entropy is None else upstream_entropy[keep]
    rows = _Rows.gather(hidden, target, inv_temperature, active_index)
    row_entropy = None if grad_entropy is None else entropy[active_index]
    maximum, log_sum = normalizer.contiguous()
    num_rows = active_index.shape[0]
    most_columns = _GPU_TILE_COLUMNS if hidden.is_cuda else _TILE_COLUMNS
    fitting = workspace_mib * 2**20 // (_Tile.bytes_per_logit(hidden) * max(num_rows, 1))
    columns = max(min(fitting, most_columns), 1)
    memory = _Tile(rows, columns)
    grad_rows = hidden.new_zeros(num_rows, hidden.shape[1], dtype=torch.float32) if needs_grad[0] else None
    for tile, weight_tile, bias_tile in head.tiles(columns):
        z, dz = memory.views(weight_tile.shape[0])
        head.multiply_rows(rows.hidden_RD, weight_tile.T, z, count)
        head.kernels.logprob_grad_(
            z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, softcap, scale,
            maximum, log_sum, row_entropy, upstream, upstream_entropy, dz,
        )  # fmt: skip
        if grad_rows is not None:
            head.multiply_rows(dz, weight_tile, grad_rows, count, accumulate=True)
        if needs_grad[1]:
            head.multiply_columns(dz, rows.hidden_RD, grads.weight[tile], count)
        if needs_grad[2]:
            grads.bias[tile] = dz.sum(0, dtype=torch.float32)
    if grad_rows is not None:
        grads.set_hidden(active_index, grad_rows, head)
    return grads.hidden, grads.weight, grads.bias


def _seen_first(seen: Tensor, backend: str) -> tuple[Tensor | slice, Tensor | None]:
    """Which rows backward takes: those that the loss sees (not clipped, advantage not zero).

    A device is not waited for: there they come first, with their number as a () int32 tensor, and Triton's GEMMs stop
    behind them. The vendor's need sizes from the host and take all rows.
    """
    if backend == "triton":
        return seen.logical_not().byte().argsort(stable=True), seen.sum(dtype=torch.int32)
    if seen.is_cuda:
        return slice(None), None
    return seen.nonzero().squeeze(-1), None


@_linear_logprob_backward.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, backend, group, workspace_mib,
      normalizer, entropy, grad_logprob, grad_entropy, needs_grad):  # fmt: skip
    return _empty_gradients(hidden, weight, bias, needs_grad)


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and needed
        else hidden.new_empty(0)
        for tensor, needed in zip((hidden, weight, bias), needs_grad, strict=True)
    )


class _Gradients(NamedTuple):
    """Outputs of a backward pass in the inputs' dtypes, each empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @staticmethod
    def allocate(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> _Gradients:
        grads = _Gradients(*map(_in_huge_pages, _empty_gradients(hidden, weight, bias, needs)))
        grads.hidden.zero_()
        return grads

    def accumulators(self, in_float: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where parts of dweight and dbias are added up: float32, or the outputs themselves; None if not needed."""
        weight_sum, bias_sum = (
            None if not x.numel() else x if x.dtype == torch.float32 or not in_float
            else _in_huge_pages(torch.empty_like(x, dtype=torch.float32))
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

    def set_hidden(self, index: Tensor, grad_rows: Tensor, head: _Head) -> None:
        """Stores complete rows of dhidden; where the vocabulary is sharded, every rank holds a part of their sum."""
        if head.group:
            _all_reduce(grad_rows, head.group)
        self.hidden[index] = grad_rows.to(self.hidden.dtype)


def _save_for_recompute(ctx, inputs, output) -> None:
    hidden, weight, target, active_index, bias, inv_temperature, *ctx.options, ctx.return_entropy, _, _ = inputs
    _, entropy, *constants = output
    ctx.save_for_backward(hidden, weight, target, active_index, bias, inv_temperature, constants[-1], entropy)
    ctx.mark_non_differentiable(*constants)


def _recompute_backward(ctx, grad_logprob, grad_entropy, *_):
    hidden, weight, target, active_index, bias, inv_temperature, normalizer, entropy = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]]
    grads = torch.ops.rlft_fast.linear_logprob_backward(
        hidden, weight, target, active_index, bias, inv_temperature, *ctx.options,
        normalizer, entropy, grad_logprob.contiguous(),
        grad_entropy.contiguous() if ctx.return_entropy else None, needs,
    )  # fmt: skip
    return _scatter_gradients(grads, needs, num_inputs=14)


def _scatter_gradients(grads, needs, num_inputs: int) -> tuple[Tensor | None, ...]:
    """Gradients at the positions of (hidden, weight, ., ., bias) among ``num_inputs`` op inputs."""
    d_hidden, d_weight, d_bias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (d_hidden, d_weight, None, None, d_bias, *[None] * (num_inputs - 5))


_linear_logprob.register_autograd(_recompute_backward, setup_context=_save_for_recompute)


# ---- frozen weight: forward keeps U = d logprob / d hidden ----------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob_frozen", mutates_args=())
def _linear_logprob_frozen(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, backend: str, workspace_mib: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(logprob (T,), U (T, D) with U_t = d logprob_t / d hidden_t).

    U = (onehot - P) W without P: as in flash attention (Dao et al. 2022), unnormalised sums follow the running maximum.
    """
    head = _Head(weight, bias, softcap, scale, backend)
    logprob = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    jacobian = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    num_active = active_index.shape[0]
    limit, columns = _tile_shape(num_active, hidden, workspace_mib * 4 // _Tile.bytes_per_logit(hidden))
    for chunk in _row_chunks(num_active, limit, hidden):
        index = active_index[chunk]
        rows = _Rows.gather(hidden, target, inv_temperature, index)
        sums = _Sums.of_nothing(rows)
        sum_others, slope = hidden.new_zeros(2, index.shape[0], dtype=torch.float32)
        others_RD = torch.zeros_like(rows.hidden_RD, dtype=torch.float32)
        memory = _Tile(rows, columns)
        for tile, weight_tile, bias_tile in head.tiles(columns):
            z, exp_z = memory.views(weight_tile.shape[0])
            _multiply(rows.hidden_RD, weight_tile.T, out=z)
            head.kernels.logprob_frozen_(
                z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, softcap, scale,
                sums.maximum, sums.sum_exp, sums.target_logit, sum_others, slope, others_RD, exp_z,
            )  # fmt: skip
            _multiply(exp_z, weight_tile, out=others_RD, accumulate=True)
        logprob[index] = sums.finish(head).logprob
        target_RD = weight[rows.target_R.clamp(0, head.vocab - 1)].to(torch.float32)
        grad_rows = target_RD.mul_((slope * sum_others).unsqueeze(1)).sub_(others_RD).div_(sums.sum_exp.unsqueeze(1))
        jacobian[index] = grad_rows.to(hidden.dtype)
    return logprob, jacobian


@_linear_logprob_frozen.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, backend, workspace_mib):
    jacobian = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), jacobian


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _frozen_backward(ctx, grad_logprob, _grad_jacobian):
    (jacobian,) = ctx.saved_tensors
    return (jacobian * grad_logprob.unsqueeze(-1).to(jacobian.dtype), *[None] * 9)


_linear_logprob_frozen.register_autograd(_frozen_backward, setup_context=_save_jacobian)


# ---- a known per-token loss: gradients finished in the forward ------------------------------------------------------


class _Chunk(NamedTuple):
    """Active rows whose logits are in memory at once, and where they stand among those of their group."""

    rows: slice
    in_group: slice


class _ThreadTiles:
    """On the CPU: each thread takes whole tiles of a chunk, GEMMs and all. dlogits replace the logits."""

    def __init__(self, head: _Head, grads: _Gradients, hidden: Tensor, num_rows: int, workspace_mib: int) -> None:
        self.head, self.grads = head, grads
        limit = _rounded_rows(workspace_mib * 2**20 // (4 * head.vocab), hidden)
        self.groups = [[_Chunk(rows, rows)] for rows in _row_chunks(num_rows, limit, hidden)]
        self.logits = _in_huge_pages(hidden.new_empty(min(limit, num_rows) * head.vocab, dtype=torch.float32))
        self.sums = grads.accumulators(in_float=True)

    def stats(self, chunk: _Chunk, rows: _Rows, sums: _Sums) -> None:
        torch.ops.rlft_fast.logprob_chunk_stats_(*self._problem(rows), *sums)

    def grad(self, chunk: _Chunk, rows: _Rows, index: Tensor, *upstream: Tensor | None) -> None:
        grad_rows = torch.empty_like(rows.hidden_RD) if self.grads.hidden.numel() else None
        torch.ops.rlft_fast.logprob_chunk_grad_(
            *self._problem(rows), *upstream, grad_rows, *self.sums, chunk.rows.start > 0
        )
        if grad_rows is not None:
            self.grads.set_hidden(index, grad_rows, self.head)

    def finish(self, group: list[_Chunk], hidden_RD: Tensor, index: Tensor) -> None:
        """Every chunk has finished its gradients."""

    def _problem(self, rows: _Rows) -> tuple[Any, ...]:
        return (
            rows.hidden_RD, self.head.weight_VD, self.logits, _THREAD_TILE_COLUMNS, rows.target_R,
            self.head.bias_V, rows.inv_temperature, self.head.softcap, self.head.scale,
        )  # fmt: skip


class _LargeGemms:
    """On a GPU: logits of a few rows at a time become dlogits, and those of a whole group of chunks two large GEMMs.

    A group of all rows needs no float32 accumulator of dweight, which is as large as the dlogits of 2 D rows.
    """

    def __init__(self, head: _Head, grads: _Gradients, hidden: Tensor, num_rows: int, workspace_mib: int) -> None:
        self.head, self.grads = head, grads
        self.weight = _operand(head.weight_VD)
        limit, group_limit = self._limits(hidden, workspace_mib * 2**20 // head.vocab)
        self.groups = [
            [
                _Chunk(slice(group.start + rows.start, group.start + rows.stop), rows)
                for rows in _row_chunks(group.stop - group.start, limit, hidden)
            ]
            for group in _row_chunks(num_rows, group_limit, hidden)
        ]
        self.grad_logits = hidden.new_empty(min(group_limit, num_rows), head.vocab, dtype=self.weight.dtype)
        self.logits = None  # results replace them
        if self.weight.dtype != torch.float32:
            self.logits = hidden.new_empty(min(limit, num_rows), head.vocab, dtype=torch.float32)
        self.sums = grads.accumulators(in_float=len(self.groups) > 1)

    def _limits(self, like: Tensor, column_bytes: int) -> tuple[int, int]:
        """Most rows of a chunk and of a group, in so many bytes per column of the logits."""
        if self.weight.dtype == torch.float32:
            limit = _rounded_rows(column_bytes // 4, like)
            return limit, limit
        size = self.weight.dtype.itemsize
        limit = _rounded_rows(min(column_bytes // (4 + size), _GPU_LOGIT_ROWS), like)
        return limit, max((column_bytes - 4 * limit) // (size * limit), 1) * limit

    def stats(self, chunk: _Chunk, rows: _Rows, sums: _Sums) -> None:
        logits, _ = self._memory(chunk)
        _multiply(rows.hidden_RD, self.weight.T, out=logits)
        self.head.kernels.logprob_stats_(*self._tile(logits, rows), *sums)

    def grad(self, chunk: _Chunk, rows: _Rows, index: Tensor, *upstream: Tensor | None) -> None:
        logits, grad_logits = self._memory(chunk)
        self.head.kernels.logprob_grad_(*self._tile(logits, rows), *upstream, grad_logits)

    def finish(self, group: list[_Chunk], hidden_RD: Tensor, index: Tensor) -> None:
        grad_logits = self.grad_logits[: group[-1].in_group.stop]
        if self.grads.hidden.numel():
            dtype = torch.float32 if self.head.group else self.grads.hidden.dtype  # shards are added in float32
            grad_rows = torch.empty_like(hidden_RD, dtype=dtype)
            _multiply(grad_logits, self.weight, out=grad_rows)
            self.grads.set_hidden(index, grad_rows, self.head)
        weight_sum, bias_sum = self.sums
        accumulate = group[0].rows.start > 0
        if weight_sum is not None:
            _multiply(grad_logits.T, hidden_RD, out=weight_sum, accumulate=accumulate)
        if bias_sum is not None:
            column_sums = grad_logits.sum(0, dtype=torch.float32)
            bias_sum.add_(column_sums) if accumulate else bias_sum.copy_(column_sums)

    def _memory(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """(logits, dlogits) of a chunk."""
        grad_logits = self.grad_logits[chunk.in_group]
        return (grad_logits if self.logits is None else self.logits[: len(grad_logits)]), grad_logits

    def _tile(self, logits: Tensor, rows: _Rows) -> tuple[Any, ...]:
        return logits, rows.target_R, 0, self.head.bias_V, rows.inv_temperature, self.head.softcap, self.head.scale


@torch.library.custom_op("rlft_fast::linear_logprob_loss", mutates_args=())
def _linear_logprob_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    per_token: list[Tensor], loss_fn: int, softcap: float, scale: float, backend: str, group: str, workspace_mib: int,
    return_entropy: bool, needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss (), logprob (T,), entropy (T,) or empty, dhidden, dweight, dbias for an upstream gradient of 1)."""
    hidden = hidden.detach()
    head = _Head(weight.detach(), _float_bias(bias), softcap, scale, backend, group)
    grads = _Gradients.allocate(hidden, weight, bias, needs_grad)
    algorithm = _ThreadTiles if backend == "native" and hidden.device.type == "cpu" else _LargeGemms
    work = algorithm(head, grads, hidden, active_index.shape[0], workspace_mib)
    logprob, entropy, *_ = _per_token_results(hidden, return_entropy, False, False)
    loss = hidden.new_zeros((), dtype=torch.float32)
    for chunks in work.groups:
        for chunk in chunks:
            index = active_index[chunk.rows]
            rows = _Rows.gather(hidden, target, inv_temperature, index)
            sums = _Sums.of_nothing(rows, return_entropy)
            work.stats(chunk, rows, sums)
            stats = sums.finish(head)
            loss_R, d_logprob, d_entropy = _differentiate(
                loss_functions[loss_fn], stats, [values[index] for values in per_token]
            )
            loss += loss_R.sum()
            logprob[index] = stats.logprob
            if stats.entropy is not None:
                entropy[index] = stats.entropy
            if any(needs_grad):
                work.grad(
                    chunk, rows, index, stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy
                )  # fmt: skip
        if any(needs_grad):
            index = active_index[chunks[0].rows.start : chunks[-1].rows.stop]
            work.finish(chunks, _operand(hidden[index]), index)
    grads.round_from(*work.sums, empty=not work.groups)
    return loss, logprob, entropy, grads.hidden, grads.weight, grads.bias


def _differentiate(
    loss_fn: LossFunction, stats: _Stats, per_token: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-row losses and their derivatives in logprob and entropy."""
    # An op's kernel runs below autograd, which is switched off for this thread; the loss needs it back.
    functionality = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(functionality, False), torch.enable_grad():
        logprob = stats.logprob.detach().requires_grad_()
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
        loss_R = loss_fn(logprob, entropy, *per_token)
        if loss_R.shape != logprob.shape:
            raise ValueError(
                f"loss_fn must return one loss per token, {tuple(logprob.shape)}; got {tuple(loss_R.shape)}: "
                "do not reduce inside it"
            )
        variables = [logprob] if entropy is None else [logprob, entropy]
        if not loss_R.requires_grad:
            return loss_R, torch.zeros_like(stats.logprob), None
        grads = torch.autograd.grad(loss_R.sum(), variables, allow_unused=True)
    d_logprob = torch.zeros_like(stats.logprob) if grads[0] is None else grads[0].contiguous()
    d_entropy = grads[1].contiguous() if entropy is not None and grads[1] is not None else None
    return loss_R.detach(), d_logprob, d_entropy


@_linear_logprob_loss.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, per_token, loss_fn, softcap, scale, backend, group,
      workspace_mib, return_entropy, needs_grad):  # fmt: skip
    scalar = hidden.new_empty((), dtype=torch.float32)
    logprob, entropy, *_ = _per_token_results(hidden, return_entropy, False, False)
    return scalar, logprob, entropy, *_empty_gradients(hidden, weight, bias, needs_grad)


def _save_gradients(ctx, inputs, output) -> None:
    *_, d_hidden, d_weight, d_bias = output
    ctx.needs, ctx.num_per_token = inputs[-1], len(inputs[6])
    ctx.save_for_backward(d_hidden, d_weight, d_bias)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or backward is handed zeros of dweight's size for the outputs without gradient


def _scale_gradients(ctx, grad_loss, *_):
    # In place: a second dweight would be the largest tensor of the step. A second backward through the same graph
    # therefore raises autograd's "modified by an inplace operation".
    grads = tuple(grad.mul_(grad_loss.to(grad.dtype)) for grad in ctx.saved_tensors)
    d_hidden, d_weight, _, _, d_bias = _scatter_gradients(grads, ctx.needs, num_inputs=5)
    return (d_hidden, d_weight, None, None, d_bias, None, [None] * ctx.num_per_token, *[None] * 8)


_linear_logprob_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)
