"""Threads for calls that may hang: they do not keep the process alive."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Calls functions in threads, in the order in which they are submitted.

    Python waits at its exit for the threads of `concurrent.futures`. It does not wait for these.

    Args:
        count: of threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Calls the function when a thread is free. The future has its result, or what it raised."""
        future: Future[T] = Future()
        self._waiting.put((future, lambda: function(*arguments)))
        return future

    def close(self) -> None:
        """Cancels the calls that no thread has begun."""
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, timeout_s: float) -> bool:
        """After `close`: returns whether all threads have ended, after so many seconds at the latest."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            future, function = call
            if self._is_closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, function  # a thread that waits must not keep a result
