"""Rows of data: read from sources, or made by a reasoning-gym task; and the order in which a run takes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self, TypeVar

import torch

from rlft_fast.config import DataConfig, RowsConfig
from rlft_fast.errors import brief
from rlft_fast.templates import compile_template
from rlft_fast.trainer.prompts.formats import Row, read_data

T = TypeVar("T")


class RowSet(NamedTuple):
    """Rows of one source."""

    name: str
    """Of the set in the configuration; "" of a single set."""
    rows: list[Row]
    source: str
    """For messages."""
    numbers: Sequence[int] | None = None
    """Of the rows in the source, counted from 0; None: these are its first rows."""

    def number(self, place: int) -> int:
        """The number in the source of a row of the set."""
        return place if self.numbers is None else self.numbers[place]


def read_sets(config: RowsConfig, held_out: str | None = None, max_rows: int | None = None) -> list[RowSet]:
    """The rows of each set.

    Args:
        config: where the rows come from, and how many.
        held_out: read this source instead.
        max_rows: of this source; None: all.

    Raises:
        ValueError: a source cannot be read, or has no rows.
    """
    sets = config.sets if held_out is None else {"": held_out}
    if not sets:
        assert isinstance(config, DataConfig)
        found = [RowSet("", _make_task(config), f"task {config.task}")]
    else:
        found = [RowSet(name, read_data(source), source) for name, source in sets.items()]
    if empty := [rows.source for rows in found if not rows.rows]:
        raise ValueError(f"{empty[0]} holds no rows: there is nothing to train on")
    limits = max_rows if held_out is not None else config.max_rows
    most = limits if isinstance(limits, Mapping) else dict.fromkeys((x.name for x in found), limits)
    found = [x._replace(rows=x.rows[: most.get(x.name)]) for x in found]
    return with_prompts(found, prompt_column(config, held_out), config.template)


def prompt_column(config: RowsConfig, held_out: str | None = None) -> str:
    """Name of the column with the prompts, see `read_sets`."""
    return config.prompt_column if config.sets or held_out is not None else "question"


def with_prompts(sets: list[RowSet], column: str, template: str | None) -> list[RowSet]:
    """The rows with prompts that the template makes of them; None: they have prompts."""
    if template is None:
        return sets
    render = compile_template(template, "data.template", writes_null=False)
    return [found._replace(rows=[*_prompted(found, column, render)]) for found in sets]


def _prompted(found: RowSet, column: str, render: Callable[[Row], str]) -> Iterator[Row]:
    for i, row in enumerate(found.rows):
        try:
            prompt = render(row)
        except Exception as error:  # filters raise any error
            raise ValueError(
                f"{found.source}: data.template cannot be applied to row {found.number(i)} (counted from 0): "
                f"{brief(error)}; its columns are {sorted(row)}"
            ) from error
        yield row | {column: prompt}


class Overlong(NamedTuple):
    """How many rows have more tokens than allowed, see ``data.overlong``."""

    left_out: int = 0
    truncated: int = 0

    def __str__(self) -> str:
        parts = {"left out": self.left_out, "truncated": self.truncated}
        return ", ".join(f"{number:,} overlong {what}" for what, number in parts.items() if number)

    def __bool__(self) -> bool:
        return any(self)


class LeftOut(NamedTuple):
    """A row that is left out."""

    source: str
    row: int
    """Counts from 0."""
    why: str


def named_sets(data: T, held_out: Mapping[str, T]) -> dict[str, T]:
    """The data of a run and its held-out sets, by their names in messages."""
    return {"data": data} | {f"held-out data {name}".strip(): found for name, found in held_out.items()}


def overlong_notes(sets: Mapping[str, Overlong]) -> Iterator[str]:
    """Lines for the start of a run.

    Args:
        sets: of `named_sets`.
    """
    yield from (f"{name}: {found}" for name, found in sets.items() if found)


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless stream of rows, in passes. It is a pure function: a resumed run needs to know nothing but its step.

    With weights, a pass has as many rows of each set as the set's share of the number of all rows says, and the next
    pass goes on in each set where this pass ends.

    Args:
        sizes: rows of each set. The rows of a set are numbered behind the rows of the sets before it.
        weights: of each set; None: a pass has every row once.
        shuffle: whether every pass has another random order.
        seed: of the order; None: the run's seed.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    shuffle: bool = True
    seed: int | None = None

    @classmethod
    def of(cls, config: RowsConfig, sizes: Mapping[str, int]) -> Self:
        """The stream of a configuration, with the rows of each set by name."""
        weights = tuple(config.weights[name] for name in sizes) if config.weights else None
        return cls(tuple(sizes.values()), weights, config.shuffle, config.shuffle_seed)

    def rows(self, start: int, count: int, seed: int) -> list[int]:
        """Rows ``start`` to ``start + count`` of the stream.

        Args:
            start: counts from 0.
            count: how many.
            seed: the run's.
        """
        return self._take(start, count, seed if self.seed is None else self.seed).tolist()

    def _take(self, start: int, count: int, seed: int) -> torch.Tensor:
        shares = self._shares
        parts, size = [torch.empty(0, dtype=torch.int64)], sum(shares)
        while (missing := count - sum(map(len, parts))) > 0:
            epoch, offset = divmod(start + count - missing, size)
            parts.append(self._pass(epoch, seed, shares)[offset : offset + missing])
        return torch.cat(parts)

    @property
    def _shares(self) -> list[int]:
        """Rows of each set in a pass."""
        if self.weights is None:
            return [*self.sizes]
        total, whole = sum(self.sizes), sum(self.weights)
        return [max(round(weight / whole * total), 1) for weight in self.weights]

    def _pass(self, epoch: int, seed: int, shares: list[int]) -> torch.Tensor:
        order = self._order(epoch, seed, shares)
        if self.weights is None:
            return order
        sets = enumerate(zip(accumulate(self.sizes, initial=0), self.sizes, shares))  # noqa: B905 (one start too many)
        drawn = [
            first + Stream((size,), None, self.shuffle)._take(epoch * share, share, seed + 1 + number)
            for number, (first, size, share) in sets
        ]
        return torch.cat(drawn)[order]

    def _order(self, epoch: int, seed: int, shares: list[int]) -> torch.Tensor:
        if self.shuffle:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            return torch.randperm(sum(shares), generator=generator)
        if self.weights is None:
            return torch.arange(sum(shares))
        places = [(torch.arange(share, dtype=torch.float64) + 0.5) / share for share in shares]
        return torch.cat(places).argsort(stable=True)  # the sets evenly mixed


def _make_task(config: DataConfig) -> list[Row]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError("data.task needs reasoning-gym: pip install reasoning-gym") from error
    assert config.task is not None
    try:
        dataset = reasoning_gym.create_dataset(config.task, size=config.task_size, seed=0, **config.task_options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make the task {config.task!r}: {error}") from error
    return [{"question": entry["question"], "entry": entry} for entry in dataset]
