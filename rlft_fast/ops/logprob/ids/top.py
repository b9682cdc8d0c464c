"""The K most likely ids of each row with their log-probabilities: what a teacher says of a token in T K numbers.

The logits of a few rows at a time are in memory. Their normaliser is that of `linear_logprob`; `torch.topk` finds the
ids, on every device.

Shapes: T packed tokens, R rows of one chunk, K ids of each row, D hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.logprob.checks import check_number, check_row_fits, check_targets
from rlft_fast.ops.logprob.linear import checked_problem, prepared
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.reference import transform_logits
from rlft_fast.ops.logprob.statistics import Rows, Sums
from rlft_fast.ops.logprob.tiles import rounded_columns, rounded_rows, row_chunks
from rlft_fast.ops.logprob.workspace import default_tile_mib


class TopLogprob(NamedTuple):
    """Per token, none of it differentiable."""

    logprob: Tensor
    """(T,) float32 log-probability of the target."""
    ids: Tensor
    """(T, K) int64 most likely ids, the most likely first."""
    ids_logprob: Tensor
    """(T, K) float32 log-probabilities of the ids."""


@torch.no_grad()
def top_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    top_k: int,
    *,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    adapter_VE: Tensor | None = None,
    active_index: Tensor | None = None,
    workspace_mib: int | None = None,
) -> TopLogprob:
    """The most likely ids of each row under the softmax over the whole vocabulary, and their log-probabilities.

    One GEMM. A teacher is stored in this form for a distillation: :func:`rlft_fast.ops.linear_logprob_loss` takes the
    ids as ``ids_TK``.

    Args:
        hidden_TD: (T, D) final hidden states, as in :func:`linear_logprob`.
        weight_VD: (V, D) projection.
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0 everywhere and cost nothing.
        top_k: K, at least 1 and at most V. Among equally likely ids `torch.topk` chooses.
        bias_V: as in :func:`linear_logprob`, like all options below.
        temperature: see there.
        softcap: see there.
        logit_scale: see there; positive.
        ignore_index: see there.
        adapter_VE: see there.
        active_index: see there.
        workspace_mib: see there; whole rows of logits must fit. `torch.topk` takes up to as much again on a GPU.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported dtypes, float64 among them, or no tensors.
    """
    problem = checked_problem(
        hidden_TD, weight_VD, target_T, temperature, softcap, adapter_VE=adapter_VE, active_index=active_index,
        bias_V=bias_V, scale=logit_scale, backend="native", workspace_mib=workspace_mib, ignore_index=ignore_index,
    )  # fmt: skip
    _check(top_k, problem)
    check_targets(target_T, problem.vocab, ignore_index)
    problem = prepared(problem, "no grad")
    num_tokens = len(target_T)
    found = TopLogprob(
        hidden_TD.new_zeros(num_tokens, dtype=torch.float32), target_T.new_zeros(num_tokens, top_k),
        hidden_TD.new_zeros(num_tokens, top_k, dtype=torch.float32),
    )  # fmt: skip
    workspace = workspace_mib or default_tile_mib(problem.device_type, takes_whole_rows=False)
    check_row_fits(problem.vocab, workspace)
    limit = rounded_rows(workspace * 2**20 // (4 * problem.vocab), problem.device_type)
    memory_RV = hidden_TD.new_empty(min(limit, problem.num_active), problem.vocab, dtype=torch.float32)
    for chunk in row_chunks(problem.num_active, limit, problem.device_type):
        index = problem.active[chunk]
        for out, values in zip(found, _of_chunk(problem, problem.rows(index), top_k, memory_RV), strict=True):
            out[index] = values
    return found


def _of_chunk(problem: Problem, rows: Rows, top_k: int, memory_RV: Tensor) -> TopLogprob:
    logits, sums = memory_RV[: len(rows.target_R)], Sums.of_nothing(rows)
    for tile, weight, bias in problem.tiles(rounded_columns(problem.vocab, logits)):
        z = logits[:, tile]
        problem.write_logits(rows.hidden_RD, weight, out=z)
        if bias is not None:
            z.add_(bias)
        problem.kernels.logprob_stats_(
            z, rows.target_R, tile.start, None, rows.inv_temperature, problem.softcap, problem.scale, *sums
        )
    stats = sums.finish("", problem.vocab)
    raw, ids = logits.topk(top_k)  # scale, soft-cap and temperature keep the order
    x = transform_logits(raw, 1.0, problem.softcap or None, problem.scale) * rows.inv_temperature.unsqueeze(1)
    return TopLogprob(stats.logprob, ids, (x - stats.maximum.unsqueeze(1)) - stats.log_sum.unsqueeze(1))


def _check(top_k: int, problem: Problem) -> None:
    check_number("top_k", top_k, int)
    if not 1 <= top_k <= problem.vocab:
        raise ValueError(f"top_k is {top_k}, expected at least 1 and at most the {problem.vocab} ids of the vocabulary")
    if problem.hidden_TD.dtype == torch.float64:
        raise TypeError("hidden_TD is float64, which no kernel takes: use torch.topk of all log-probabilities")
    if not problem.scale > 0:
        raise ValueError(f"logit_scale is {problem.scale}, expected a positive number: ids are sought by raw logits")
