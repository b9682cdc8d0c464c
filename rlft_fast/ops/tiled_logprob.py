"""The algorithms behind `linear_logprob`: GEMMs over tiles of the logits, and what happens between them.

The (T, V) logits are by far the largest tensor of a policy update. Here they exist one tile at a time: the GEMMs are
the vendor's, and one kernel per tile does everything between them (``csrc/cpu/logprob.cpp`` holds the equations).
Callers have checked every argument.

    no grad              1 GEMM    logits tile -> online softmax statistics
    with backward        4 GEMMs   backward recomputes the logits per vocabulary tile from the saved normaliser, so
                                   every row of dW is reduced over all tokens at once and written once
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
_ROW_MULTIPLE = 16

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
    group: str = ""  # name of the process group whose ranks hold the other rows; "": there are none

    def tiles(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Vocabulary slices with their weight rows and bias, in the dtype that the GEMMs multiply in."""
        bias = None if self.bias_V is None else self.bias_V.to(torch.float32)
        for start in range(0, self.weight_VD.shape[0], columns):
            tile = slice(start, min(start + columns, self.weight_VD.shape[0]))
            yield tile, _operand(self.weight_VD[tile]), None if bias is None else bias[tile]


def _operand(x: Tensor) -> Tensor:
    """What the GEMM multiplies: CPUs have no fast half-precision GEMM, so tiles are widened there as needed."""
    return x.to(torch.float32) if x.device.type == "cpu" else x


def _multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out (+)= a @ b`` in float32, whatever dtype the operands have."""
    if a.dtype != torch.float32:
        product = torch.mm(a, b, out_dtype=torch.float32)
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def _multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a @ b``, multiplied in float32 and rounded once to the dtype of ``out``."""
    wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _multiply(a, b, out=wide)
    if wide is not out:
        out.copy_(wide)


