"""`linear_logprob_loss`: the loss is known per token, so gradients are finished in the forward, in three GEMMs.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops import library
from rlft_fast.ops.logprob.checks import check_losses, check_row_fits, check_shards
from rlft_fast.ops.logprob.gathered import IdLogits
from rlft_fast.ops.logprob.odds import (
    Odds,
    has_odds,
    odds_limit,
    odds_memory,
    times_weight,
    write_entropy_gradients,
    write_odds,
)
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.reference import LossFunction
from rlft_fast.ops.logprob.statistics import Rows, Stats, Sums, per_token_results
from rlft_fast.ops.logprob.tiles import (
    float_bias,
    in_huge_pages,
    multiply,
    operand,
    padded_columns,
    rounded_columns,
    rounded_rows,
    row_chunks,
    thread_tile_columns,
)
from rlft_fast.ops.logprob.ways import Gradients, Way, empty_gradients, seen_rows, wanted
from rlft_fast.ops.logprob.workspace import default_workspace_mib, group_limits
from rlft_fast.ops.precision import rounds_in_kernel, sums_in_float32

loss_functions: dict[int, LossFunction] = {}  # an operator's schema carries no callable: a handle stands for it
_handles = count()


def hold(loss_fn: LossFunction) -> int:
    """A new handle, valid until `release`. A compiled graph's handle is never released: the graph lives as long."""
    if torch.compiler.is_compiling():
        if isinstance(loss_fn, (partial, MethodType)):
            raise ValueError(
                "torch.compile takes a function or a callable object as loss_fn, not a functools.partial or a bound "
                "method, which are new objects each time: hand numbers that change as per_token tensors"
            )
        _label(loss_fn)
        if not hasattr(loss_fn, "rlft_fast_handle"):
            raise ValueError(
                "torch.compile takes a loss_fn that is made outside of the compiled code: define the function before, "
                "and hand numbers that change as per_token tensors"
            )
        if not isinstance(loss_fn, FunctionType):
            id(loss_fn)  # Dynamo guards on it: a copy of an object has the attribute of the object
        # Dynamo guards on the attribute: another function, or the same code with another closure, compiles again.
        return loss_fn.rlft_fast_handle  # type: ignore[attr-defined]
    handle = next(_handles)
    loss_functions[handle] = loss_fn
    return handle


def release(handle: int) -> None:
    if not torch.compiler.is_compiling():
        del loss_functions[handle]


@torch.compiler.assume_constant_result
def _label(loss_fn: LossFunction) -> None:
    # A copy has the label of the original, and so has a function that functools.wraps has made like another one.
    if loss_functions.get(getattr(loss_fn, "rlft_fast_handle", -1)) is not loss_fn:
        loss_fn.rlft_fast_handle = next(_handles)  # type: ignore[attr-defined]
        loss_functions[loss_fn.rlft_fast_handle] = loss_fn  # type: ignore[attr-defined]


# ---- three ways to cut the work ------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Active rows whose logits are in memory at once: their place among all rows, and within their group."""

    rows: slice
    in_group: slice


class _Upstream(NamedTuple):
    """Derivatives of the loss of each row in its log-probability and entropy."""

    d_logprob: Tensor
    d_entropy: Tensor | None
    d_ids: Tensor | None = None
    """(R, K + 1) in the raw logits of ids and target, beside ``d_logprob``."""


