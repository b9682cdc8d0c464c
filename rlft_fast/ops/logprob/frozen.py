"""`linear_logprob` of a frozen weight in two GEMMs: forward keeps U = d logprob / d hidden.

Triton computes whole rows of logits at a time where they fit (odds.py), else tiles of them, as the compiled kernels do.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlft_fast.ops.logprob.odds import has_odds, odds_limit, odds_memory, times_weight, write_odds
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.statistics import Rows, Sums
from rlft_fast.ops.logprob.tiles import ROW_MULTIPLE, Tile, multiply, operand, row_chunks, tile_shape
from rlft_fast.ops.logprob.ways import Way


class Frozen(Way):
    """1 GEMM for the logits and 1 for U; backward scales the rows of U.

    U = (onehot - P) W without P: as in flash attention (Dao et al. 2022), unnormalised sums follow the running maximum.
    Results: logprob (T,), and U (T, D) with U_t = d logprob_t / d hidden_t.
    """

    name = "linear_logprob_frozen"
    options = ""
    results = "Tensor, Tensor"

    def forward(self, problem: Problem, *_: Any) -> tuple[Tensor, ...]:
        hidden, workspace_mib = problem.hidden_TD, problem.workspace_mib
        assert workspace_mib is not None
        logprob = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        jacobian = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if has_odds(problem) and _enough_rows(problem, limit := odds_limit(problem, workspace_mib)):
            compute = partial(
                _odds_chunk, problem, operand(problem.weight_VD, problem.dtype), odds_memory(problem, limit)
            )
        else:
            logits_mib = workspace_mib * 4 // Tile.bytes_per_logit(problem.operand_dtype)
            limit, columns = tile_shape(problem.num_active, hidden, logits_mib)
            compute = partial(_tiles_chunk, problem, columns)
        for chunk in row_chunks(problem.num_active, limit, problem.device_type):
            index = problem.active[chunk]
            logprob[index], grad_rows = compute(problem.rows(index))
            jacobian[index] = grad_rows.to(hidden.dtype)
        return logprob, jacobian

    def empty(self, problem: Problem, *_: Any) -> tuple[Tensor, ...]:
        hidden = problem.hidden_TD
        jacobian = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        return hidden.new_empty(hidden.shape[0], dtype=torch.float32), jacobian

    def save(self, ctx: Any, problem: Problem, options: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(results[1])
        ctx.mark_non_differentiable(results[1])

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if grads[0] is None:
            return None, None, None
        (jacobian,) = ctx.saved_tensors
        return torch.ops.rlft_fast.linear_logprob_frozen_backward(jacobian, grads[0]), None, None


def _enough_rows(problem: Problem, limit: int) -> bool:
    """Whether the rows fill a tile of a GEMM, or are all there are."""
    return limit >= min(ROW_MULTIPLE[problem.device_type], problem.num_active)


def _odds_chunk(problem: Problem, weight_VD: Tensor, memory_RV: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """As `_tiles_chunk`, from whole rows of odds in the memory."""
    odds = write_odds(problem, rows, weight_VD, False, memory_RV[: len(rows.target_R)])
    return odds.logprob, times_weight(odds.grad_RV, weight_VD, odds.factor)


def _tiles_chunk(problem: Problem, columns: int, rows: Rows) -> tuple[Tensor, Tensor]:
    """(logprob (R,), float32 U (R, D)) of a chunk of rows, whose tile is given back before the next one has its own."""
    sums = Sums.of_nothing(rows)
    sum_others, slope = rows.hidden_RD.new_zeros(2, len(rows.hidden_RD), dtype=torch.float32)
    others_RD = torch.zeros_like(rows.hidden_RD, dtype=torch.float32)
    memory = Tile(rows.hidden_RD, columns)
    for tile, weight_tile, bias_tile in problem.tiles(columns):
        z, exp_z = memory.views(weight_tile.shape[0])
        problem.write_logits(rows.hidden_RD, weight_tile, out=z)
        problem.kernels.logprob_frozen_(
            z, rows.target_R, tile.start, bias_tile, rows.inv_temperature, problem.softcap, problem.scale,
            sums.maximum, sums.excess, sums.target_logit, sum_others, slope, others_RD, exp_z,
        )  # fmt: skip
        multiply(exp_z, weight_tile, out=others_RD, accumulate=True, rounded_to=problem.gradient_dtype)
    target_RD = problem.weight_rows(rows.target_R.clamp(0, problem.vocab - 1)).to(torch.float32)
    grad_rows = target_RD.mul_((slope * sum_others).unsqueeze(1)).sub_(others_RD).div_(1 + sums.excess.unsqueeze(1))
    return sums.finish(problem.group, problem.vocab).logprob, grad_rows


# An operator, because `out=` raises where an upstream gradient requires a gradient itself (create_graph).
@torch.library.custom_op("rlft_fast::linear_logprob_frozen_backward", mutates_args=())
def _frozen_backward(jacobian: Tensor, grad_logprob: Tensor) -> Tensor:
    """dhidden, the product in float32: half precision does not hold every upstream gradient."""
    upstream = grad_logprob.unsqueeze(-1)
    grad_hidden = torch.empty_like(jacobian)
    torch.mul(jacobian, upstream, out=grad_hidden)
    return grad_hidden.masked_fill_(upstream == 0, 0)


@_frozen_backward.register_fake
def _(jacobian, grad_logprob):
    return torch.empty_like(jacobian)


FROZEN = Frozen()
