"""Worker processes: how they start, how they end with all that they have started, and what signals do to them."""

import contextlib
import functools
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from rlft_fast.isolation.guard import GUARD, MARK, end_worker

_STARTING = threading.Lock()
_HASH_SEED = "PYTHONHASHSEED"


class WorkerProcess:
    """A new process, whose end the guard of this process sees to.

    Args:
        target: main function of the process.
        args: its arguments. One end of a pipe follows them.

    Attributes:
        connection: the other end of the pipe.
        process: as multiprocessing has it.
        pid: of the process.
    """

    def __init__(self, target: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=target, args=(*args, other))
        self._mark = secrets.token_hex(16)
        resource_tracker.ensure_running()  # otherwise the first worker starts it, and it inherits the mark
        with _environment_of_worker(self._mark):
            self.process.start()
        other.close()  # the worker then holds the only other end: when it ends, reading raises EOFError
        assert self.process.pid is not None
        self.pid = self.process.pid
        # Daemons may start no processes of their own. At the end of the trainer, the guard kills the workers first.
        GUARD.watch(self.pid, self._mark)

    def strike(self) -> None:
        """Kills the process, and the processes that it has started. `kill` must follow."""
        end_worker(self.pid, self._mark)

    def kill(self) -> None:
        """Kills the process, and the processes that it has started, and waits for its end."""
        self.strike()
        GUARD.forget(self.pid, self._mark)
        self.process.join()
        self.connection.close()


@contextlib.contextmanager
def _environment_of_worker(mark: str) -> Iterator[None]:
    """A process that is started here has a mark, and not the tokens of the run's servers: it may run a model's code.

    Its sets of texts have the order of any other worker's: what it draws from one can be drawn again.
    """
    # Here: workers import this module, and the configuration takes 0.3 s.
    from rlft_fast.config import REWARD_TOKEN_VARIABLE, TOKEN_VARIABLE

    with _STARTING:  # threads start workers
        given = {MARK: mark, _HASH_SEED: os.environ.get(_HASH_SEED, "0")}
        names = (TOKEN_VARIABLE, REWARD_TOKEN_VARIABLE, *given)
        own = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ.update(given)
        try:
            yield
        finally:
            for name in given:
                del os.environ[name]
            os.environ.update(own)


def outlive_requests_to_stop() -> None:
    """Ignores signals that ask a job to stop: the trainer finishes its step first, and the step needs the worker.

    Schedulers send such signals to all processes of a job. Processes that the user's code starts can still be
    terminated: `exec` resets a handler, and the fork hooks here do the same. SIGTERM is blocked during a fork, because
    Python drops signals that arrive in the child before it is set up.
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
