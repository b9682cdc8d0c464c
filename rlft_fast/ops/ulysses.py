"""Ulysses sequence parallelism over packed tensors (Jacobs et al. 2023, arXiv:2309.14509).

The N ranks of a group share one micro-batch of T packed tokens. With S = ceil(T / N), rank r holds the S rows from r S
on. Rows after the last token are padding. Layers that treat every token by itself run on the rank's own rows. Attention
runs on all tokens and on 1 / N of the heads:

    inputs = slice_tokens(inputs_T, group)                      (T, *) -> (S, *)
    q, k, v = (gather_tokens_scatter_heads(x, group) for ...)   (S, H, d) -> (N S, H / N, d)
    out = gather_heads_scatter_tokens(attention(q, k, v))       (N S, H / N, d) -> (S, H, d)
    logprob_T = gather_tokens(logprob, T, group)                (S,) -> (T,)

Compute targets before the slicing, `slice_tokens(next_token_targets(input_ids_T, cu_seqlens), group, value=-100)`: the
target of a rank's last token is the first token of the next rank. Attention needs one more sequence at the end of
cu_seqlens, which holds the N S - T padded rows.

Every backward is the exact adjoint of its forward, so gradients are gradients of the sum of all ranks' losses.
Parameters are replicas: sum their gradients over the ranks. If the loss of each rank is over its own rows, the sum is
the gradient of one process. If every rank computes the same loss from gathered values, the loss counts N times: divide
the loss by N, or average the gradients instead of summing them.

A group of None, or of one process, means no parallelism: N = 1, S = T, and nothing is communicated.
"""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def slice_tokens(x_T: Tensor, group: Group = None, *, value: float = 0.0) -> Tensor:
    """Returns this rank's rows, padded with `value` to the same number of rows on every rank.

    Nothing is communicated, because every rank holds all rows. In the backward the rows of other ranks get zeros.

    Args:
        x_T: (T, *), the same on every rank.
        group: the ranks that share the micro-batch.
        value: value of the padded rows: -100 for targets, 0 for weights and masks.

    Returns:
        (ceil(T / N), *).

    Raises:
        ValueError: x_T is a scalar, or this process is not in the group.
    """
    if x_T.dim() == 0:
        raise ValueError("x_T is a scalar, expected (T, ...).")
    size = _size(group)
    if group is None or size == 1:
        return x_T
    num_rows, rank = _num_rows(x_T.shape[0], size), group.rank()
    rows = x_T[rank * num_rows : (rank + 1) * num_rows]
    num_padded = num_rows - rows.shape[0]
    return rows if num_padded == 0 else torch.cat([rows, rows.new_full((num_padded, *rows.shape[1:]), value)])


def gather_tokens(x_S: Tensor, num_tokens: int, group: Group = None) -> Tensor:
    """Gathers the rows of all ranks and drops the padding. It is the inverse of `slice_tokens`.

    It costs one all-to-all. The backward adds the gradients that all ranks have for this rank's rows, see the module.

    Args:
        x_S: (ceil(T / N), *), this rank's rows.
        num_tokens: T.
        group: the ranks that share the micro-batch.

    Returns:
        (T, *), the same on every rank.

    Raises:
        ValueError: x_S does not have ceil(T / N) rows, or this process is not in the group.
    """
    size = _size(group)
    num_rows = _num_rows(num_tokens, size)
    if x_S.dim() == 0 or x_S.shape[0] != num_rows:
        raise ValueError(
            f"x_S has shape {tuple(x_S.shape)}, expected ceil({num_tokens} / {size}) = {num_rows} rows: "
            "pass the rows that slice_tokens returns."
        )
    if size == 1:
        return x_S
    # The all-to-all replaces an all-gather and its backward, a reduce-scatter. It moves as many bytes between ranks.
    # The backward of expand then adds the ranks in a fixed order and rounds once.
    return _AllToAll.apply(x_S.expand(size, *x_S.shape), group).flatten(0, 1)[:num_tokens]


def gather_tokens_scatter_heads(x_SHd: Tensor, group: Group = None) -> Tensor:
    """Exchanges this rank's tokens with all heads, (S, H, d), for all tokens with this rank's heads, (N S, H / N, d).

    It costs one all-to-all. The backward is `gather_heads_scatter_tokens`.

    Args:
        x_SHd: (S, H, d), or (S, H, *). S is the same on every rank.
        group: the ranks that share the micro-batch; rank r gets heads [r H / N, (r + 1) H / N).

    Raises:
        ValueError: H is not a multiple of N, or this process is not in the group.
    """
    size = _size(group)
    _check_heads_layout("x_SHd", x_SHd)
    if x_SHd.shape[1] % size:
        raise ValueError(
            f"x_SHd has {x_SHd.shape[1]} heads, expected a multiple of the group's {size} ranks: use fewer ranks, "
            "or repeat key and value heads first (repeat_interleave on dimension 1)."
        )
    if size == 1:
        return x_SHd
    by_rank = x_SHd.unflatten(1, (size, x_SHd.shape[1] // size)).transpose(0, 1)
    return _AllToAll.apply(by_rank, group).flatten(0, 1)


def gather_heads_scatter_tokens(x_THd: Tensor, group: Group = None) -> Tensor:
    """Exchanges all tokens with this rank's heads, (N S, H / N, d), for this rank's tokens with all heads, (S, H, d).

    It costs one all-to-all. The backward is `gather_tokens_scatter_heads`.

    Args:
        x_THd: (N S, H / N, d), or (N S, H / N, *).
        group: the ranks that share the micro-batch.

    Raises:
        ValueError: the number of rows is not a multiple of N, or this process is not in the group.
    """
    size = _size(group)
    _check_heads_layout("x_THd", x_THd)
    if x_THd.shape[0] % size:
        raise ValueError(
            f"x_THd has {x_THd.shape[0]} rows, expected a multiple of the group's {size} ranks: "
            "keep the padded rows until the heads are gathered."
        )
    if size == 1:
        return x_THd
    by_rank = x_THd.unflatten(0, (size, x_THd.shape[0] // size))
    return _AllToAll.apply(by_rank, group).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Sends block r of x (N, *) to rank r. The operation is its own inverse and its own adjoint."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, *grads):
        return _AllToAll.apply(*grads, ctx.group), None


def _num_rows(num_tokens: int, size: int) -> int:
    """S, the number of rows of every rank."""
    return -(-num_tokens // size)


def _size(group: Group) -> int:
    if group is None:
        return 1
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group: pass the group that shares its micro-batch.")
    return group.size()


def _check_heads_layout(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (tokens, heads, ...).")
