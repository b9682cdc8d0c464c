"""Logits of a few tokens of the vocabulary: dot products of hidden states with gathered rows of the projection.

Nothing of the vocabulary's size exists but dweight. On a CPU the products are those of sparse matrices: gathered rows
and outer products, of 2.3 KB for each id at D = 576, are not written to memory (480 rows of 65 ids: 16 ms in place of
176 for the logits, 11 of 147 for dhidden, 15 of 82 for dweight).

Shapes: T packed tokens, K ids of each, D hidden, V vocabulary, U different ids.
"""

import functools
import warnings

import torch
from torch import Tensor

from rlft_fast.ops.precision import sums_in_float32


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


# ---- as an operator -------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlft_fast::support_logits", mutates_args=())
def _support_logits(hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype) -> Tensor:
    """(T, K) float32, see `gathered_logits`."""
    return gathered_logits(hidden, weight, ids, workspace_mib, dtype)


@_support_logits.register_fake
def _(hidden, weight, ids, workspace_mib, dtype):
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@torch.library.custom_op("rlft_fast::support_logits_backward", mutates_args=())
def _support_logits_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, ids: Tensor, workspace_mib: int, dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dhidden, dweight), added up in float32 and rounded once; empty where not needed."""
    grad_hidden, grad_weight = _empty_gradients(hidden, weight, needs_grad, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would narrow the sums
        if needs_grad[0]:
            grad_hidden = gathered_grad_hidden(grad, weight, ids, workspace_mib, dtype).to(hidden.dtype)
        if needs_grad[1]:
            add_gathered_grad_weight_(grad_weight.zero_(), grad, hidden, ids, workspace_mib, dtype)
    return grad_hidden, grad_weight.to(weight.dtype)


@_support_logits_backward.register_fake
def _(grad, hidden, weight, ids, workspace_mib, dtype, needs_grad):
    return _empty_gradients(hidden, weight, needs_grad, weight.dtype)


def _empty_gradients(
    hidden: Tensor, weight: Tensor, needs_grad: list[bool], weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    sizes = [x.shape if needed else (0,) for x, needed in zip((hidden, weight), needs_grad, strict=True)]
    return hidden.new_empty(sizes[0]), weight.new_empty(sizes[1], dtype=weight_dtype)


def _save(ctx, inputs, output) -> None:
    *tensors, workspace_mib, dtype = inputs
    ctx.scalars = workspace_mib, dtype
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    needs_grad = list(ctx.needs_input_grad[:2])
    grads = torch.ops.rlft_fast.support_logits_backward(grad, *ctx.saved_tensors, *ctx.scalars, needs_grad)
    return *(x if needed else None for x, needed in zip(grads, needs_grad, strict=True)), None, None, None


_support_logits.register_autograd(_backward, setup_context=_save)
