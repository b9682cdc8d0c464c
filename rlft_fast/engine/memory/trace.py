"""Bytes after every operator of a pass, from which the peaks of passes with other numbers of tokens follow."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

Moment = tuple[Hashable, ...]

# A pass over so many rows tells of all numbers of rows. The number is larger than the bytes of any memory, so dividing
# bytes by it gives the bytes of each row, and as the remainder the bytes that do not depend on the rows. A tensor of
# rows by rows has more elements than 64 bits count, and the pass fails.
MANY_ROWS = 1 << 42


class Note(NamedTuple):
    """The memory after an operator.

    Attributes:
        moment: the part of the pass to which the operator belongs.
        at_operator: whether it is the operator that takes memory inside.
        num_bytes: bytes of all storages that count.
    """

    moment: Moment
    at_operator: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The notes of a pass."""

    notes: tuple[Note, ...]

    def peaks(self, *, at_operator: bool = False) -> dict[Moment, int]:
        """Most bytes at each moment, of all notes or of the notes `at_operator`."""
        peaks: dict[Moment, int] = defaultdict(int)
        for note in self.notes:
            if note.at_operator or not at_operator:
                peaks[note.moment] = max(peaks[note.moment], note.num_bytes)
        return peaks

    def at(self, num_rows: int) -> "Trace":
        """The trace of the same pass over other rows, if this pass has `MANY_ROWS`."""
        half = MANY_ROWS // 2  # a remainder above a half is a negative number: of rows less a constant
        split = ((note, divmod(note.num_bytes + half, MANY_ROWS)) for note in self.notes)
        return Trace(tuple(
            note._replace(num_bytes=per_row * num_rows + rest - half) for note, (per_row, rest) in split
        ))  # fmt: skip
