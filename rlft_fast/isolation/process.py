"""What a worker process has of its own: an environment, and a way with signals that ask a job to stop."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator

from rlft_fast.config import TOKEN_VARIABLE
from rlft_fast.isolation.guard import MARK

_STARTING = threading.Lock()


@contextlib.contextmanager
def environment_of_worker(mark: str) -> Iterator[None]:
    """A process that is started here has a mark, and not the token of the run's servers: it may run a model's code."""
    with _STARTING:  # threads start workers
        token = os.environ.pop(TOKEN_VARIABLE, None)
        os.environ[MARK] = mark
        try:
            yield
        finally:
            del os.environ[MARK]
            if token is not None:
                os.environ[TOKEN_VARIABLE] = token


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
