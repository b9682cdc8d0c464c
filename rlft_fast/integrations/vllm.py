"""vLLM's processes find the backend by which CPUs and servers take weights. The entry point `register` tells them."""

import multiprocessing
import os
import signal
from contextlib import suppress
from functools import cache

from rlft_fast.world import end_with_parent

__all__ = ["BACKEND", "ENDS_WITH_PARENT", "end_with_starter", "register"]

ENDS_WITH_PARENT = "RLFT_FAST_ENDS_WITH_PARENT"
"""Environment variable: where it is set, vLLM's engines and workers end with the process that started them.

Its value may be the id of a process that starts engines, and does not end with its own parent."""

BACKEND = "rlft_fast"
"""Name of the backend: ``vllm serve --weight-transfer-config '{"backend": "rlft_fast"}'``."""


@cache
def register() -> None:
    """Registers the backend with vLLM, which imports it where it is used."""
    end_with_starter()
    with suppress(ImportError):  # an old vLLM, which works without the backend
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "rlft_fast.rollout.vllm.worker", "SocketWorker")


def end_with_starter() -> None:
    """In an engine or a worker: an engine waits for ever for a process that has died."""
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(ENDS_WITH_PARENT) in (None, str(os.getpid())):
        return
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent.pid:  # it has died already
        os.kill(os.getpid(), signal.SIGKILL)
