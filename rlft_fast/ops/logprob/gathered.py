"""Logits of a few tokens of the vocabulary: dot products of hidden states with gathered rows of the projection.

`IdLogits` are those that `linear_logprob_loss` finds beside each target, which a distillation loss reads. With x the
logit that the softmax sees, log p_k = log p_t + x_k - x_t: the GEMM of the logits has given log p_t, and the x are dot
products with gathered rows. A gradient g_k in log p_k is one of g_k in log p_t, which the other GEMMs carry, and one of
g_k in x_k - x_t, which is finished here: the GEMMs stay three, and memory is that of T K numbers.

Nothing of the vocabulary's size exists but dweight. On a CPU the products are those of sparse matrices: gathered rows
and outer products, of 2.3 KB for each id at D = 576, are not written to memory (480 rows of 65 ids: 16 ms in place of
176 for the logits, 11 of 147 for dhidden, 15 of 82 for dweight).

Shapes: T packed tokens, R rows of one chunk, K ids of each, D hidden, V vocabulary, U different ids.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.reference import transform_logits
from rlft_fast.ops.logprob.statistics import Rows
from rlft_fast.ops.logprob.ways import Gradients
from rlft_fast.ops.precision import sums_in_float32

_WORKSPACE_MIB = 64  # of gathered rows, where the caller names none


def gathered_bytes(num_ids: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of the weight rows of one token's support: gathered in ``dtype``, then widened to float32."""
    return num_ids * dim * (4 if dtype == torch.float32 else 4 + dtype.itemsize)


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return min(a, b, key=lambda dtype: dtype.itemsize)


