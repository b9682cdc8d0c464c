"""`linear_logprob_loss`: the loss is known per token, so gradients are finished in the forward, in three GEMMs.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.checks import check_losses, check_row_fits, check_shards
from rlft_fast.ops.logprob.reference import LossFunction
from rlft_fast.ops.logprob.tiles import (
    Gradients,
    Head,
    Rows,
    Stats,
    Sums,
    empty_gradients,
    float_bias,
    in_huge_pages,
    multiply,
    operand,
    padded_columns,
    per_token_results,
    rounded_rows,
    row_chunks,
    scatter_gradients,
    seen_rows,
    thread_tile_columns,
)
from rlft_fast.ops.logprob.workspace import default_workspace_mib, group_limits
from rlft_fast.ops.precision import sums_in_float32

loss_functions: dict[int, LossFunction] = {}  # an op's schema cannot carry a callable: it travels as a handle
_handles = count()


def hold(loss_fn: LossFunction) -> int:
    """A handle of its own, until it is released. That of a compiled graph lives as long as the process, as it may."""
    if torch.compiler.is_compiling():
        if isinstance(loss_fn, (partial, MethodType)):
            raise ValueError(
                "torch.compile takes a function or a callable object as loss_fn, not a functools.partial or a bound "
                "method, which are new objects each time: hand numbers that change as per_token tensors"
            )
        _label(loss_fn)
        # Dynamo guards on what it reads here: another function, the same code with another closure, compiles again.
        return loss_fn.rlft_fast_handle  # type: ignore[attr-defined]
    handle = next(_handles)
    loss_functions[handle] = loss_fn
    return handle


def release(handle: int) -> None:
    if not torch.compiler.is_compiling():
        del loss_functions[handle]


@torch.compiler.assume_constant_result
def _label(loss_fn: LossFunction) -> None:
    if not hasattr(loss_fn, "rlft_fast_handle"):
        loss_fn.rlft_fast_handle = next(_handles)  # type: ignore[attr-defined]
        loss_functions[loss_fn.rlft_fast_handle] = loss_fn  # type: ignore[attr-defined]


# ---- two ways to cut the work --------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Active rows whose logits are in memory at once, and where they stand among those of their group."""

    rows: slice
    in_group: slice


