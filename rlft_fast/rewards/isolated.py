"""Reward functions run in worker processes. A function that hangs or crashes costs a sample, not the run.

pebble's ProcessPool is not as safe. The trainer would unpickle, and so run, the message of a worker. Workers would
survive a SIGKILL of the trainer. Processes that a function started would survive its timeout. Here an answer is JSON of
bounded length.
"""

import contextlib
import inspect
import json
import os
import queue
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from rlft_fast.isolation import WorkerProcess, outlive_requests_to_stop
from rlft_fast.rewards.loading import load_reward
from rlft_fast.rewards.scoring import FAILED, RewardError, Text, compute_rewards, is_reward

_END_S = 10.0  # between the end of a worker's pipe and its own
_START_S = 120.0  # imports at the start of a worker do not count as time of the function
_LONGEST_ERROR = 1000  # characters
_LONGEST_ANSWER = 100_000  # bytes; a character takes at most 12 in JSON


class IsolatedReward:
    """A reward function that runs in worker processes, one sample per call. It is called like the function itself.

    Args:
        spec: name of the function, as in `load_reward`.
        timeout_s: seconds for one sample. The function fails if it takes longer, raises, or ends its process.
        num_workers: number of processes. Each process scores one sample at a time.

    Raises:
        ValueError: there is no such function.
    """

    def __init__(self, spec: str, timeout_s: float, num_workers: int = 1) -> None:
        function = load_reward(spec)  # refuses an unknown function before the first sample
        self.__qualname__ = getattr(function, "__qualname__", spec)
        with contextlib.suppress(ValueError):  # a compiled function may have no signature
            self.__signature__ = inspect.signature(function, follow_wrapped=False)
        self.spec = spec
        self.timeout_s = timeout_s
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(None)  # started when needed
        self._busy: set[_Worker] = set()
        self._pool = ThreadPoolExecutor(num_workers)

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """B rewards, `FAILED` where the function failed. A warning counts the failures and quotes the first."""
        samples = [
            ([prompt], [completion], [ids], {name: [values[i]] for name, values in columns.items()})
            for i, (prompt, completion, ids) in enumerate(zip(prompts, completions, completion_ids, strict=True))
        ]
        answers = list(self._pool.map(self._ask, samples))
        if failures := [answer["failure"] for answer in answers if "failure" in answer]:
            warnings.warn(
                f"{len(failures)} of {len(samples)} samples have no reward from {self.spec}: {failures[0]}",
                stacklevel=2,
            )
        return [FAILED if "failure" in answer else answer.get("reward") for answer in answers]

    def close(self) -> None:
        """Kills the workers, also in the middle of a sample. The next call starts new workers."""
        for worker in list(self._busy):
            worker.strike()  # the thread that waits for its answer cleans up
        for _ in range(self._idle.qsize()):
            if (worker := self._idle.get()) is not None:
                worker.kill()
            self._idle.put(None)

    def _ask(self, sample: tuple[Any, ...]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is not None and not worker.process.is_alive():  # the function may have ended it
                worker.kill()
                worker = None
            worker = worker or _Worker(self.spec)
            self._busy.add(worker)
            return worker.ask(sample, self.timeout_s)
        finally:
            if worker is not None:
                self._busy.discard(worker)
            self._idle.put(worker if worker is not None and worker.is_usable else None)


_NO_ANSWER = "it wrote something that is no answer"


class _Worker(WorkerProcess):
    """One worker process. It scores one sample after the other, and is killed after its first failure to answer."""

    def __init__(self, spec: str) -> None:
        super().__init__(_serve, spec)
        self.is_usable = True
        self.is_ready = False

    def ask(self, sample: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        if not self.is_ready:
            ready = self._receive(_START_S)
            if not self.is_usable:
                return ready
            self.is_ready = True
        return self._receive(timeout_s, sample)

    def _receive(self, timeout_s: float, sample: tuple[Any, ...] | None = None) -> dict[str, Any]:
        """Sends the sample, if there is one, and returns the answer: {"reward": ...} or {"failure": ...}.

        The answer is JSON, not a pickle: the function may have run code that a model wrote.
        """
        try:
            if sample is not None:
                self.connection.send(sample)
            if self.connection.poll(timeout_s):
                answer = json.loads(self._read(timeout_s))
                if _is_answer(answer):
                    return answer
                failure = _NO_ANSWER
            else:
                failure = f"no answer within {timeout_s:g} s"
        except (ValueError, RecursionError):
            failure = _NO_ANSWER
        except (EOFError, OSError):  # the pipe has ended, or the message is too long, and nothing more is read
            if self.connection.readable:
                self.process.join(_END_S)
            exit_code = self.process.exitcode
            failure = _NO_ANSWER if exit_code is None else f"its process ended with exit code {exit_code}"
        self.kill()
        return {"failure": failure}

    def _read(self, timeout_s: float) -> bytes:
        """Reads one message. The worker is killed if the message has begun but is not complete in time."""
        timer = threading.Timer(timeout_s, self.strike)
        timer.start()
        try:
            return self.connection.recv_bytes(_LONGEST_ANSWER)
        finally:
            timer.cancel()
            timer.join()

    def kill(self) -> None:
        """Kills the process, and the processes that the function started."""
        self.is_usable = False
        super().kill()


def _is_answer(answer: Any) -> bool:
    """Whether `_serve` can have sent it: the function can write to the connection, too."""
    if not isinstance(answer, dict) or len(answer) > 1 or not answer.keys() <= {"reward", "failure"}:
        return False
    reward, failure = answer.get("reward"), answer.get("failure", "")
    return (reward is None or is_reward(reward)) and isinstance(failure, str)


def _serve(spec: str, connection: Connection) -> None:
    """Main loop of a worker."""
    os.setsid()  # a process group of its own, which also holds the processes that the function starts
    pid = os.getpid()
    outlive_requests_to_stop()
    function = load_reward(spec)
    connection.send_bytes(b"{}")
    while True:
        try:
            prompts, completions, completion_ids, columns = connection.recv()
        except EOFError:
            return
        answer = _score(function, prompts, completions, completion_ids, columns)
        if os.getpid() != pid:  # the function forked: this answer would be read as the next sample's
            os._exit(0)
        connection.send_bytes(json.dumps(answer).encode())


def _score(
    function: Any, prompts: list[Text], completions: list[Text], ids: list[Any], columns: Mapping[str, list[Any]]
) -> dict[str, Any]:
    try:
        return {"reward": compute_rewards(function, prompts, completions, ids, columns)[0]}
    except RewardError as error:
        return {"failure": str(error)[:_LONGEST_ERROR]}
