"""How the results of several workers become one: columns are joined, whatever holds them.

A mapping, a tuple or a dataclass holds parts, which are joined one by one. A list, an array or a tensor is a column.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data import Batch, MicroBatchPlan, Samples, cat_samples, join_outputs
from rlft_fast.world import World

Join = Callable[[list[Any], str], Any]
"""Makes one of the same part of each worker's result; the text says where the part stands."""


def collect(results: Sequence[Any], join: Join, where: str = "the result") -> Any:
    """One result, with the structure that every worker's result has.

    Args:
        results: of the workers, by rank.
        join: makes one of parts that hold no others.
        where: the result in messages.

    Raises:
        ValueError: the workers returned different structures, or a part cannot be joined.
    """
    first = results[0]
    if len(kinds := {type(result).__name__ for result in results}) > 1:
        raise ValueError(f"{where} is of the types {', '.join(sorted(kinds))}: return the same type from every worker")
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            names = " and ".join(str([*result]) for result in results)
            raise ValueError(f"{where} has the keys {names}: return the same keys from every worker")
        return {key: collect([result[key] for result in results], join, f"{where}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        if len(sizes := {len(result) for result in results}) > 1:
            raise ValueError(f"{where} is a tuple of {sorted(sizes)} parts: return as many from every worker")
        parts = [collect([*own], join, f"{where}[{i}]") for i, own in enumerate(zip(*results, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if is_dataclass(first) and not isinstance(first, Samples | Batch):
        names = [field.name for field in fields(first)]
        return type(first)(
            **{name: collect([getattr(x, name) for x in results], join, f"{where}.{name}") for name in names}
        )
    return join([*results], where)


def join_rows(parts: list[Any], rows: Sequence[range], where: str) -> Any:
    """Columns of rows in the order of all rows.

    Args:
        parts: of each worker, `Samples` or one entry for each of its rows.
        rows: of each worker.
        where: the part in messages.

    Raises:
        ValueError: a part has not one entry for each row.
    """
    if isinstance(parts[0], Samples):
        own = [part.replace(row_B=_indices(mine)[part.row_B]) for part, mine in zip(parts, rows, strict=True)]
        filled = [samples for samples in own if len(samples)] or own[:1]
        return cat_samples(filled).gather(World(device=torch.device("cpu")))  # by row and number
    if all(part is None for part in parts):
        return None
    for part, mine in zip(parts, rows, strict=True):
        _require_column(part, len(mine), where)
    return _join_column(parts, torch.cat([_indices(mine) for mine in rows]), where)


def join_share_column(parts: list[Any], batch: Batch, plan: MicroBatchPlan, where: str) -> Any:
    """A column of shares in the order of the batch. A number or a text is the first worker's.

    Args:
        parts: of each rank of the plan, one entry for each token or each sequence of its share.
        batch: the whole batch.
        plan: of this batch.
        where: the part in messages.

    Raises:
        ValueError: a part has entries neither for the tokens nor for the sequences, or it is a `Batch`.
    """
    if isinstance(parts[0], Batch):
        raise ValueError(f"{where} is a Batch, which workers cannot return: return its new columns in a mapping")
    if not _is_column(parts[0]) or (isinstance(parts[0], Tensor) and parts[0].dim() == 0):
        return parts[0]  # a metric, reduced by the workers
    indices = [plan.rank_indices(rank) for rank in range(plan.world_size)]
    tokens, sequences = [int(batch.lengths[own].sum()) for own in indices], [len(own) for own in indices]
    sizes = [len(part) for part in parts]
    if sizes not in (tokens, sequences):
        raise ValueError(
            f"{where} has {sizes} entries by worker, expected one for each token ({tokens}) or each sequence "
            f"({sequences}) of a share"
        )
    if isinstance(parts[0], Tensor):
        return join_outputs(parts, batch, plan)
    index = torch.from_numpy(plan.indices)
    return _join_column(parts, index if sizes == sequences else batch.token_index(plan.indices), where)


def _indices(rows: range) -> Tensor:
    return torch.arange(rows.start, rows.stop, rows.step)


def _is_column(part: Any) -> bool:
    return isinstance(part, Tensor | np.ndarray | list)


def _require_column(part: Any, num_rows: int, where: str) -> None:
    is_column = _is_column(part) and getattr(part, "ndim", 1) > 0
    if not is_column or len(part) != num_rows:
        got = f"has {len(part)} entries" if is_column else f"is of type {type(part).__name__}"
        raise ValueError(
            f"{where} {got}, expected a list, an array or a tensor with one entry for each of the {num_rows} rows that "
            "the worker was given, or a mapping, a tuple or a dataclass of such columns"
        )


def _join_column(parts: list[Any], index: Tensor, where: str) -> Any:
    """Entry i of the parts together becomes entry ``index[i]``."""
    order = index.argsort()
    if isinstance(parts[0], list):
        entries = [entry for part in parts for entry in part]
        return [entries[i] for i in order.tolist()]
    shapes = {(tuple(part.shape[1:]), str(part.dtype)) for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"{where} has entries of several shapes or dtypes, {sorted(shapes)}: expected equal ones")
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[order]
    return np.concatenate(parts)[order.numpy()]
