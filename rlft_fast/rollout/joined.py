"""Calls of several threads to something that does one thing at a time."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from rlft_fast.rollout.types import Answers, Request, SamplingParams


class JoinedRequests:
    """Answers the requests of several threads. Requests that wait at the same time share a call of the generator.

    Args:
        answer: answers requests; it is called by one thread at a time.

    Attributes:
        gather_s: how long a call waits for the requests of other threads [s].
    """

    def __init__(self, answer: Callable[[Sequence[Request], SamplingParams], Answers]) -> None:
        self._answer = answer
        self.gather_s = 0.0
        self._waiting: list[_Asked] = []
        self._changed = threading.Condition()
        self._is_busy = False
        self._num_alone = 0  # calls of `alone` that wait or run: no answers are begun

    def answer(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """The answers to these requests, after the calls of the generator before. Raises what its call raised."""
        mine = _Asked(requests, params)
        with self._changed:
            self._waiting.append(mine)
        while not mine.future.done():
            with self._changed:
                self._changed.wait_for(lambda: mine.future.done() or not (self._is_busy or self._num_alone))
                if mine.future.done():
                    break
                self._is_busy = True
            try:
                self._answer_waiting()
            finally:
                self._release()
        return mine.future.result()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the generator answers nothing. Waits for the call under way alone."""
        with self._changed:
            self._num_alone += 1
            self._changed.wait_for(lambda: not self._is_busy)
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._num_alone -= 1
            self._release()

    def _release(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def _answer_waiting(self) -> None:
        """Answers all requests that wait and are sampled as the first of them is."""
        if self.gather_s:
            time.sleep(self.gather_s)
        with self._changed:
            params = self._waiting[0].params
            asked = [one for one in self._waiting if one.params == params]
            self._waiting = [one for one in self._waiting if one.params != params]
        try:
            answers = iter(self._answer(_of_all(asked), params))
            for one in asked:
                one.future.set_result([next(answers) for _ in one.requests])
        except BaseException as error:
            for one in asked:
                if not one.future.done():
                    one.future.set_exception(error)
            if not isinstance(error, Exception):  # of this thread
                raise


class _Asked:
    """The requests of a thread."""

    def __init__(self, requests: Sequence[Request], params: SamplingParams) -> None:
        self.requests, self.params = requests, params
        self.future: Future[Answers] = Future()


def _of_all(asked: Sequence[_Asked]) -> Sequence[Request]:
    """The requests of all threads, whose rows do not meet."""
    if len(asked) == 1:
        return asked[0].requests
    found: list[Request] = []
    num_rows = 0
    for one in asked:
        found += [dataclasses.replace(request, row=num_rows + request.row) for request in one.requests]
        num_rows += 1 + max((request.row for request in one.requests), default=-1)
    return found
