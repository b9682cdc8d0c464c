"""`linear_logprob` by GEMMs over tiles of the logits; backward recomputes the logits.

The (T, V) logits are by far the largest tensor of a policy update. Here they exist one tile at a time. The vendor's
GEMMs make a tile, and one kernel does everything between two GEMMs (``csrc/cpu/logprob_rows.cpp`` holds the equations).

    no grad              1 GEMM    logits tile -> online softmax statistics
    with backward        4 GEMMs   Backward recomputes the logits per vocabulary tile from the saved normaliser. Every
                                   row of dW is then reduced over all tokens at once and written once. On a CPU rows
                                   without upstream gradient are left out. Triton's GEMMs of logits end in the
                                   statistics or the gradients: no logit leaves the registers.
    the same, few tokens  3 GEMMs  Where all logits fit the workspace they stay there until backward.
    frozen weight        2 GEMMs   (frozen.py) U = (onehot - P) W is built while the logits are there; backward scales
                                   its rows. This path gives log-probabilities only, of an unsharded vocabulary.
                                   Otherwise the path with 4 GEMMs runs without dW's GEMM, or with E of its D columns
                                   where an adapter of E is trained.
    linear_logprob_loss  3 GEMMs   (loss.py) The loss is known per token, so logits become dlogits in place in the
                                   forward; 2 where the weight is frozen.

All four forward passes add the same blocks of columns in the same order. Log-probabilities of the same rows in one call
are therefore equal bit for bit where the vendor's GEMM gives a row the same bits in chunks and tiles of any size: a
policy ratio between a no-grad pass and the first gradient pass is then exactly 1. GEMMs of CPUs do so from 16 rows and
two columns on. Below that the vendor runs another kernel; in a third of our calls a logit differed by one rounding.
MKL's AVX2 kernels do so only in tiles of a multiple of 24 columns, and in each thread's share of the columns: in tiles
of 496 and 1984 columns one row in a hundred differs by one rounding.
GEMMs of GPUs may split their sums by the width of a tile.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile, N tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.statistics import (
    THRESHOLD_BYTES_PER_LOGIT,
    Rows,
    Stats,
    Sums,
    keep_above_,
    per_token_results,
)
from rlft_fast.ops.logprob.tiles import (
    Tile,
    in_huge_pages,
    multiply,
    operand,
    padded_columns,
    rounded_columns,
    row_chunks,
    tile_shape,
)
from rlft_fast.ops.logprob.ways import Gradients, Way, empty_gradients, operator, seen_rows, wanted


class Asked(NamedTuple):
    """Which statistics a call returns besides the log-probabilities."""

    entropy: bool = False
    sum_prob_squared: bool = False
    top1: bool = False
    mean_logits: bool = False


def is_plain(problem: Problem, asked: Asked) -> bool:
    """Whether log-probabilities of the logits as they are suffice, at most divided by a temperature."""
    return problem.is_plain and not any(asked._replace(top1=False))


class Recompute(Way):
    """1 GEMM forward and 3 backward, or 2 backward where the logits are kept.

    Options: ``keep_logits``, whether logits that fit the workspace are kept for backward; and the fields of `Asked`.
    Results: what `LinearLogprob` holds, (T,) or empty; of the active rows (maximum, log_sum) (2, A); and the kept
    logits, (N, A, C) as the tiles that they come in, or empty.
    """

    name = "linear_logprob"
    options = (
        "bool keep_logits, bool return_entropy, bool return_sum_prob_squared, bool return_top1, bool return_mean_logits"
    )
    results = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"

    def forward(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        keep_logits, *asked_for = options
        hidden, asked = problem.hidden_TD, Asked(*asked_for)
        results = per_token_results(hidden, *asked)
        normalizer = hidden.new_empty(2, problem.num_active, dtype=torch.float32)
        kept = in_huge_pages(_kept_logits(problem, keep_logits))
        in_registers = _in_registers(problem, kept, asked)
        limit, columns = _forward_tile(problem)
        if kept.numel() or in_registers:
            limit = max(problem.num_active, 1)
        for chunk in row_chunks(problem.num_active, limit, problem.device_type):
            index = problem.active[chunk]
            rows = problem.rows(index)
            sums = Sums.of_nothing(rows, asked.entropy, asked.sum_prob_squared, asked.mean_logits)
            if in_registers:
                _add_without_logits(problem, rows, asked, sums)
            else:
                _add_tiles(problem, rows, columns, kept, sums)
            stats = sums.finish(problem.group, problem.vocab)
            normalizer[:, chunk] = torch.stack([stats.maximum, stats.log_sum])
            _store(stats, index, results)
        return *results, normalizer, kept

    def empty(self, problem: Problem, *options: Any) -> tuple[Tensor, ...]:
        keep_logits, *asked_for = options
        normalizer = problem.hidden_TD.new_empty(2, *problem.active.shape, dtype=torch.float32)
        return *per_token_results(problem.hidden_TD, *asked_for), normalizer, _kept_logits(problem, keep_logits)

    def save(self, ctx: Any, problem: Problem, options: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        _, entropy, *constants = results
        ctx.scalars = problem.scalars()
        ctx.in_registers = _in_registers(problem, constants[-1], Asked(*options[1:]))
        ctx.save_for_backward(*problem.tensors(), *constants[-2:], entropy)
        ctx.mark_non_differentiable(*constants)

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_logprob, grad_entropy = grads[:2]
        if grad_logprob is None and grad_entropy is None:
            return None, None, None
        *tensors, normalizer, kept, entropy = ctx.saved_tensors
        if grad_logprob is None:
            assert grad_entropy is not None
            grad_logprob = torch.zeros_like(grad_entropy)
        upstream = (grad_logprob, grad_entropy)
        return wanted(
            _backward_operator(
                *tensors, *ctx.scalars, normalizer, kept, entropy, *upstream, ctx.needs, ctx.in_registers
            ),
            ctx.needs,
        )


# ---- forward --------------------------------------------------------------------------------------------------------


def _forward_tile(problem: Problem) -> tuple[int, int]:
    """Most rows and columns of a tile of the forward pass."""
    beside = 0 if problem.threshold_T is None else THRESHOLD_BYTES_PER_LOGIT
    return tile_shape(problem.num_active, problem.hidden_TD, max(_workspace_mib(problem) * 4 // (4 + beside), 1))


def _in_registers(problem: Problem, kept: Tensor, asked: Asked) -> bool:
    """Whether the GEMM that computes a logit also computes what is made of it, so that no logit is stored.

    Forward and backward agree on it: errors of a GEMM's rounding cancel in p - 1 only if they are the same ones.
    """
    can = problem.backend == "triton" and not problem.casts_weight and problem.vocab > 0
    return can and is_plain(problem, asked) and not kept.numel()


def _workspace_mib(problem: Problem) -> int:
    assert problem.workspace_mib is not None
    return problem.workspace_mib


def _add_tiles(problem: Problem, rows: Rows, columns: int, kept: Tensor, sums: Sums) -> None:
    """Adds a chunk's logits tile by tile: in the memory of the kept logits, or one after the other in the same."""
    tiles = kept if kept.numel() else kept.new_empty(1, rows.hidden_RD.shape[0], columns)
    num_tiles, _, columns = tiles.shape
    for i, (tile, weight, bias) in enumerate(problem.tiles(columns)):
        z = tiles[i % num_tiles, :, : weight.shape[0]]
        problem.write_logits(rows.hidden_RD, weight, out=z)
        transform = (bias, rows.inv_temperature, problem.softcap, problem.scale)
        if rows.threshold is not None:
            transform, _ = keep_above_(z, rows, tile.start, transform)
        problem.kernels.logprob_stats_(z, rows.target_R, tile.start, *transform, *sums)


