"""The head of the Ray cluster that this process is connected to, and what to do when it is gone.

Without a head (its process is the GCS), workers still answer their driver for a while, but Ray can neither start nor
end them. Ray would end the driver, too, after 60 s and without an exception.
"""

import contextlib
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlft_fast.errors import RunError

_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's: how long a process lives without a head
_OWN_PATIENCE_S, _RAYS_PATIENCE_S = 600, 60
_EVERY_S = 1.0
_ANSWER_S = 5.0  # for a connection
_LOST_AFTER_S = {True: 3.0, False: 30.0}  # by whether the cluster is this process's own: another's head may restart


class HeadLostError(RunError):
    """The head of the Ray cluster is gone. Ray can neither start nor end workers."""


class Head:
    """Asks the head every second whether it takes connections. There is one cluster per process, and so one `HEAD`.

    Attributes:
        loss: the error to end with; None while the head is there.
    """

    def __init__(self) -> None:
        self.loss: HeadLostError | None = None
        self._address = ""
        self._is_own = False
        self._lost_at = math.inf
        self._notify: Callable[[HeadLostError], None] = _warn

    def watch(self, address: str, *, is_own: bool) -> None:
        """Watches from now on, in a thread, until the head is lost or this process leaves the cluster.

        Args:
            address: of the head, ``host:port``.
            is_own: this process has started the cluster.
        """
        self.loss, self._lost_at, self._address, self._is_own = None, math.inf, address, is_own
        threading.Thread(target=self._watch, args=(address,), name="head of Ray", daemon=True).start()

    def follow(self) -> None:
        """Watches the head of the cluster that this process is connected to, if it watches no head or another one.

        A process may leave a cluster and join another one by Ray's own functions.
        """
        import ray

        if ray.util.client.ray.is_connected():  # such a driver is a client of the cluster, not a part of it
            return
        address = ray.get_runtime_context().gcs_address
        if address != self._address:
            self.watch(address, is_own=False)

    @contextlib.contextmanager
    def listening(self, notify: Callable[[HeadLostError], None]) -> Iterator[None]:
        """Inside, the loss is told by `notify`, in the watching thread, instead of by a warning."""
        self._notify = notify
        if self.loss is not None:
            notify(self.loss)
        try:
            yield
        finally:
            self._notify = _warn

    def answers(self) -> bool:
        """Whether the head takes a connection now; True if nothing is watched."""
        host, _, port = self._address.rpartition(":")
        if not host:
            return True
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True

    def require(self) -> None:
        """Raises HeadLostError if the head does not answer: what would ask it next would wait for minutes."""
        if not self.answers():
            raise self.loss or self._error()

    def has_lost_workers(self) -> bool:
        """Whether the head is gone for so long that Ray has ended the workers, which nobody is told without a head."""
        patience_s = float(os.environ.get(_PATIENCE, _RAYS_PATIENCE_S)) if self._is_own else _RAYS_PATIENCE_S
        return time.monotonic() - self._lost_at > patience_s

    def end_own_processes(self) -> None:
        """Without its head, a cluster of this process's own cannot end itself."""
        if self._is_own and self.loss is not None:
            raylets = [pid for pid, name in _children(os.getpid()) if name == "raylet"]
            for pid in [*raylets, *(child for raylet in raylets for child, _ in _children(raylet))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _watch(self, address: str) -> None:
        import ray

        answered_at = time.monotonic()
        while ray.is_initialized() and self._address == address:
            if self.answers():
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > _LOST_AFTER_S[self._is_own] and ray.is_initialized():
                self._lost_at, self.loss = answered_at, self._error()
                self._notify(self.loss)
                return
            time.sleep(_EVERY_S)

    def _error(self) -> HeadLostError:
        advice = "" if self._is_own else ". Start the cluster again"
        return HeadLostError(
            f"the head of the Ray cluster at {self._address} does not answer: its process has ended, or its machine is "
            f"gone{advice}"
        )


def keep_drivers() -> None:
    """Has this process, and the processes of a cluster that it starts, outlive the head. Call it before Ray's import.

    A setting of the user's stays.
    """
    os.environ.setdefault(_PATIENCE, str(_OWN_PATIENCE_S))


def end_actors(actors: list[Any]) -> None:
    """Ends actors of `Leaving` at once. Without a head, each actor ends itself after its present call."""
    import ray

    leaving = []
    has_head = HEAD.answers()
    for actor in actors:
        with contextlib.suppress(Exception):  # it may be dead, or the cluster gone
            if has_head:
                ray.kill(actor)
            else:
                leaving.append(actor.leave.remote())
    if leaving:
        with contextlib.suppress(Exception):
            ray.wait(leaving, num_returns=len(leaving), timeout=5)


class Leaving:
    """Base of an actor class."""

    def leave(self) -> None:
        """Ends this process at once."""
        os._exit(0)


def _children(parent: int) -> list[tuple[int, str]]:
    """Process ids and names; none on systems without /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("(")[2].rpartition(") ")
            if int(rest.split()[1]) == parent:
                found.append((int(path.parent.name), name))
    return found


def _warn(loss: HeadLostError) -> None:
    warnings.warn(f"{loss}. Save what is needed: Ray ends workers that have no head", stacklevel=1)


HEAD = Head()
"""The head of this process's cluster."""
