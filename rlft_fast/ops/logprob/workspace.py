"""The memory that the head works in where the caller names none, and the rows that the loss takes at once."""

import torch

from rlft_fast.ops.logprob.tiles import (
    CPU_LOGIT_ROWS,
    ROW_MULTIPLE,
    TILE_COLUMNS,
    gpu_logit_rows,
    padded_columns,
    rounded_rows,
    thread_tile_columns,
)


def default_tile_mib(device_type: str, takes_whole_rows: bool) -> int:
    """Of `linear_logprob`, which cuts logits into tiles, or into chunks of whole rows of odds (odds.py).

    Odds have a larger default on a GPU, because the GEMM of dhidden (R, D) does not fill a large GPU with few rows.
    """
    if device_type == "cpu":
        return 64
    return 1024 if takes_whole_rows else 256


def default_workspace_mib(num_rows: int, dim: int, vocab: int, dtype: torch.dtype, device_type: str) -> int:
    """Of `linear_logprob_loss`: on a CPU the logits of `CPU_LOGIT_ROWS` rows, however large the vocabulary.

    On a GPU the dlogits of all rows, up to the size of a float32 dweight: with the dlogits of all rows no float32
    accumulator of dweight is needed. Where dlogits are cut into groups, each group reads and writes the accumulator
    once. At D = 896 the accumulator is small, and groups of its size would move it eleven times; a GiB is therefore
    allowed in any case.
    """
    if device_type == "cpu":
        return max(-(-4 * CPU_LOGIT_ROWS * vocab // 2**20), 64)
    distance, multiple = padded_columns(vocab), ROW_MULTIPLE[device_type]
    chunk_bytes = 4 * gpu_logit_rows(dim) * distance
    grad_bytes = dtype.itemsize * -(-num_rows // multiple) * multiple * distance
    return -(-(chunk_bytes + min(grad_bytes, max(4 * vocab * dim, 2**30))) // 2**20)


def group_limits(dim: int, vocab: int, dtype: torch.dtype, device_type: str, workspace_mib: int) -> tuple[int, int]:
    """Most rows of a chunk and of a group of `_LargeGemms`, whose operands have that dtype."""
    column_bytes = workspace_mib * 2**20 // padded_columns(vocab)
    if dtype == torch.float32:
        limit = rounded_rows(column_bytes // 4, device_type)
        return limit, limit
    limit = rounded_rows(min(column_bytes // (4 + dtype.itemsize), gpu_logit_rows(dim)), device_type)
    return limit, rounded_rows((column_bytes - 4 * limit) // dtype.itemsize, device_type)


def scratch_bytes(
    num_rows: int, dim: int, vocab: int, dtype: torch.dtype, device_type: str, workspace_mib: int | None,
    trained_columns: int | None = None,
) -> int:  # fmt: skip
    """Most memory of `linear_logprob_loss` beside its results: logits, a sum of dweight, copies of rows.

    On a CPU each thread has a sum of the rows' gradients, and a float32 copy of the weight of its tile.

    Args:
        num_rows: T, or A where few tokens are active.
        dim: D.
        vocab: V.
        dtype: of hidden states and weight.
        device_type: ``"cpu"``, with as many threads as torch has now, or ``"cuda"``.
        workspace_mib: as the loss takes it.
        trained_columns: how many of D columns of the weight are trained; None: all.
    """
    if workspace_mib is None:
        workspace_mib = default_workspace_mib(num_rows, dim, vocab, dtype, device_type)
    columns = dim if trained_columns is None else trained_columns
    if device_type == "cpu":
        most_rows, operand_bytes = rounded_rows(workspace_mib * 2**20 // (4 * vocab), "cpu"), 4
    else:
        _, most_rows = group_limits(dim, vocab, dtype, device_type, workspace_mib)
        operand_bytes = dtype.itemsize
    rows = min(num_rows, most_rows)
    copied = 2 * rows  # hidden states, and their gradients
    if device_type == "cpu":
        tile = thread_tile_columns(rows)
        has_copy = dtype != torch.float32 or 0 < columns < dim  # also of a weight with an adapter beside it
        copied += min(torch.get_num_threads(), -(-vocab // tile)) * (rows + tile * has_copy)
    adds_up = dtype != torch.float32 and (device_type == "cpu" or num_rows > most_rows)
    return workspace_mib * 2**20 + copied * dim * operand_bytes + (4 * vocab * columns if adds_up else 0)


def forward_bytes(num_rows: int, dim: int, vocab: int, dtype: torch.dtype, workspace_mib: int) -> int:
    """Most memory of `linear_logprob` on a CPU, without a backward pass, beside its results.

    Arguments are those of `scratch_bytes`.
    """
    rows = min(num_rows, rounded_rows(workspace_mib * 2**20 // (4 * TILE_COLUMNS), "cpu"))
    columns = min(TILE_COLUMNS, vocab)
    return 4 * (rows * columns + (rows + columns * (dtype != torch.float32)) * dim)
