"""Bytes after every operator of a pass, from which the peaks of passes with other numbers of tokens follow."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

Moment = tuple[Hashable, ...]


class Note(NamedTuple):
    """The memory after an operator.

    Attributes:
        moment: the part of the pass to which the operator belongs.
        at_operator: whether it is the operator that takes memory inside.
        num_bytes: bytes of all storages that count.
        created_bytes: bytes of the operator's results.
    """

    moment: Moment
    at_operator: bool
    num_bytes: int
    created_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The notes of a pass over `num_rows` rows."""

    num_rows: int
    notes: tuple[Note, ...]

    def peaks(self, *, at_operator: bool = False) -> dict[Moment, int]:
        """Most bytes at each moment, of all notes or of the notes `at_operator`."""
        peaks: dict[Moment, int] = defaultdict(int)
        for note in self.notes:
            if note.at_operator or not at_operator:
                peaks[note.moment] = max(peaks[note.moment], note.num_bytes)
        return peaks

    def linear_to(self, longer: "Trace") -> bool:
        """Whether the longer pass runs the same operators, and no result grows more than its rows do.

        The size of each tensor is then linear in the rows. It would not be with a mask of rows by rows.
        """
        return len(self.notes) == len(longer.notes) and all(
            short[:2] == long[:2] and long.created_bytes * self.num_rows <= short.created_bytes * longer.num_rows
            for short, long in zip(self.notes, longer.notes, strict=True)
        )

    def at(self, num_rows: int, longer: "Trace") -> "Trace":
        """The trace of the same pass over other rows, if the trace is `linear_to` a longer one."""
        share, rows = num_rows - self.num_rows, longer.num_rows - self.num_rows
        return Trace(num_rows, tuple(
            short._replace(num_bytes=short.num_bytes + share * (long.num_bytes - short.num_bytes) // rows)
            for short, long in zip(self.notes, longer.notes, strict=True)
        ))  # fmt: skip
