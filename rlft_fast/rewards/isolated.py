"""Reward functions in worker processes: one that hangs or crashes costs a sample, not the run."""

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import queue
import signal
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from rlft_fast.rewards.guard import GUARD, end_worker
from rlft_fast.rewards.loading import load_reward
from rlft_fast.rewards.scoring import RewardError, compute_rewards

_START_SECONDS = 120.0  # for imports, which are not the function's own time
_SHOWN = 1000  # characters of an error


class IsolatedReward:
    """A reward function in worker processes, asked for one sample at a time; looks like the function itself.

    Args:
        spec: see `load_reward`.
        timeout_s: seconds for one sample; a function that takes longer, raises, or takes its process down gives None.
        num_workers: processes, each with one sample at a time.

    Raises:
        ValueError: there is no such function.
    """

    def __init__(self, spec: str, timeout_s: float, num_workers: int = 1) -> None:
        function = load_reward(spec)  # an unknown one is refused here
        self.__qualname__ = getattr(function, "__qualname__", spec)
        with contextlib.suppress(ValueError):  # compiled functions may have none
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
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """B rewards, None where the function failed, of which a warning says how."""
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
        return [answer.get("reward") for answer in answers]

    def close(self) -> None:
        """Ends the workers, also in the middle of a sample; the next call starts new ones."""
        for worker in list(self._busy):
            end_worker(worker.pid)  # the thread that waits for it does the rest
        for _ in range(self._idle.qsize()):
            if (worker := self._idle.get()) is not None:
                worker.kill()
            self._idle.put(None)

    def _ask(self, sample: tuple[Any, ...]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is not None and not worker.process.is_alive():  # what a function leaves behind may have ended it
                worker.kill()
                worker = None
            worker = worker or _Worker(self.spec)
            self._busy.add(worker)
            return worker.ask(sample, self.timeout_s)
        finally:
            if worker is not None:
                self._busy.discard(worker)
            self._idle.put(worker if worker is not None and worker.is_usable else None)


class _Worker:
    """One process, which answers one question after the other until it fails to."""

    def __init__(self, spec: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, other), daemon=True)
        self.process.start()
        other.close()  # so that the end of the process is the end of the pipe
        assert self.process.pid is not None
        self.pid = self.process.pid
        GUARD.watch(self.pid)
        self.is_usable = True
        self.is_ready = False

    def ask(self, sample: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        if not self.is_ready:
            ready = self._receive(_START_SECONDS)
            if not self.is_usable:
                return ready
            self.is_ready = True
        return self._receive(timeout_s, sample)

    def _receive(self, timeout_s: float, sample: tuple[Any, ...] | None = None) -> dict[str, Any]:
        """What the process answers, to a sample if one is given.

        JSON, not a pickle: a function may have run what a model wrote.
        """
        try:
            if sample is not None:
                self.connection.send(sample)
            if self.connection.poll(timeout_s):
                answer = json.loads(self.connection.recv_bytes())
                if isinstance(answer, dict):
                    return answer
                failure = "it wrote something that is no answer"
            else:
                failure = f"no answer within {timeout_s:g} s"
        except ValueError:
            failure = "it wrote something that is no answer"
        except (EOFError, OSError):
            self.process.join(1.0)
            failure = f"its process ended with exit code {self.process.exitcode}"
        self.kill()
        return {"failure": failure}

    def kill(self) -> None:
        """Ends the process, and with it those that the function began."""
        self.is_usable = False
        with contextlib.suppress(ProcessLookupError):  # it may not have come to have a group yet
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        GUARD.forget(self.pid)
        self.process.join()
        self.connection.close()


def _serve(spec: str, connection: Connection) -> None:
    """The worker's main loop."""
    os.setsid()  # a group of its own, of everything that a function may begin
    pid = os.getpid()
    _outlive_requests_to_stop()
    function = load_reward(spec)
    connection.send_bytes(b"{}")
    while True:
        try:
            prompts, completions, completion_ids, columns = connection.recv()
        except EOFError:
            return
        answer = _score(function, prompts, completions, completion_ids, columns)
        if os.getpid() != pid:  # forked by the function: a second answer would be taken for that to the next sample
            os._exit(0)
        connection.send_bytes(json.dumps(answer).encode())


def _outlive_requests_to_stop() -> None:
    """The trainer finishes its step, which needs rewards; schedulers send their signals to all processes of a job.

    A function's own processes can be terminated: `exec` resets a handler, and so does `fork` here. The signal is
    blocked during a fork, because Python drops signals that arrive in the child before it is set up.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])

    def reset() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _score(
    function: Any, prompts: list[str], completions: list[str], ids: list[Any], columns: Mapping[str, list[Any]]
) -> dict[str, Any]:
    try:
        return {"reward": compute_rewards(function, prompts, completions, ids, columns)[0]}
    except RewardError as error:
        return {"failure": str(error)[:_SHOWN]}
