"""When parts of a run worked: notes of any thread, which the run takes after each step."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_MOST = 100_000  # notes that nobody takes are forgotten


class Span(NamedTuple):
    """One piece of work."""

    phase: str
    worker: str
    """Empty: this process."""
    start: float
    """Seconds since the epoch, by the clock of the worker's machine."""
    end: float


class Spans:
    """Collects the work of this process, and of workers that it drives."""

    def __init__(self) -> None:
        self._noted: deque[Span] = deque(maxlen=_MOST)

    @contextlib.contextmanager
    def noted(self, phase: str) -> Iterator[None]:
        """Notes the time inside as work of this process, also if it fails."""
        start, started = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(phase, "", start, start + time.perf_counter() - started))

    def add(self, span: Span) -> None:
        """Notes work that has ended."""
        self._noted.append(span)

    def take(self) -> list[Span]:
        """What was noted since the last call."""
        return [self._noted.popleft() for _ in range(len(self._noted))]


SPANS = Spans()
