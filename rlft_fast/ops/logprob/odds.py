"""Gradients of logits that are finished, up to a factor of each row, by the GEMM that computes the logits.

With the odds of every token against a reference r, the gradient of the log-probability of the target t is

    odds_j = exp(x_j - r) for j != t,     odds_t = -sum of the others,     sum_exp = exp(x_t - r) - odds_t
    d logprob / dz = factor * odds,       factor = -(dx/dz) / sum_exp

r is x_t, which one dot product per row gives, so that the logits' GEMM can write the odds in the dtype that the next
GEMMs multiply in, and no wider logit exists. The factors go onto the rows of dhidden in float32, and onto the hidden
states in dweight's GEMM, which rounds them to the operands' dtype.

Shapes: R rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.statistics import Rows
from rlft_fast.ops.logprob.tiles import multiply, padded_columns, rounded_rows
from rlft_fast.ops.logprob.ways import seen_rows


class Odds(NamedTuple):
    """Of a chunk: the gradient of each log-probability in its row of raw logits is ``factor`` times ``grad_RV``.

    All else is (R,). A bad row has a finite ``grad_RV`` and nan in the rest. If the loss does not see it, it adds
    nothing.
    """

    grad_RV: Tensor
    factor: Tensor
    slope: Tensor  # dx/dz
    logprob: Tensor
    reference: Tensor
    log_sum: Tensor  # of exp(x - reference)
    entropy: Tensor | None


def has_odds(problem: Problem) -> bool:
    """Whether there is a kernel that writes them.

    Float16 has not the range that odds need, and masked logits of -inf need a positive scale. The kernel of float32 is
    for CPUs: it would spill registers on some GPUs.
    The kernels read the weight as it is, so that a weight of another dtype goes tile by tile through the vendor's GEMM.
    """
    dtype = torch.bfloat16 if problem.device_type == "cuda" else torch.float32
    return (
        problem.backend == "triton" and problem.is_plain and not problem.group and problem.vocab > 0
        and problem.scale > 0 and problem.operand_dtype == dtype and not problem.casts_weight
    )  # fmt: skip


def odds_limit(problem: Problem, workspace_mib: int) -> int:
    """Most rows whose odds fit the workspace, beside their float32 dhidden."""
    columns = padded_columns(problem.vocab) * problem.operand_dtype.itemsize
    row_bytes = columns + 4 * problem.hidden_TD.shape[1]
    return rounded_rows(workspace_mib * 2**20 // row_bytes, problem.device_type)


def odds_memory(problem: Problem, limit: int) -> Tensor:
    """For the odds of at most ``limit`` rows."""
    num_rows, like = min(limit, problem.num_active), problem.hidden_TD
    memory = like.new_empty(num_rows, padded_columns(problem.vocab), dtype=problem.operand_dtype)
    return memory[:, : problem.vocab]


def write_odds(problem: Problem, rows: Rows, weight_VD: Tensor, return_entropy: bool, memory_RV: Tensor) -> Odds:
    """Computes the logits of the rows and writes their odds to the memory."""
    slope = (rows.inv_temperature * problem.scale).expand(len(rows.target_R)).contiguous()
    sum_odds, reference, drop, shift = problem.kernels.fused_odds(
        rows.hidden_RD, weight_VD, rows.target_R, rows.inv_temperature, problem.scale, return_entropy, memory_RV
    )
    at_target = (-drop).exp()
    sum_exp = sum_odds + at_target
    log_sum = torch.logaddexp(sum_odds.double().log(), -drop)  # of a certain target, no digit of the others is lost
    entropy = None if shift is None else (log_sum - (shift - drop * at_target) / sum_exp).float()
    _set_targets(memory_RV, rows, -sum_odds.nan_to_num(0.0, 0.0, 0.0))
    rounded = reference.float()
    return Odds(
        memory_RV, (-slope / sum_exp).float(), slope, (-drop - log_sum).float(), rounded,
        (log_sum + (reference - rounded)).float(), entropy,
    )  # fmt: skip


def write_entropy_gradients(
    problem: Problem, rows: Rows, weight_VD: Tensor, odds: Odds, d_logprob: Tensor, d_entropy: Tensor
) -> None:  # fmt: skip
    """Replaces the odds by the gradients of a loss of log-probability and entropy.

    The gradient of an entropy reads log p, and rounded odds hold too few digits of log p. The logits are therefore
    computed again.
    """
    assert odds.entropy is not None
    problem.kernels.fused_grad(
        rows.hidden_RD, weight_VD, rows.target_R, 0, rows.inv_temperature, problem.scale, odds.reference,
        odds.log_sum, odds.entropy, d_logprob, d_entropy, odds.grad_RV,
    )  # fmt: skip
    # The reference is another sum than the target's logit in the GEMM, whose rounding would not cancel in 1 - p.
    p = odds.logprob.exp()
    at_target = -d_logprob * odds.logprob.expm1() - d_entropy * p * (odds.logprob.clamp(min=-87) + odds.entropy)
    unseen = seen_rows(d_logprob, d_entropy).logical_not()
    _set_targets(odds.grad_RV, rows, (at_target * odds.slope).masked_fill(unseen, 0))


def _set_targets(grad_RV: Tensor, rows: Rows, values_R: Tensor) -> None:
    column = rows.target_R.clamp(0, grad_RV.shape[1] - 1).unsqueeze(1)
    grad_RV.scatter_(1, column, values_R.unsqueeze(1).to(grad_RV.dtype))


def times_weight(grad_RV: Tensor, weight_VD: Tensor, factor: Tensor) -> Tensor:
    """dhidden (R, D) in float32."""
    grad_rows = grad_RV.new_empty(len(grad_RV), weight_VD.shape[1], dtype=torch.float32)
    multiply(grad_RV, weight_VD, out=grad_rows)
    return grad_rows.mul_(factor.unsqueeze(1))