def _add_without_logits(problem: Problem, rows: Rows, asked: Asked, sums: Sums) -> None:
    # Shards are merged at their maximum.
    needs_maximum = asked.top1 or bool(problem.group) or problem.scale <= 0
    problem.kernels.fused_stats(
        rows.hidden_RD, operand(problem.weight_VD, problem.dtype), rows.target_R, rows.inv_temperature, problem.scale,
        needs_maximum, sums.maximum, sums.excess, sums.target_logit,
    )  # fmt: skip


def _store(stats: Stats, index: Tensor, results: tuple[Tensor, ...]) -> None:
    for result, values in zip(results, stats, strict=False):
        if values is not None and result.shape[0]:
            result[index] = values


def _kept_logits(problem: Problem, asked: bool) -> Tensor:
    """(N, A, C) memory for all logits, empty unless asked for and all fit."""
    num_tiles, columns = _kept_tiles(problem, problem.vocab)
    shape = (num_tiles, problem.num_active, columns) if asked and logits_fit(problem, problem.vocab) else (0,)
    return problem.hidden_TD.new_empty(shape, dtype=torch.float32)


def logits_fit(problem: Problem, vocab: int) -> bool:
    """Whether all logits of a vocabulary fit the workspace, beside the tile that backward works in."""
    num_tiles, columns = _kept_tiles(problem, vocab)
    row_bytes = columns * (4 * num_tiles + Tile.bytes_per_logit(problem.operand_dtype))
    return problem.hidden_TD.shape[0] * row_bytes <= _workspace_mib(problem) * 2**20


