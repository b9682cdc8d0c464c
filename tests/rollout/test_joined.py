"""Requests of several threads are answered in one call of the generator, and never while weights change."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlft_fast.rollout import Request, SamplingParams
from rlft_fast.rollout.joined import JoinedRequests

PARAMS = SamplingParams(max_new_tokens=3)


def requests(first: int, count: int = 2) -> list[Request]:
    return [Request(row=i, token_ids=[first + i], seed=0, max_new_tokens=1) for i in range(count)]


def test_threads_share_a_call_and_have_their_own_answers():
    calls = []

    def answer(asked, params):
        calls.append(asked)
        return [request.token_ids[0] for request in asked]

    joined = JoinedRequests(answer)
    assert joined.answer(requests(0), PARAMS) == [0, 1]
    joined.gather_s = 0.2
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda i: joined.answer(requests(10 * i), PARAMS), range(8))]
    assert found == [[10 * i, 10 * i + 1] for i in range(8)]
    assert len(calls) <= 3
    assert [len({request.row for request in asked}) for asked in calls] == [len(asked) for asked in calls]


def test_other_params_are_another_call():
    seen = []
    joined = JoinedRequests(lambda asked, params: seen.append((len(asked), params)) or [None] * len(asked))
    joined.gather_s = 0.1
    other = SamplingParams(max_new_tokens=4)
    with ThreadPoolExecutor(2) as threads:
        [*threads.map(lambda params: joined.answer(requests(0), params), [PARAMS, other])]
    assert sorted(seen, key=str) == sorted([(2, PARAMS), (2, other)], key=str)


def test_each_thread_has_the_failure_of_its_call():
    def answer(asked, params):
        raise RuntimeError("out of order")

    joined = JoinedRequests(answer)
    joined.gather_s = 0.1
    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(joined.answer, requests(0), PARAMS) for _ in range(3)]:
            with pytest.raises(RuntimeError, match="out of order"):
                future.result(5)


def test_weights_come_before_the_next_call():
    """`alone` waits for the call under way, and no further call begins before it."""
    release, order = threading.Event(), []

    def answer(asked, params):
        order.append(asked[0].token_ids[0])
        release.wait(5)
        return [None] * len(asked)

    joined = JoinedRequests(answer)

    def sync() -> None:
        with joined.alone():
            order.append("weights")

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(joined.answer, requests(1), PARAMS)
        while order != [1]:
            pass
        weights = threads.submit(sync)
        while not joined._num_alone:
            pass
        second = threads.submit(joined.answer, requests(2), PARAMS)
        release.set()
        [future.result(5) for future in (first, weights, second)]
    assert order == [1, "weights", 2]