def gathered_logits(hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> Tensor:
    """(T, K) float32 dot products of each hidden state with the weight rows of its ids, both rounded to ``dtype``."""
    logits = hidden.new_empty(ids.shape, dtype=torch.float32)
    for rows in _row_groups(weight, ids, workspace_mib, dtype):
        own = hidden[rows].to(dtype).float()
        with sums_in_float32(logits):
            if logits.device.type == "cpu":
                table, index = _table(weight, ids[rows], dtype)
                logits[rows] = _sampled_products(own, table, index)
            else:
                torch.bmm(weight[ids[rows]].to(dtype).float(), own.unsqueeze(-1), out=logits[rows].unsqueeze(-1))
    return logits


def gathered_grad_hidden(grad: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> Tensor:
    """(T, D) float32 gradient of hidden states from the gradient of `gathered_logits`."""
    grad_hidden = grad.new_zeros(grad.shape[0], weight.shape[1])
    for rows in _row_groups(weight, ids, workspace_mib, dtype):
        out = grad_hidden[rows]
        with sums_in_float32(grad):
            if grad.device.type == "cpu":
                table, index = _table(weight, ids[rows], dtype)
                torch.addmm(out, _sparse(_row_numbers(index), index, grad[rows], len(table)), table, out=out)
            else:
                gathered = weight[ids[rows]].to(dtype).float()
                torch.bmm(grad[rows].unsqueeze(1), gathered, out=out.unsqueeze(1))
    return grad_hidden


def add_gathered_grad_weight_(
    grad_weight: Tensor, grad: Tensor, hidden: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype
) -> None:
    """Adds the gradient of the weight, from the gradient of `gathered_logits`, to a (V, D) float32 tensor."""
    seen = (grad != 0).any(-1, keepdim=True)
    for rows in _row_groups(grad_weight, ids, workspace_mib, dtype):
        own = hidden[rows].to(dtype).float().where(seen[rows], 0)  # 0 * nan is nan
        if grad_weight.device.type == "cpu":
            transposed = _sparse(_row_numbers(ids[rows]), ids[rows], grad[rows], len(grad_weight)).t()
            torch.addmm(grad_weight, transposed, own, out=grad_weight)
        else:  # index_put_ sorts the ids and gives the same bits every time; index_add_ does not
            products = (grad[rows].unsqueeze(-1) * own.unsqueeze(1)).flatten(0, 1)
            grad_weight.index_put_((ids[rows].flatten(),), products, accumulate=True)


@dataclass(frozen=True, slots=True)
class IdLogits:
    """Of a chunk: the raw logits of K ids and, in the last column, of the target."""

    problem: Problem
    rows: Rows
    ids: Tensor  # (R, K + 1)
    raw: Tensor  # (R, K + 1) float32, with bias

    @classmethod
    def of(cls, problem: Problem, rows: Rows, ids_RK: Tensor) -> IdLogits:
        target_R1 = rows.target_R.clamp(0, problem.vocab - 1).unsqueeze(1)  # another one has a log-probability of nan
        ids = torch.cat([ids_RK, target_R1], dim=1)
        columns = rows.hidden_RD.split([part.shape[1] for part in problem.parts], dim=1)
        raw = sum(
            gathered_logits(x, part, ids, _workspace_mib(problem), problem.dtype)
            for x, part in zip(columns, problem.parts, strict=True)
        )
        assert isinstance(raw, Tensor)
        return cls(problem, rows, ids, raw if problem.bias_V is None else raw + problem.bias_V[ids])

    def logprob(self, raw: Tensor, logprob_R: Tensor) -> Tensor:
        """(R, K) log-probabilities of the ids, differentiable in the raw logits and the target's log-probability."""
        x = transform_logits(raw, 1.0, self.problem.softcap or None, self.problem.scale)
        x = x * self.rows.inv_temperature.unsqueeze(1)
        others = self.ids[:, :-1] != self.ids[:, -1:]  # a target among the ids would add a gradient and take it away
        return logprob_R.unsqueeze(1) + (x[:, :-1] - x[:, -1:]).where(others, 0)

    def add_gradients(self, grad: Tensor, index: Tensor, grads: Gradients) -> None:
        """Adds what the gradient of the raw logits gives to float32 gradients; ``index`` are the rows' tokens."""
        workspace_mib, dtype = _workspace_mib(self.problem), self.problem.dtype
        if grads.hidden.numel():
            of_parts = [gathered_grad_hidden(grad, x, self.ids, workspace_mib, dtype) for x in self.problem.parts]
            grads.hidden[index] += torch.cat(of_parts, dim=1)
        if grads.weight.numel():
            factor = self.problem.factor_of_trained(self.rows.hidden_RD)
            add_gathered_grad_weight_(grads.weight, grad, factor, self.ids, workspace_mib, dtype)
        if grads.bias.numel():
            flat = (self.ids.flatten(), grad.flatten())
            if grad.is_cuda:  # in the same order every time
                grads.bias.index_put_((flat[0],), flat[1], accumulate=True)
            else:
                grads.bias.index_add_(0, *flat)


def _workspace_mib(problem: Problem) -> int:
    return problem.workspace_mib or _WORKSPACE_MIB


def _row_groups(weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> list[slice]:
    """Rows whose gathered weight rows fit the workspace."""
    row_bytes = max(gathered_bytes(ids.shape[1], weight.shape[1], narrower(weight.dtype, dtype)), 1)
    count = max(workspace_mib * 2**20 // row_bytes, 1)
    return [slice(start, start + count) for start in range(0, ids.shape[0], count)]


# ---- on a CPU, as sparse matrices -----------------------------------------------------------------------------------


def _table(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float32 rows of the weight, rounded to ``dtype``, and where the rows of the ids stand among them."""
    if weight.dtype == dtype == torch.float32 and weight.is_contiguous():  # the products would copy the whole otherwise
        return weight, ids
    different, index = ids.unique(return_inverse=True)
    return weight[different].to(dtype).float(), index


def _row_numbers(index: Tensor) -> Tensor:
    return torch.arange(len(index)).unsqueeze(1).expand_as(index)


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
    """(len(rows), num_columns), as many values in each row; a column that is twice in a row counts twice."""
    places = torch.stack([rows.flatten(), columns.flatten()])
    return torch.sparse_coo_tensor(places, values.flatten(), (len(rows), num_columns), check_invariants=False)


def _sampled_products(hidden: Tensor, table_UD: Tensor, index: Tensor) -> Tensor:
    """Dot products of each hidden state with its rows of the table."""
    num_rows, num_ids = index.shape
    bounds = torch.arange(0, index.numel() + 1, max(num_ids, 1)) if num_ids else index.new_zeros(num_rows + 1)
    zeros, size = hidden.new_zeros(index.numel()), (num_rows, len(table_UD))
    _take_the_warning()
    places = torch.sparse_csr_tensor(bounds, index.flatten(), zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(places, hidden, table_UD.T, beta=0.0).values().view_as(index)


@functools.cache
def _take_the_warning() -> None:
    """Torch tells once in a process that matrices by rows are in beta state: users have not asked for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), [], torch.zeros(0), (0, 0), check_invariants=False)