def _kept_tiles(problem: Problem, vocab: int) -> tuple[int, int]:
    """How many tiles hold the logits of a vocabulary, and the columns of a tile."""
    hidden = problem.hidden_TD
    columns = min(tile_shape(hidden.shape[0], hidden, _workspace_mib(problem))[1], padded_columns(vocab))
    return -(-vocab // columns), columns


# ---- backward -------------------------------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """The rows that backward takes, their normalisers, and the gradients from above."""

    rows: Rows
    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    grad_logprob: Tensor
    grad_entropy: Tensor | None


def _backward(
    problem: Problem, normalizer: Tensor, kept: Tensor, entropy: Tensor, grad_logprob: Tensor,
    grad_entropy: Tensor | None, needs_grad: list[bool], in_registers: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dhidden, dweight, dbias), each empty if not needed, vocabulary tile by vocabulary tile.

    GEMMs: the logits unless they were kept, dhidden, and dweight or the E of its D columns that an adapter trains.
    """
    grads = Gradients.allocate(problem, needs_grad)
    active_index = problem.active
    upstream = grad_logprob[active_index]
    upstream_entropy = None if grad_entropy is None else grad_entropy[active_index]
    seen = seen_rows(upstream, upstream_entropy)
    # The vendor's GEMMs take their sizes from the host, which does not wait for a GPU to know the rows.
    taken = slice(None) if seen.is_cuda or seen.all() else seen.nonzero().squeeze(-1)
    active_index, normalizer, upstream = active_index[taken], normalizer[:, taken], upstream[taken]
    upstream_entropy = None if upstream_entropy is None else upstream_entropy[taken]
    rows = problem.rows(active_index)
    if seen.is_cuda:  # all rows multiply, and 0 * nan of an unseen row must not reach dweight
        rows.hidden_RD.masked_fill_(seen.logical_not().unsqueeze(1), 0)
    row_entropy = None if grad_entropy is None else entropy[active_index]
    maximum, log_sum = normalizer.contiguous()
    factors = _Factors(rows, maximum, log_sum, row_entropy, upstream, upstream_entropy)
    grad_rows = _add_gradients(problem, factors, _KeptRows(kept, taken), grads, in_registers)
    if grad_rows is not None:
        grads.set_hidden(active_index, grad_rows, problem.group)
    return grads


class _KeptRows(NamedTuple):
    """Logits that the forward pass kept, or none, and which of their rows backward takes."""

    logits: Tensor
    taken: Tensor | slice

    def tile(self, number: int, columns: int, memory: Tensor) -> Tensor:
        """A tile's logits where they are, or copied to the memory where only some rows are taken."""
        if isinstance(self.taken, slice):
            return self.logits[number, :, :columns]
        torch.index_select(self.logits[number], 0, self.taken, out=memory)
        return memory[:, :columns]


def _add_gradients(
    problem: Problem, factors: _Factors, kept: _KeptRows, grads: Gradients, in_registers: bool
) -> Tensor | None:
    """Fills dweight and dbias; returns dhidden of the rows, (R, D) float32, or None where it is not needed."""
    rows, has_kept = factors.rows, bool(kept.logits.numel())
    columns = kept.logits.shape[-1] if has_kept else _backward_columns(problem, rows, in_registers)
    memory = Tile(rows.hidden_RD, columns, has_logits=not in_registers)
    factor = problem.factor_of_trained(rows.hidden_RD)
    grad_rows = None
    if grads.hidden.numel():
        grad_rows = torch.zeros_like(rows.hidden_RD, dtype=torch.float32)
    for i, (tile, weight, bias) in enumerate(problem.tiles(columns)):
        z, dz = memory.views(weight.shape[0])
        if in_registers:
            _gradients_without_logits(problem, factors, weight, tile.start, dz)
        else:
            if has_kept:
                z = kept.tile(i, weight.shape[0], memory.logits)
            else:
                problem.write_logits(rows.hidden_RD, weight, out=z)
            _to_gradients_(problem, factors, (z, dz), tile.start, bias)
        if grad_rows is not None:
            multiply(dz, weight, out=grad_rows, accumulate=True, rounded_to=problem.gradient_dtype)
        if grads.weight.numel():
            multiply(dz.T, factor, out=grads.weight[tile], rounded_to=problem.gradient_dtype)
        if grads.bias.numel():
            grads.bias[tile] = dz.sum(0, dtype=torch.float32)
    return grad_rows


def _backward_columns(problem: Problem, rows: Rows, in_registers: bool) -> int:
    """Columns of a tile of all rows."""
    beside = 0 if problem.threshold_T is None else THRESHOLD_BYTES_PER_LOGIT
    logit_bytes = Tile.bytes_per_logit(problem.operand_dtype, has_logits=not in_registers) + beside
    column_bytes = logit_bytes * max(rows.target_R.shape[0], 1)
    return rounded_columns(_workspace_mib(problem) * 2**20 // column_bytes, problem.hidden_TD)


def _to_gradients_(
    problem: Problem, factors: _Factors, tile: tuple[Tensor, Tensor], start: int, bias: Tensor | None
) -> None:
    """Writes the gradients of a tile's raw logits; ``tile`` is the logits, which may be lost, and the gradients."""
    z, dz = tile
    rows, *others = factors
    transform, out, slope = (bias, rows.inv_temperature, problem.softcap, problem.scale), dz, None
    if rows.threshold is not None:
        transform, slope = keep_above_(z, rows, start, transform)
        out = z  # in float32 until the slope is in it: one rounding, not two
    problem.kernels.logprob_grad_(z, rows.target_R, start, *transform, *others, out)
    if slope is not None:
        torch.mul(out, slope, out=dz)


def _gradients_without_logits(problem: Problem, factors: _Factors, weight: Tensor, start: int, out: Tensor) -> None:
    """Writes the gradients of a tile's raw logits; ``weight`` is its rows of the projection."""
    rows = factors.rows
    problem.kernels.fused_grad(
        rows.hidden_RD, weight, rows.target_R, start, rows.inv_temperature, problem.scale, factors.maximum,
        factors.log_sum, None, factors.grad_logprob, None, out,
    )  # fmt: skip


def _empty_backward(problem: Problem, *options: Any) -> tuple[Tensor, ...]:
    return empty_gradients(problem, options[-2])


_backward_operator = operator(
    "linear_logprob_backward",
    "Tensor normalizer, Tensor kept, Tensor entropy, Tensor grad_logprob, Tensor? grad_entropy, bool[] needs_grad, "
    "bool in_registers",
    "Tensor, Tensor, Tensor",
    _backward,
    _empty_backward,
)
RECOMPUTE = Recompute()
