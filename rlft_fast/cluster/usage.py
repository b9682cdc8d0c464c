"""What calls take of the workers: their time and their memory."""

from collections.abc import Iterable
from typing import NamedTuple, Self


class Usage(NamedTuple):
    """What one call takes of one worker."""

    peak_bytes: int | None
    """Highest memory of the process during the call; None: not known."""
    seconds: float
    busy_seconds: float
    """The part of the time in which the worker did its own share and waited for no other; 0: not measured."""
    start: float = 0.0
    """Seconds since the epoch, by the clock of the worker's machine."""


class TotalUsage(NamedTuple):
    """What all calls of some workers take."""

    peak_bytes: int | None = None
    """Of the worker with the highest peak."""
    seconds: float = 0.0
    """Of the worker with the most. Groups count as working at the same time."""
    busy_seconds: tuple[float, ...] = ()
    """By worker; empty where it is not measured."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Worker, start and end of each call, in seconds since the epoch."""

    @classmethod
    def of_workers(cls, calls: Iterable[Iterable[Usage]], name: str = "") -> Self:
        """The total, from the calls of each worker of a group of this name."""
        workers = [[*own] for own in calls]
        busy = tuple(sum(call.busy_seconds for call in own) for own in workers)
        return cls(
            _highest(call.peak_bytes for own in workers for call in own),
            max((sum(call.seconds for call in own) for own in workers), default=0.0),
            busy if any(busy) else (),
            tuple((f"{name} {i}", x.start, x.start + x.seconds) for i, own in enumerate(workers) for x in own),
        )

    @classmethod
    def of_groups(cls, groups: Iterable["TotalUsage"]) -> Self:
        """The total of several groups."""
        every = [*groups]
        return cls(
            _highest(group.peak_bytes for group in every),
            max((group.seconds for group in every), default=0.0),
            tuple(seconds for group in every for seconds in group.busy_seconds),
            tuple(span for group in every for span in group.spans),
        )


def _highest(peaks: Iterable[int | None]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)
