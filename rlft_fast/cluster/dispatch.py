"""How the arguments of a call reach the workers of a group, and how their results become one.

The names are verl's. A batch of any size is cut by the token-balanced plan, also where there are fewer sequences than
workers; each worker is sent its share alone.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from rlft_fast.cluster.collecting import collect, join_rows, join_share_column
from rlft_fast.data import Batch, cut_shares, plan_batch
from rlft_fast.engine import weighted

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """Which arguments each worker gets, and what the driver gets back.

    ONE_TO_ALL: all workers get the same arguments; the driver gets a list of their results, in the order of ranks.
    DP_COMPUTE_PROTO: a `Batch`, or the rows of lists, is shared among the workers; the driver gets one result.
    RANK_ZERO: the first worker alone is called; the driver gets its result.
    """

    ONE_TO_ALL = "one_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    RANK_ZERO = "rank_zero"


ONE_TO_ALL, DP_COMPUTE_PROTO, RANK_ZERO = Dispatch


@dataclass(frozen=True)
class Registered:
    """What `register` says of a method."""

    dispatch: Dispatch
    engine: str | None
    trains: bool

    def engine_of(self, keywords: Mapping[str, Any]) -> str:
        """The engine whose token cap plans a call with these keyword arguments."""
        return self.engine or keywords.get("engine", "")


def register(dispatch: Dispatch, *, engine: str | None = None, trains: bool = False) -> Callable[[F], F]:
    """Makes a method of a worker a method of its group.

    Args:
        dispatch: see `Dispatch`.
        engine: of DP_COMPUTE_PROTO with a batch: the engine whose token cap plans it, see `Worker.engine_configs`.
            None: the call names it by a keyword-only argument ``engine``.
        trains: of DP_COMPUTE_PROTO with a batch: the second argument is a loss, whose denominators are those of the
            whole batch.
    """

    def mark(method: F) -> F:
        method.__registered__ = Registered(dispatch, engine, trains)  # type: ignore[attr-defined]
        return method

    return mark


def registered_methods(worker_class: type) -> dict[str, Registered]:
    found = {name: getattr(getattr(worker_class, name), "__registered__", None) for name in dir(worker_class)}
    return {name: how for name, how in found.items() if how is not None}


class Arguments(NamedTuple):
    """Arguments of a call."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return (*self.positional, *self.keywords.values())

    def with_values(self, values: Sequence[Any]) -> "Arguments":
        """The same call with other values, in the order of `values`."""
        count = len(self.positional)
        return Arguments(tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True)))


def bind(worker_class: type, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments:
    """The arguments of a call in the order of the method, positional where they may be.

    Raises:
        TypeError: the method does not take the arguments.
    """
    try:
        bound = inspect.signature(getattr(worker_class, name)).bind(None, *args, **keywords)
    except TypeError as error:
        raise TypeError(f"{worker_class.__name__}.{name}: {error}") from None
    return Arguments(bound.args[1:], bound.kwargs)


class Split(NamedTuple):
    """The arguments of each rank, and what makes one result of theirs."""

    arguments: Iterable[tuple[Any, ...]]
    """By rank, to be read once: a share is made when it is asked for."""
    join: Callable[[list[Any]], Any]


def split_batch(
    batch: Batch, others: tuple[Any, ...], max_tokens: int, size: int, group: int, trains: bool, padded: bool = False,
    micro_batch_size: int | None = None,
) -> Split:  # fmt: skip
    """A batch and further arguments as the workers get them.

    Columns of the results have one entry for each token or each sequence of a share; they become columns of the
    batch, see `collect`. Other results are the same on all workers, such as metrics that they have reduced.

    Args:
        batch: the whole batch.
        others: the same for all workers.
        max_tokens: cap of a micro-batch.
        size: number of workers.
        group: number of neighbouring workers that share their sequences (sequence parallelism).
        trains: see `register`.
        padded: whether the engine runs padded.
        micro_batch_size: cap on the sequences of a micro-batch, too.
    """
    scale = 1.0
    if trains:
        batch, scale = weighted(batch, others[0])
    # Inference runs tokens of weight 0, too.
    run = batch if trains else batch.unweighted()
    plan = plan_batch(run, max_tokens, size // group, micro_batch_size=micro_batch_size, padded=padded)
    shares = (share for share in cut_shares(batch, plan, scale) for _ in range(group))

    def join(results: list[Any]) -> Any:
        return collect(results[::group], lambda parts, where: join_share_column(parts, batch, plan, where))

    return Split(((share, *others) for share in shares), join)


def split_rows(lists: tuple[Any, ...], size: int) -> Split:
    """Lists of as many rows each: rank r gets the rows r, r + size, and so on, of every list.

    Arguments that are no lists go to all workers. Results are `Samples`, or columns with one entry for each row, see
    `collect`; their rows become those of the whole.

    Raises:
        ValueError: the lists have different numbers of rows.
    """
    is_list = [isinstance(x, Sequence) and not isinstance(x, str | bytes) for x in lists]
    if len(numbers := {len(x) for x, cut in zip(lists, is_list, strict=True) if cut}) != 1:
        raise ValueError(f"lists of {sorted(numbers)} rows, expected a list, and all lists of the same number of rows")
    (num_rows,) = numbers
    rows = [range(num_rows)[rank::size] for rank in range(size)]
    has_rows = [rank for rank in range(size) if rows[rank]] or [0]

    def join(results: list[Any]) -> Any:
        filled, own = [results[rank] for rank in has_rows], [rows[rank] for rank in has_rows]
        return collect(filled, lambda parts, where: join_rows(parts, own, where))

    def of_rank(rank: int) -> tuple[Any, ...]:
        return tuple(x[rank::size] if cut else x for x, cut in zip(lists, is_list, strict=True))

    return Split([of_rank(rank) for rank in range(size)], join)