class _ThreadTiles:
    """On the CPU: each thread takes whole tiles of a chunk, GEMMs and all. dlogits replace the logits."""

    def __init__(
        self, head: Head, grads: Gradients, hidden: Tensor, num_rows: int, workspace_mib: int, widest: int
    ) -> None:
        self.head, self.grads = head, grads
        limit = rounded_rows(workspace_mib * 2**20 // (4 * widest), "cpu")
        self.groups = [[_Chunk(rows, rows)] for rows in row_chunks(num_rows, limit, "cpu")]
        self.logits = in_huge_pages(hidden.new_empty(min(limit, num_rows) * head.vocab, dtype=torch.float32))
        self.sums = grads.accumulators(in_float=True)

    def stats(self, chunk: _Chunk, rows: Rows, sums: Sums) -> None:
        with sums_in_float32(rows.hidden_RD):
            torch.ops.rlft_fast.logprob_chunk_stats_(*self._problem(rows), *sums)

    def grad(
        self, chunk: _Chunk, rows: Rows, index: Tensor, stats: Stats, d_logprob: Tensor, d_entropy: Tensor | None
    ) -> None:
        grad_rows = torch.empty_like(rows.hidden_RD) if self.grads.hidden.numel() else None
        unseen = seen_rows(d_logprob, d_entropy).logical_not()
        if unseen.any():  # 0 * nan would put a bad row that the loss does not see into dweight
            rows = rows._replace(hidden_RD=rows.hidden_RD.masked_fill(unseen.unsqueeze(1), 0))
        with sums_in_float32(rows.hidden_RD):
            torch.ops.rlft_fast.logprob_chunk_grad_(
                *self._problem(rows), stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy,
                grad_rows, *self.sums, chunk.rows.start > 0,
            )  # fmt: skip
        if grad_rows is not None:
            self.grads.set_hidden(index, grad_rows, self.head)

    def finish(self, group: list[_Chunk], hidden: Tensor, index: Tensor) -> None:
        """Every chunk has finished its gradients."""

    def _problem(self, rows: Rows) -> tuple[Any, ...]:
        return (
            rows.hidden_RD, self.head.weight_VD, self.logits, thread_tile_columns(len(rows.target_R)),
            rows.target_R, self.head.bias_V, rows.inv_temperature, self.head.softcap, self.head.scale,
        )  # fmt: skip


class _LargeGemms:
    """On a GPU: logits of a few rows at a time become dlogits, and those of a whole group of chunks two large GEMMs.

    A group of all rows needs no float32 accumulator of dweight, which is as large as the dlogits of 2 D rows.
    """

    def __init__(
        self, head: Head, grads: Gradients, hidden: Tensor, num_rows: int, workspace_mib: int, widest: int
    ) -> None:
        self.head, self.grads = head, grads
        self.weight = operand(head.weight_VD)
        distance, device_type = padded_columns(head.vocab), hidden.device.type
        limit, group_limit = group_limits(widest, self.weight.dtype, device_type, workspace_mib)
        self.groups = [
            [
                _Chunk(slice(group.start + rows.start, group.start + rows.stop), rows)
                for rows in row_chunks(group.stop - group.start, limit, device_type)
            ]
            for group in row_chunks(num_rows, group_limit, device_type)
        ]
        memory = hidden.new_empty(min(group_limit, num_rows), distance, dtype=self.weight.dtype)
        self.grad_logits = memory[:, : head.vocab]
        self.logits = None  # results replace them
        if self.weight.dtype != torch.float32:
            memory = hidden.new_empty(min(limit, num_rows), distance, dtype=torch.float32)
            self.logits = memory[:, : head.vocab]
        self.unseen = hidden.new_empty(min(group_limit, num_rows), dtype=torch.bool)
        self.sums = grads.accumulators(in_float=len(self.groups) > 1)

    def stats(self, chunk: _Chunk, rows: Rows, sums: Sums) -> None:
        logits, _ = self._memory(chunk)
        multiply(rows.hidden_RD, self.weight.T, out=logits)
        self.head.kernels.logprob_stats_(*self._tile(logits, rows), *sums)

    def grad(
        self, chunk: _Chunk, rows: Rows, index: Tensor, stats: Stats, d_logprob: Tensor, d_entropy: Tensor | None
    ) -> None:
        logits, grad_logits = self._memory(chunk)
        self.head.kernels.logprob_grad_(
            *self._tile(logits, rows), stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy, grad_logits
        )
        torch.logical_not(seen_rows(d_logprob, d_entropy), out=self.unseen[chunk.in_group])

    def finish(self, group: list[_Chunk], hidden: Tensor, index: Tensor) -> None:
        hidden_RD = operand(hidden[index])
        hidden_RD.masked_fill_(self.unseen[: len(index)].unsqueeze(1), 0)  # 0 * nan, as in _ThreadTiles
        grad_logits = self.grad_logits[: group[-1].in_group.stop]
        if self.grads.hidden.numel():
            dtype = torch.float32 if self.head.group else self.grads.hidden.dtype  # shards are added in float32
            grad_rows = torch.empty_like(hidden_RD, dtype=dtype)
            multiply(grad_logits, self.weight, out=grad_rows)
            self.grads.set_hidden(index, grad_rows, self.head)
        weight_sum, bias_sum = self.sums
        accumulate = group[0].rows.start > 0
        if weight_sum is not None:
            multiply(grad_logits.T, hidden_RD, out=weight_sum, accumulate=accumulate)
        if bias_sum is not None:
            column_sums = grad_logits.sum(0, dtype=torch.float32)
            bias_sum.add_(column_sums) if accumulate else bias_sum.copy_(column_sums)

    def _memory(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """(logits, dlogits) of a chunk."""
        grad_logits = self.grad_logits[chunk.in_group]
        return (grad_logits if self.logits is None else self.logits[: len(grad_logits)]), grad_logits

    def _tile(self, logits: Tensor, rows: Rows) -> tuple[Any, ...]:
        return logits, rows.target_R, 0, self.head.bias_V, rows.inv_temperature, self.head.softcap, self.head.scale


# ---- the op ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlft_fast::linear_logprob_loss", mutates_args=())
def _linear_logprob_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, active_index: Tensor, bias: Tensor | None, inv_temperature: Tensor,
    per_token: list[Tensor], loss_fn: int, softcap: float, scale: float, backend: str, group: str,
    shards: Tensor | None, workspace_mib: int | None, return_entropy: bool, needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss (), logprob (T,), entropy (T,) or empty, dhidden, dweight, dbias for an upstream gradient of 1).

    ``shards`` is what :func:`rebase_targets` gathers.
    """
    hidden = hidden.detach()
    widest = _widest(weight, shards)
    if workspace_mib is None:
        num_rows, dim = hidden.shape
        workspace_mib = default_workspace_mib(num_rows, dim, widest, hidden.dtype, hidden.device.type)
    check_row_fits(widest, workspace_mib)
    head = Head(weight.detach(), float_bias(bias), softcap, scale, backend, group)
    grads = Gradients.allocate(hidden, weight, bias, needs_grad)
    algorithm = _ThreadTiles if backend == "native" and hidden.device.type == "cpu" else _LargeGemms
    work = algorithm(head, grads, hidden, active_index.shape[0], workspace_mib, widest)
    logprob, entropy, *_ = per_token_results(hidden, return_entropy, False, False)
    loss = hidden.new_zeros((), dtype=torch.float32)
    for chunks in work.groups:
        for chunk in chunks:
            index = active_index[chunk.rows]
            rows = Rows.gather(hidden, target, inv_temperature, index)
            sums = Sums.of_nothing(rows, return_entropy)
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
                work.grad(chunk, rows, index, stats, d_logprob, d_entropy)
        if any(needs_grad):
            index = active_index[chunks[0].rows.start : chunks[-1].rows.stop]
            work.finish(chunks, hidden, index)
    grads.round_from(*work.sums, empty=not work.groups)
    return loss, logprob, entropy, grads.hidden, grads.weight, grads.bias


def _widest(weight: Tensor, shards: Tensor | None) -> int:
    """V of the largest shard, which sets the chunks: with its own, each rank would reduce another number of times.

    The host needs it, and waits once: chunks that do not depend on V would break the bound on the workspace, and a
    number kept from an earlier call be stale on the ranks whose own V did not change.
    """
    if shards is None:
        return weight.shape[0]
    shapes = shards.tolist()
    check_shards(shapes)
    return max(vocab for vocab, *_ in shapes)


def _differentiate(
    loss_fn: LossFunction, stats: Stats, per_token: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-row losses and their derivatives in logprob and entropy."""
    # An op's kernel runs below autograd, which is switched off for this thread; the loss needs it back.
    functionality = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(functionality, False), torch.enable_grad():
        logprob = stats.logprob.detach().requires_grad_()
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
        loss_R = loss_fn(logprob, entropy, *per_token)
        check_losses(loss_R, logprob)
        variables = [logprob] if entropy is None else [logprob, entropy]
        if not loss_R.requires_grad:
            return loss_R, torch.zeros_like(stats.logprob), None
        grads = torch.autograd.grad(loss_R.sum(), variables, allow_unused=True)
    d_logprob = torch.zeros_like(stats.logprob) if grads[0] is None else grads[0].contiguous()
    d_entropy = grads[1].contiguous() if entropy is not None and grads[1] is not None else None
    return loss_R.detach(), d_logprob, d_entropy


@_linear_logprob_loss.register_fake
def _(hidden, weight, target, active_index, bias, inv_temperature, per_token, loss_fn, softcap, scale, backend, group,
      shards, workspace_mib, return_entropy, needs_grad):  # fmt: skip
    scalar = hidden.new_empty((), dtype=torch.float32)
    logprob, entropy, *_ = per_token_results(hidden, return_entropy, False, False)
    return scalar, logprob, entropy, *empty_gradients(hidden, weight, bias, needs_grad)


def _save_gradients(ctx, inputs, output) -> None:
    *_, d_hidden, d_weight, d_bias = output
    ctx.needs, ctx.num_per_token = inputs[-1], len(inputs[6])
    ctx.save_for_backward(d_hidden, d_weight, d_bias)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or backward is handed zeros of dweight's size for the outputs without gradient


def _scale_gradients(ctx, grad_loss, *_):
    if grad_loss is None:
        return (*[None] * 6, [None] * ctx.num_per_token, *[None] * 9)
    # A CPU multiplies by a () tensor in float32, a GPU rounds it to bfloat16 first but for one of dimension (1,), which
    # would cost a CPU float32 copies.
    scale = grad_loss.reshape(1) if grad_loss.is_cuda else grad_loss
    # In place: a second dweight would be the largest tensor of the step. A second backward through the same graph
    # therefore raises autograd's "modified by an inplace operation".
    grads = tuple(grad.mul_(scale) for grad in ctx.saved_tensors)
    d_hidden, d_weight, _, _, d_bias = scatter_gradients(grads, ctx.needs, num_inputs=5)
    return (d_hidden, d_weight, None, None, d_bias, None, [None] * ctx.num_per_token, *[None] * 9)


_linear_logprob_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)