def _row_chunks(num_rows: int, columns: int, workspace_mib: int) -> Iterator[slice]:
    """Rows of which ``columns`` logits fit the workspace, evenly divided and rounded for the GEMM's register tiles."""
    limit = max(workspace_mib * 2**20 // (4 * columns), 1)
    if limit > _ROW_MULTIPLE:
        limit -= limit % _ROW_MULTIPLE
    num_chunks = -(-num_rows // limit)
    even = -(-num_rows // max(num_chunks, 1))
    step = max(min(limit, -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE), 1)
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
    maximum: Tensor
    log_sum: Tensor


class _Sums(NamedTuple):
    """Per row, over the vocabulary seen so far; ``shift`` is None where no entropy is asked for."""

    maximum: Tensor
    sum_exp: Tensor  # of exp(x - maximum)
    shift: Tensor | None  # sum of exp(x - maximum) (x - maximum)
    target_logit: Tensor

    @staticmethod
    def of_nothing(rows: _Rows, return_entropy: bool) -> _Sums:
        maximum, sum_exp, target_logit = rows.hidden_RD.new_zeros(3, rows.target_R.shape[0], dtype=torch.float32)
        return _Sums(
            maximum.fill_(-torch.inf), sum_exp, torch.zeros_like(sum_exp) if return_entropy else None, target_logit
        )

    def finish(self, head: _Head) -> _Stats:
        maximum, sum_exp, shift, target_logit = _merge_shards(head.group, self) if head.group else self
        log_sum = sum_exp.log()
        logprob = (target_logit - maximum) - log_sum
        return _Stats(logprob, None if shift is None else log_sum - shift / sum_exp, maximum, log_sum)


def _forward_chunk(head: _Head, rows: _Rows, return_entropy: bool) -> _Stats:
    """Statistics of one chunk, tile by tile in the same memory."""
    sums = _Sums.of_nothing(rows, return_entropy)
    scratch = rows.hidden_RD.new_empty(rows.hidden_RD.shape[0], _TILE_COLUMNS, dtype=torch.float32)
    for tile, weight, bias in head.tiles(_TILE_COLUMNS):
        z = scratch[:, : weight.shape[0]]
        _multiply(rows.hidden_RD, weight.T, out=z)
        torch.ops.rlft_fast.logprob_stats_(
            z, rows.target_R, tile.start, bias, rows.inv_temperature, head.softcap, head.scale, *sums
        )
    return sums.finish(head)


def _merge_shards(group: str, own: _Sums) -> _Sums:
    """Over all vocabulary shards. Only the shard of the target knows its logit, the others hold 0."""
    top = own.maximum.clone()
    _all_reduce(top, group, dist.ReduceOp.MAX)
    down = (own.maximum - top).nan_to_num(nan=0.0, neginf=-torch.finfo(torch.float32).max)  # 0 * -inf would be NaN
    factor = down.exp()
    sums = [own.sum_exp * factor, own.target_logit]
    if own.shift is not None:
        sums.append((own.shift + down * own.sum_exp) * factor)
    total = torch.stack(sums)
    _all_reduce(total, group)
    return _Sums(top, total[0], None if own.shift is None else total[2], total[1])


def _all_reduce(tensor: Tensor, group: str, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    # An op's schema carries strings: the name stands for the group, as in torch's own functional collectives.
    dist.all_reduce(tensor, operation, group=cast(Any, dist.distributed_c10d)._resolve_process_group(group))


def rebase_targets(target: Tensor, vocab: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Targets counted from this rank's first vocabulary id, and the size of the whole vocabulary; one collective."""
    own = torch.tensor([vocab], device=target.device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    ends = torch.cat(sizes).cumsum(0)
    return target - (ends[group.rank()] - vocab), ends[-1]


# ---- forward only, and forward + recomputing backward ---------------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, group: str, workspace_mib: int, return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(logprob (T,), entropy (T,) or empty, (maximum, log_sum) (2, A) of the active rows)."""
    head = _Head(weight, bias, softcap, scale, group)
    logprob, entropy = _per_token_results(hidden, return_entropy)
    normalizer = hidden.new_empty(2, *active_index.shape, dtype=torch.float32)
    for chunk in _row_chunks(active_index.shape[0], _TILE_COLUMNS, workspace_mib):
        index = active_index[chunk]
        rows = _Rows.gather(hidden, target, inv_temperature, index)
        stats = _forward_chunk(head, rows, return_entropy)
        logprob[index] = stats.logprob
        normalizer[:, chunk] = torch.stack([stats.maximum, stats.log_sum])
        if stats.entropy is not None:
            entropy[index] = stats.entropy
    return logprob, entropy, normalizer


def _in_huge_pages(fresh: Tensor) -> Tensor:
    """The tensor itself, before it is first written: on the CPU page faults would cost more than writing it does."""
    if fresh.device.type == "cpu":
        torch.ops.rlft_fast.use_huge_pages_(fresh)
    return fresh


def _per_token_results(hidden: Tensor, return_entropy: bool) -> tuple[Tensor, Tensor]:
    """(logprob (T,), entropy (T,) or empty): zeros, which is what ignored rows keep."""
    num_tokens = hidden.shape[0]
    logprob = hidden.new_zeros(num_tokens, dtype=torch.float32)
    return logprob, hidden.new_zeros(num_tokens if return_entropy else 0, dtype=torch.float32)


@_linear_logprob.register_fake
def _(
    hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, group, workspace_mib, return_entropy
):
    return *_per_token_results(hidden, return_entropy), hidden.new_empty(2, *active_index.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, group: str, workspace_mib: int,
    normalizer: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None, needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight, dbias), each empty if not needed: three GEMMs, vocabulary tile by vocabulary tile."""
    head = _Head(weight, bias, softcap, scale, group)
    grads = _Gradients.allocate(hidden, weight, bias, needs_grad)
    upstream = grad_logprob[active_index]
    upstream_entropy = None if grad_entropy is None else grad_entropy[active_index]
    if not hidden.is_cuda:  # rows that the loss does not see (clipped, zero advantage) cost nothing
        seen = (upstream != 0) if upstream_entropy is None else (upstream != 0) | (upstream_entropy != 0)
        keep = seen.nonzero().squeeze(-1)
        active_index, normalizer, upstream = active_index[keep], normalizer[:, keep], upstream[keep]
        upstream_entropy = None if upstream_entropy is None else upstream_entropy[keep]
    rows = _Rows.gather(hidden, target, inv_temperature, active_index)
    row_entropy = None if grad_entropy is None else entropy[active_index]
    maximum, log_sum = normalizer.contiguous()
    num_rows = active_index.shape[0]
    columns = max(min(workspace_mib * 2**20 // (4 * max(num_rows, 1)), _TILE_COLUMNS), 1)
    scratch = hidden.new_empty(num_rows, columns, dtype=torch.float32)
    grad_rows = hidden.new_zeros(num_rows, hidden.shape[1], dtype=torch.float32) if needs_grad[0] else None
    for tile, weight_tile, bias_tile in head.tiles(columns):
        z = scratch[:, : weight_tile.shape[0]]
        _multiply(rows.hidden_RD, weight_tile.T, out=z)
        torch.ops.rlft_fast.logprob_grad_(
            z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, softcap, scale,
            maximum, log_sum, row_entropy, upstream, upstream_entropy,
        )  # fmt: skip
        operand = z.to(weight_tile.dtype)
        if grad_rows is not None:
            _multiply(operand, weight_tile, out=grad_rows, accumulate=True)
        if needs_grad[1]:
            _multiply_into(grads.weight[tile], operand.T, rows.hidden_RD)
        if needs_grad[2]:
            grads.bias[tile] = z.sum(0)
    if grad_rows is not None:
        grads.set_hidden(active_index, grad_rows, head)
    return grads.hidden, grads.weight, grads.bias


@_linear_logprob_backward.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, group, workspace_mib, normalizer,
      entropy, grad_logprob, grad_entropy, needs_grad):  # fmt: skip
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

    def set_hidden(self, index: Tensor, grad_rows: Tensor, head: _Head) -> None:
        """Stores complete rows of dhidden; where the vocabulary is sharded, every rank holds a part of their sum."""
        if head.group:
            _all_reduce(grad_rows, head.group)
        self.hidden[index] = grad_rows.to(self.hidden.dtype)


def _save_for_recompute(ctx, inputs, output) -> None:
    hidden, weight, target, active_index, bias, inv_temperature, *ctx.options, ctx.return_entropy = inputs
    _, entropy, normalizer = output
    ctx.save_for_backward(hidden, weight, target, active_index, bias, inv_temperature, normalizer, entropy)
    ctx.mark_non_differentiable(normalizer)


def _recompute_backward(ctx, grad_logprob, grad_entropy, _grad_normalizer):
    hidden, weight, target, active_index, bias, inv_temperature, normalizer, entropy = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]]
    grads = torch.ops.rlft_fast.linear_logprob_backward(
        hidden, weight, target, active_index, bias, inv_temperature, *ctx.options,
        normalizer, entropy, grad_logprob.contiguous(),
        grad_entropy.contiguous() if ctx.return_entropy else None, needs,
    )  # fmt: skip
    return _scatter_gradients(grads, needs, num_inputs=11)


def _scatter_gradients(grads, needs, num_inputs: int) -> tuple[Tensor | None, ...]:
    """Gradients at the positions of (hidden, weight, ., ., bias) among ``num_inputs`` op inputs."""
    d_hidden, d_weight, d_bias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (d_hidden, d_weight, None, None, d_bias, *[None] * (num_inputs - 5))


_linear_logprob.register_autograd(_recompute_backward, setup_context=_save_for_recompute)


# ---- frozen weight: forward keeps U = d logprob / d hidden ----------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob_frozen", mutates_args=())
def _linear_logprob_frozen(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    softcap: float, scale: float, workspace_mib: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(logprob (T,), U (T, D) with U_t = d logprob_t / d hidden_t).

    U = (onehot - P) W without P: as in flash attention (Dao et al. 2022), unnormalised sums follow the running maximum.
    """
    head = _Head(weight, bias, softcap, scale)
    logprob = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    jacobian = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    for chunk in _row_chunks(active_index.shape[0], _TILE_COLUMNS, workspace_mib):
        index = active_index[chunk]
        rows = _Rows.gather(hidden, target, inv_temperature, index)
        num_rows = index.shape[0]
        sums = _Sums.of_nothing(rows, return_entropy=False)
        sum_others, slope = hidden.new_zeros(2, num_rows, dtype=torch.float32)
        others_RD = torch.zeros_like(rows.hidden_RD, dtype=torch.float32)
        scratch = hidden.new_empty(num_rows, _TILE_COLUMNS, dtype=torch.float32)
        for tile, weight_tile, bias_tile in head.tiles(_TILE_COLUMNS):
            z = scratch[:, : weight_tile.shape[0]]
            _multiply(rows.hidden_RD, weight_tile.T, out=z)
            torch.ops.rlft_fast.logprob_frozen_(
                z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, softcap, scale,
                sums.maximum, sums.sum_exp, sums.target_logit, sum_others, slope, others_RD,
            )  # fmt: skip
            _multiply(z.to(weight_tile.dtype), weight_tile, out=others_RD, accumulate=True)
        logprob[index] = sums.finish(head).logprob
        target_RD = weight[rows.target_R].to(torch.float32)
        grad_rows = target_RD.mul_((slope * sum_others).unsqueeze(1)).sub_(others_RD).div_(sums.sum_exp.unsqueeze(1))
        jacobian[index] = grad_rows.to(hidden.dtype)
    return logprob, jacobian


@_linear_logprob_frozen.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, softcap, scale, workspace_mib):
    jacobian = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), jacobian


def _save_jacobian(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _frozen_backward(ctx, grad_logprob, _grad_jacobian):
    (jacobian,) = ctx.saved_tensors
    return (jacobian * grad_logprob.unsqueeze(-1).to(jacobian.dtype), *[None] * 8)


_linear_logprob_frozen.register_autograd(_frozen_backward, setup_context=_save_jacobian)


# ---- a known per-token loss: gradients finished in the forward ------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob_loss", mutates_args=())
def _linear_logprob_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    per_token: list[Tensor], loss_fn: int, softcap: float, scale: float, group: str, workspace_mib: int,
    return_entropy: bool, needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss (), logprob (T,), entropy (T,) or empty, dhidden, dweight, dbias for an upstream gradient of 1)."""
    bias_float = None if bias is None else bias.detach().to(torch.float32)
    head = _Head(weight.detach(), bias_float, softcap, scale, group)
    grads = _Gradients.allocate(hidden, weight, bias, needs_grad)
    chunks = list(_row_chunks(active_index.shape[0], weight.shape[0], workspace_mib))
    if not chunks:
        grads.weight.zero_(), grads.bias.zero_()
    wide_weight, wide_bias = (_float_like(x) if x.numel() else None for x in (grads.weight, grads.bias))
    logprob, entropy = _per_token_results(hidden, return_entropy)
    loss = hidden.new_zeros((), dtype=torch.float32)
    most_rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    logits = _in_huge_pages(hidden.new_empty(most_rows * weight.shape[0], dtype=torch.float32))
    for chunk in chunks:
        index = active_index[chunk]
        rows = _Rows.gather(hidden.detach(), target, inv_temperature, index)
        problem = (
            rows.hidden_RD, head.weight_VD, logits, _THREAD_TILE_COLUMNS, rows.target_R,
            head.bias_V, rows.inv_temperature, softcap, scale,
        )  # fmt: skip
        sums = _Sums.of_nothing(rows, return_entropy)
        torch.ops.rlft_fast.logprob_chunk_stats_(*problem, *sums)
        stats = sums.finish(head)
        loss_R, d_logprob, d_entropy = _differentiate(
            loss_functions[loss_fn], stats, [values[index] for values in per_token]
        )
        loss += loss_R.sum()
        logprob[index] = stats.logprob
        if stats.entropy is not None:
            entropy[index] = stats.entropy
        if any(needs_grad):
            grad_rows = torch.empty_like(rows.hidden_RD) if needs_grad[0] else None
            torch.ops.rlft_fast.logprob_chunk_grad_(
                *problem, stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy,
                grad_rows, wide_weight, wide_bias, chunk.start > 0,
            )  # fmt: skip
            if grad_rows is not None:
                grads.set_hidden(index, grad_rows, head)
    for narrow, wide in ((grads.weight, wide_weight), (grads.bias, wide_bias)):
        if wide is not None and wide is not narrow:
            narrow.copy_(wide)
    return loss, logprob, entropy, grads.hidden, grads.weight, grads.bias


def _float_like(x: Tensor) -> Tensor:
    """The tensor itself, or fresh float32 memory of its shape to accumulate in."""
    return x if x.dtype == torch.float32 else _in_huge_pages(torch.empty_like(x, dtype=torch.float32))


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
def _(hidden, weight, target, active_index, bias, inv_temperature, per_token, loss_fn, softcap, scale, group,
      workspace_mib, return_entropy, needs_grad):  # fmt: skip
    scalar = hidden.new_empty((), dtype=torch.float32)
    return scalar, *_per_token_results(hidden, return_entropy), *_empty_gradients(hidden, weight, bias, needs_grad)


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
    return (d_hidden, d_weight, None, None, d_bias, None, [None] * ctx.num_per_token, *[None] * 7)


_linear_logprob_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)
