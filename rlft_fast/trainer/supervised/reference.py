"""Log-probabilities of a set's sequences under the reference of a preference: inferred once, and kept in a file.

A file holds one float32 number per predicted token of all sequences, NaN where it is unknown, and is mapped into
memory: training reads the rows of a step alone. A run that was killed while it inferred goes on with the rows that are
missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlft_fast.files import fsync, replacing
from rlft_fast.world import World

_PIECE = 2**22  # numbers that are written at a time


class Reference:
    """The log-probabilities of one set of pairs, in memory until `keep`.

    Args:
        lengths: predicted tokens of each sequence, at least one: 2i and 2i + 1 are the sequences of pair i.
        path: of the file, which is read if it exists.
        world: the processes that infer together.

    Raises:
        ValueError: the file is not one that `keep` has written for these sequences.
    """

    def __init__(self, lengths: Sequence[int], path: Path, world: World) -> None:
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.path = path
        self.world = world
        self._values: np.ndarray | None = self._mapped("c") if path.is_file() else None
        self._is_new = False  # numbers put before `keep` change a copy of the file's pages

    @property
    def values(self) -> np.ndarray:
        """All numbers, one sequence behind the other."""
        if self._values is None:
            self._values = np.full(self.bounds[-1], np.nan, np.float32)
        return self._values

    def of(self, sequences: Sequence[int]) -> Tensor:
        """(T,) float32 of the named sequences as a batch has them: with 0 for the last token of each."""
        found = np.zeros(sum(self.bounds[j + 1] - self.bounds[j] + 1 for j in sequences), np.float32)
        start = 0
        for j in sequences:
            own = self.values[self.bounds[j] : self.bounds[j + 1]]
            found[start : start + len(own)] = own
            start += len(own) + 1
        return torch.from_numpy(found)

    def missing(self, pairs: Sequence[int]) -> list[int]:
        """Which of the pairs lack a number. All ranks must call it together.

        Raises:
            ValueError: the ranks read different files.
        """
        if self._values is None:
            return [*pairs]
        has_gap = np.logical_or.reduceat(np.isnan(self.values), self.bounds[:-1])
        found = [i for i in pairs if has_gap[2 * i] or has_gap[2 * i + 1]]
        self.world.require_agreement(f"log-probabilities in {self.path}", {"missing pairs": len(found)})
        return found

    def put(self, pairs: Sequence[int], logprob_T: Tensor) -> None:
        """Takes the log-probabilities of the batch of these pairs. Into a file, the first process writes."""
        if not self.values.flags.writeable:
            return
        self._is_new = True
        both = [j for i in pairs for j in (2 * i, 2 * i + 1)]
        sizes = [int(self.bounds[j + 1] - self.bounds[j]) + 1 for j in both]
        for j, own in zip(both, logprob_T.split(sizes), strict=True):
            self.values[self.bounds[j] : self.bounds[j + 1]] = own[:-1].numpy()

    def keep(self) -> None:
        """Writes what is known to the file, which further numbers then go into. All ranks must call it together.

        Files of other pairs or another model, under the same name before ``-``, are removed.
        """
        if self.world.is_first:
            self._write()
        self.world.barrier()
        self._values = self._mapped("r+" if self.world.is_first else "r")

    def sync(self) -> None:
        """What was put is in the file, for all ranks. All ranks must call it together."""
        if isinstance(self.values, np.memmap) and self.values.mode == "r+":
            self.values.flush()
            self._is_new = False
        self.world.barrier()

    def _write(self) -> None:
        for other in self.path.parent.glob(f"{self.path.name.rpartition('-')[0]}-*.npy"):
            if other != self.path:
                other.unlink()
        if self.path.is_file() and not self._is_new:
            return
        self.path.parent.mkdir(exist_ok=True)
        with replacing(self.path) as file:
            mapped = np.lib.format.open_memmap(file, "w+", np.float32, (int(self.bounds[-1]),))
            for start in range(0, len(mapped), _PIECE):  # NaN, not holes: a hole would read as 0
                piece = slice(start, start + _PIECE)
                mapped[piece] = np.nan if self._values is None else self._values[piece]
            mapped.flush()
            fsync(file)
        self._is_new = False

    def _mapped(self, mode: Literal["r", "r+", "c"]) -> np.ndarray:
        try:
            mapped = np.lib.format.open_memmap(self.path, mode)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}. Delete it, and it is inferred again") from error
        if mapped.dtype != np.float32 or mapped.shape != (self.bounds[-1],):
            raise ValueError(f"{self.path} is not of these pairs: delete it, and it is inferred again")
        return mapped
