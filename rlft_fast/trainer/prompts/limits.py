"""What a chat template may take. A template is code of the model's, and may loop or grow without end."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 1.5  # of CPU time for one conversation; templates take milliseconds
_FREE_SECONDS, _MEAN_SECONDS = 10.0, 0.02  # for all conversations, and for each of them
_MEMORY = 2 << 30  # bytes
_THREADS_RESERVE = (128 << 20) * (os.cpu_count() or 1)  # bytes of addresses, of threads that tokenize beside a template
_SIZE_HOLDS = 0.05  # seconds; to ask for the size of the process for each conversation takes a tenth of the time


class Limits:
    """Limits of one chat template, over all conversations that it is applied to.

    Args:
        memory: whether memory is limited. The limit holds for all threads of the process, so it is for the time before
            a run starts: a thread that writes a checkpoint would meet it.
    """

    def __init__(self, *, memory: bool = True) -> None:
        self.memory = memory
        self.seconds = 0.0
        self.num_conversations = 0
        self._is_timed = False
        self._started: float | None = None  # of the conversation, in CPU time of the main thread
        self._inside = self._outside = (0, 0)  # limits of memory
        self._inside_ends = 0.0

    @contextmanager
    def many(self) -> Iterator[None]:
        """The template is applied to many conversations inside, each in `one`, which share a timer.

        A timer for each of them takes a third of the time of a short conversation.
        """
        if self._is_timed or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_timed, self._outside, self._inside_ends = True, resource.getrlimit(resource.RLIMIT_AS), 0.0
        before = signal.signal(signal.SIGVTALRM, self._stop)
        timer = signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS / 10, SECONDS / 10)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
            signal.signal(signal.SIGVTALRM, before)
            self._is_timed = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """The template is applied to one more conversation inside.

        Most calls of C code are interrupted, too: a power of integers, for example. In other threads than the main
        thread nothing is limited, because Python handles signals in the main thread alone.

        Raises:
            TimeoutError: the conversation takes too long, or the mean of all conversations does.
            MemoryError: the conversation takes too much memory.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._is_timed:
            with self.many(), self.one():
                yield
            return
        outer, started = self._started, time.thread_time()
        limits_memory = self.memory and outer is None
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, self._limits_inside())
        self._started = started
        try:
            yield
        except MemoryError as error:
            if not limits_memory or self._inside == self._outside:
                raise
            raise MemoryError(f"it takes more than {_MEMORY >> 30} GiB of memory") from error
        finally:
            self._started = outer  # first: from here on, no timer raises an error
            if limits_memory:
                resource.setrlimit(resource.RLIMIT_AS, self._outside)
        self.seconds += time.thread_time() - started
        self.num_conversations += 1
        if self.seconds > _FREE_SECONDS + _MEAN_SECONDS * self.num_conversations:
            raise TimeoutError(
                f"it has taken {self.seconds:.0f} seconds of CPU time for {self.num_conversations} conversations, and "
                f"may take {1000 * _MEAN_SECONDS:.0f} ms for each of many"
            )

    def _stop(self, number: int, frame: Any) -> None:
        """Raises TimeoutError where a conversation takes too long; again and again, if the error is swallowed."""
        if self._started is not None and time.thread_time() - self._started > SECONDS:
            raise TimeoutError(f"it takes more than {SECONDS} seconds of CPU time")

    def _limits_inside(self) -> tuple[int, int]:
        """Limits with which a process that takes much more than now gets a MemoryError."""
        if (now := time.monotonic()) >= self._inside_ends:
            self._inside, self._inside_ends = _limits_above(_own_bytes(), self._outside), now + _SIZE_HOLDS
        return self._inside


def _limits_above(own_bytes: int | None, outside: tuple[int, int]) -> tuple[int, int]:
    """Limits of memory for a process of this size; None: the limits stay as they are."""
    if own_bytes is None:
        return outside
    soft, hard = outside
    most = own_bytes + _THREADS_RESERVE + _MEMORY
    return min(limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY), hard


def _own_bytes() -> int | None:
    """Size of the process; None on systems other than Linux."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None