class _ThreadTiles:
    """On the CPU: each thread takes whole tiles of a chunk, GEMMs and all. dlogits replace the logits."""

    def __init__(self, problem: Problem, grads: Gradients, widest: int, workspace_mib: int) -> None:
        self.problem, self.grads = problem, grads
        num_rows = problem.num_active
        limit = rounded_rows(workspace_mib * 2**20 // (4 * widest), "cpu")
        self.groups = [[_Chunk(rows, rows)] for rows in row_chunks(num_rows, limit, "cpu")]
        num_logits = min(limit, num_rows) * problem.vocab
        self.logits = in_huge_pages(problem.hidden_TD.new_empty(num_logits, dtype=torch.float32))
        self.sums = grads.accumulators(in_float=True)
        _, *adapter = problem.parts
        self.options: dict[str, Any] = {"weight_dtype": problem.dtype} if problem.casts_weight else {}
        self.options |= {"adapter": adapter[0]} if adapter else {}

    def stats(self, chunk: _Chunk, rows: Rows, return_entropy: bool) -> Stats:
        sums = Sums.of_nothing(rows, return_entropy)
        with sums_in_float32(rows.hidden_RD, self.problem.dtype):
            torch.ops.rlft_fast.logprob_chunk_stats_(
                *self._arguments(rows), sums.maximum, sums.excess, sums.shift, sums.target_logit, **self.options,
                rounds=rounds_in_kernel("cpu", self.problem.dtype),
            )  # fmt: skip
        return sums.finish(self.problem.group, self.problem.vocab)

    def grad(self, chunk: _Chunk, rows: Rows, index: Tensor, stats: Stats, upstream: _Upstream) -> None:
        d_logprob, d_entropy, d_ids = upstream
        grad_rows = torch.empty_like(rows.hidden_RD) if self.grads.hidden.numel() else None
        unseen = seen_rows(d_logprob, d_entropy).logical_not()
        if unseen.any():  # 0 * nan of a row that the loss does not see must not reach dweight
            rows = rows._replace(hidden_RD=rows.hidden_RD.masked_fill(unseen.unsqueeze(1), 0))
        # What the ids add later cancels most of a logit's gradient: the gradient must not be rounded before.
        rounded_to = self.problem.gradient_dtype if d_ids is None else None
        with sums_in_float32(rows.hidden_RD, rounded_to):
            torch.ops.rlft_fast.logprob_chunk_grad_(
                *self._arguments(rows), stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy,
                grad_rows, *self.sums, chunk.rows.start > 0, **self.options, rounds=rounds_in_kernel("cpu", rounded_to),
            )  # fmt: skip
        if grad_rows is not None:
            self.grads.set_hidden(index, grad_rows, self.problem.group)

    def finish(self, group: list[_Chunk], index: Tensor) -> None:
        """Every chunk has finished its gradients."""

    def _arguments(self, rows: Rows) -> tuple[Any, ...]:
        return (
            rows.hidden_RD, self.problem.weight_VD, self.logits, thread_tile_columns(len(rows.target_R)),
            rows.target_R, self.problem.bias_V, rows.inv_temperature, self.problem.softcap, self.problem.scale,
        )  # fmt: skip


class _LargeGemms:
    """On a GPU: the logits of a few rows at a time become dlogits; two large GEMMs take the dlogits of a whole group.

    A group of all rows needs no float32 accumulator of dweight, which is as large as the dlogits of 2 D rows.
    """

    def __init__(self, problem: Problem, grads: Gradients, widest: int, workspace_mib: int) -> None:
        self.problem, self.grads = problem, grads
        hidden, num_rows, device_type = problem.hidden_TD, problem.num_active, problem.device_type
        distance, dtype = padded_columns(problem.vocab), problem.operand_dtype
        limit, group_limit = group_limits(hidden.shape[1], widest, dtype, device_type, workspace_mib)
        self.groups = [
            [
                _Chunk(slice(group.start + rows.start, group.start + rows.stop), rows)
                for rows in row_chunks(group.stop - group.start, limit, device_type)
            ]
            for group in row_chunks(num_rows, group_limit, device_type)
        ]
        memory = hidden.new_empty(min(group_limit, num_rows), distance, dtype=dtype)
        self.grad_logits = memory[:, : problem.vocab]
        self.logits = None  # results replace them
        if dtype != torch.float32:
            memory = hidden.new_empty(min(limit, num_rows), distance, dtype=torch.float32)
            self.logits = memory[:, : problem.vocab]
        self.unseen = hidden.new_empty(min(group_limit, num_rows), dtype=torch.bool)
        self.sums = grads.accumulators(in_float=len(self.groups) > 1)

    def stats(self, chunk: _Chunk, rows: Rows, return_entropy: bool) -> Stats:
        sums = Sums.of_nothing(rows, return_entropy)
        logits, _ = self._memory(chunk)
        for tile, weight, _ in self._tiles():
            self.problem.write_logits(rows.hidden_RD, weight, out=logits[:, tile])
        self.problem.kernels.logprob_stats_(*self._tile(logits, rows), *sums)
        return sums.finish(self.problem.group, self.problem.vocab)

    def grad(self, chunk: _Chunk, rows: Rows, index: Tensor, stats: Stats, upstream: _Upstream) -> None:
        d_logprob, d_entropy, _ = upstream
        logits, grad_logits = self._memory(chunk)
        self.problem.kernels.logprob_grad_(
            *self._tile(logits, rows), stats.maximum, stats.log_sum, stats.entropy, d_logprob, d_entropy, grad_logits
        )
        torch.logical_not(seen_rows(d_logprob, d_entropy), out=self.unseen[chunk.in_group])

    def finish(self, group: list[_Chunk], index: Tensor) -> None:
        hidden_RD = operand(self.problem.hidden_TD[index], self.problem.dtype)
        hidden_RD.masked_fill_(self.unseen[: len(index)].unsqueeze(1), 0)  # 0 * nan, as in _ThreadTiles
        grad_logits = self.grad_logits[: group[-1].in_group.stop]
        if self.grads.hidden.numel():
            in_float = self.problem.group or self.problem.casts_weight  # shards and tiles are added in float32
            grad_rows = torch.empty_like(hidden_RD, dtype=torch.float32 if in_float else self.grads.hidden.dtype)
            for tile, weight, _ in self._tiles():
                multiply(grad_logits[:, tile], weight, out=grad_rows, accumulate=tile.start > 0)
            self.grads.set_hidden(index, grad_rows, self.problem.group)
        weight_sum, bias_sum = self.sums
        accumulate = group[0].rows.start > 0
        if weight_sum is not None:
            factor = self.problem.factor_of_trained(hidden_RD)
            multiply(grad_logits.T, factor, out=weight_sum, accumulate=accumulate)
        if bias_sum is not None:
            column_sums = grad_logits.sum(0, dtype=torch.float32)
            bias_sum.add_(column_sums) if accumulate else bias_sum.copy_(column_sums)

    def _memory(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """(logits, dlogits) of a chunk."""
        grad_logits = self.grad_logits[chunk.in_group]
        return (grad_logits if self.logits is None else self.logits[: len(grad_logits)]), grad_logits

    def _tiles(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The weight at once, or cut into tiles where it is rounded to another dtype."""
        columns = max(self.problem.vocab, 1)
        return self.problem.tiles(rounded_columns(columns, self.grad_logits) if self.problem.casts_weight else columns)

    def _tile(self, logits: Tensor, rows: Rows) -> tuple[Any, ...]:
        return (
            logits,
            rows.target_R,
            0,
            self.problem.bias_V,
            rows.inv_temperature,
            self.problem.softcap,
            self.problem.scale,
        )


class _FromOdds:
    """In Triton: the logits' GEMM writes dlogits but for a factor of each row (odds.py). No wider logit is stored.

    A group is one chunk: the loss is called for as many rows at once as the workspace holds dlogits of.
    """

    def __init__(self, problem: Problem, grads: Gradients, widest: int, workspace_mib: int) -> None:
        self.problem, self.grads = problem, grads
        self.weight = operand(problem.weight_VD, problem.dtype)
        limit = odds_limit(problem, workspace_mib)
        self.groups = [[_Chunk(rows, rows)] for rows in row_chunks(problem.num_active, limit, problem.device_type)]
        self.memory = odds_memory(problem, limit)
        self.sums = grads.accumulators(in_float=len(self.groups) > 1)

    def stats(self, chunk: _Chunk, rows: Rows, return_entropy: bool) -> Odds:
        memory = self.memory[: len(rows.target_R)]
        return write_odds(self.problem, rows, self.weight, return_entropy, memory)

    def grad(self, chunk: _Chunk, rows: Rows, index: Tensor, odds: Odds, upstream: _Upstream) -> None:
        d_logprob, d_entropy, _ = upstream
        factor = d_logprob * odds.factor
        if d_entropy is not None:
            write_entropy_gradients(self.problem, rows, self.weight, odds, d_logprob, d_entropy)
            factor.fill_(1)
        unseen = seen_rows(d_logprob, d_entropy).logical_not().unsqueeze(1)  # 0 * nan, as in _ThreadTiles
        if self.grads.hidden.numel():
            grad_rows = times_weight(odds.grad_RV, self.weight, factor).masked_fill_(unseen, 0)
            self.grads.set_hidden(index, grad_rows, self.problem.group)
            del grad_rows
        weight_sum, _ = self.sums
        if weight_sum is not None:
            trained = self.problem.factor_of_trained(rows.hidden_RD)
            trained = torch.mul(trained, factor.unsqueeze(1), out=torch.empty_like(trained)).masked_fill_(unseen, 0)
            multiply(odds.grad_RV.T, trained, out=weight_sum, accumulate=chunk.rows.start > 0)

    def finish(self, group: list[_Chunk], index: Tensor) -> None:
        """Every chunk has finished its gradients."""


# ---- the op ----------------------------------------------------------------------------------------------------------


class Loss(Way):
    """2 GEMMs, or 1 with a frozen weight, beside the one for the logits, all in the forward.

    In Triton, a loss that depends on the entropy takes another one for the logits (odds.py).

    The trained columns of an adapter beside a frozen weight take as many columns of the second GEMM.

    Options: ``per_token``, tensors for ``loss_fn``; ``loss_fn``, a handle of `hold`; ``shards``, the shapes that
    `rebase_targets` gathers, or None; ``ids``, (T, K) or None; ``return_entropy``; ``needs_grad`` of hidden, weight and
    bias.
    Results: loss (), logprob (T,), entropy (T,) or empty, log-probabilities of the ids (T, K) or empty, and dhidden,
    dweight, dbias for an upstream gradient of 1.
    """

    name = "linear_logprob_loss"
    options = "Tensor[] per_token, int loss_fn, Tensor? shards, Tensor? ids, bool return_entropy, bool[] needs_grad"
    results = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"

    def forward(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        per_token, loss_fn, shards, ids, return_entropy, needs_grad = options
        # What the ids add cancels most of the rest, so that both are added up in float32.
        given, grads = problem, Gradients.allocate(problem, needs_grad, in_float=ids is not None)
        problem = replace(
            problem, hidden_TD=problem.hidden_TD.detach(), weight_VD=problem.weight_VD.detach(),
            adapter_VE=None if problem.adapter_VE is None else problem.adapter_VE.detach(),
            bias_V=float_bias(problem.bias_V),
        )  # fmt: skip
        work = _divide(problem, grads, _widest(problem.weight_VD, shards))
        logprob, entropy, *_ = per_token_results(problem.hidden_TD, return_entropy)
        ids_logprob = _ids_logprob(problem, ids).zero_()
        loss = problem.hidden_TD.new_zeros((), dtype=torch.float32)
        for chunks in work.groups:
            of_ids: list[tuple[Tensor, IdLogits, Tensor]] = []
            for chunk in chunks:
                index = problem.active[chunk.rows]
                rows = problem.rows(index)
                stats: Any = work.stats(chunk, rows, return_entropy)  # of the type that its own `grad` takes
                values = [x[index] for x in per_token]
                found = None if ids is None else IdLogits.of(problem, rows, ids[index])
                loss_R, upstream = _differentiate(loss_functions[loss_fn], stats, found, values)
                loss += loss_R.sum()
                logprob[index] = stats.logprob
                if stats.entropy is not None:
                    entropy[index] = stats.entropy
                if found is not None:
                    ids_logprob[index] = found.logprob(found.raw, stats.logprob)
                    if upstream.d_ids is not None:
                        of_ids.append((index, found, upstream.d_ids))
                if any(needs_grad):
                    work.grad(chunk, rows, index, stats, upstream)
            if any(needs_grad):
                work.finish(chunks, problem.active[chunks[0].rows.start : chunks[-1].rows.stop])
                for index, found, d_ids in of_ids:  # the group has been written, so that these can be added
                    found.add_gradients(d_ids, index, grads)
        grads.round_from(*work.sums, empty=not work.groups)
        return loss, logprob, entropy, ids_logprob, *grads.rounded_as(given)

    def empty(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        *_, ids, return_entropy, needs_grad = options
        scalar = problem.hidden_TD.new_empty((), dtype=torch.float32)
        logprob, entropy, *_ = per_token_results(problem.hidden_TD, return_entropy)
        return scalar, logprob, entropy, _ids_logprob(problem, ids), *empty_gradients(problem, needs_grad)

    def save(self, ctx: Any, problem: Problem, options: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.computed = options[-1]
        ctx.save_for_backward(*results[4:])
        ctx.mark_non_differentiable(*results[1:])

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_loss = grads[0]
        if grad_loss is None:
            return None, None, None
        saved = ctx.saved_tensors
        # In place: a second dweight would be the largest tensor of the step. A second backward through the same graph
        # therefore raises autograd's "modified by an inplace operation", but not under hooks of saved tensors.
        scaled_before = getattr(ctx, "versions", None)
        if scaled_before is not None and any(x._version >= y for x, y in zip(saved, scaled_before, strict=True)):
            raise RuntimeError(
                "the gradients of linear_logprob_loss were scaled by an inplace operation in the first backward pass: "
                "compute the loss again for a second one"
            )
        scaled = tuple(_scaled_(grad, grad_loss) for grad in saved)
        if not torch.compiler.is_compiling():
            ctx.versions = [x._version for x in scaled]
        return wanted(scaled, ctx.computed)


def _scaled_(x: Tensor, factor: Tensor) -> Tensor:
    """The tensor itself, multiplied by a () float32; nothing is read where that is 1, which the host need not know."""
    factor = factor.detach()  # under create_graph, `Way` refuses the second derivative
    if x.is_cuda and not library.has_cuda_kernels:
        return x.mul_(factor.reshape(1))  # a () factor would be rounded to bfloat16 first
    torch.ops.rlft_fast.scale_(x, factor)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(x)
    return x


@torch.library.register_fake("rlft_fast::scale_")
def _(x, coefficient):
    return None


def _divide(problem: Problem, grads: Gradients, widest: int) -> _ThreadTiles | _LargeGemms | _FromOdds:
    """The work, cut for the device within the workspace."""
    workspace_mib = problem.workspace_mib
    if workspace_mib is None:
        num_rows, dim = problem.hidden_TD.shape
        workspace_mib = default_workspace_mib(num_rows, dim, widest, problem.dtype, problem.device_type)
    check_row_fits(widest, workspace_mib)
    if has_odds(problem):
        return _FromOdds(problem, grads, widest, workspace_mib)
    on_cpu = problem.backend == "native" and problem.device_type == "cpu"
    return (_ThreadTiles if on_cpu else _LargeGemms)(problem, grads, widest, workspace_mib)


def _widest(weight: Tensor, shards: Tensor | None) -> int:
    """V of the largest shard. It sets the chunks, so that all ranks reduce equally often.

    The host waits for it once. Chunks that do not depend on V would break the bound on the workspace. V cannot be
    cached: a rank whose shard did not change would keep a stale maximum.
    """
    if shards is None:
        return weight.shape[0]
    shapes = shards.tolist()
    check_shards(shapes)
    return max(vocab for vocab, *_ in shapes)


def _ids_logprob(problem: Problem, ids: Tensor | None) -> Tensor:
    """Memory for the log-probabilities of the ids."""
    return problem.hidden_TD.new_empty((0,) if ids is None else ids.shape, dtype=torch.float32)


def _differentiate(
    loss_fn: LossFunction, stats: Stats | Odds, ids: IdLogits | None, per_token: list[Tensor]
) -> tuple[Tensor, _Upstream]:
    """Per-row losses and their derivatives."""
    # An operator's kernel runs below autograd, which is switched off for this thread; the loss needs it back.
    functionality = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(functionality, False), torch.enable_grad():
        logprob = stats.logprob.detach().requires_grad_()
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
        raw = None if ids is None else ids.raw.detach().requires_grad_()
        of_ids = () if ids is None or raw is None else (ids.logprob(raw, logprob),)
        loss_R = loss_fn(logprob, entropy, *of_ids, *per_token)
        check_losses(loss_R, logprob)
        if not loss_R.requires_grad:
            return loss_R, _Upstream(torch.zeros_like(stats.logprob), None)
        variables = {"d_logprob": logprob, "d_entropy": entropy, "d_ids": raw}
        variables = {name: x for name, x in variables.items() if x is not None}
        grads = torch.autograd.grad(loss_R.sum(), [*variables.values()], allow_unused=True)
    found = {name: x.contiguous() for name, x in zip(variables, grads, strict=True) if x is not None}
    d_logprob = found.get("d_logprob", torch.zeros_like(stats.logprob))
    return loss_R.detach(), _Upstream(d_logprob, found.get("d_entropy"), found.get("d_ids"))


LOSS = Loss()
