"""A guard process kills the trainer's workers after the trainer has ended, also after a SIGKILL.

The guard reads lines from a pipe whose other end only the trainer holds: ``+PID`` when a worker has started, ``-PID``
when it has been killed. When the pipe ends, the guard kills the process groups of the remaining workers. A worker
cannot watch the trainer itself: a function that is busy in C stops every Python thread of the worker. A parent-death
signal from the kernel would not reach the processes that a function started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import util
from typing import IO


class Guard:
    """The trainer's side of the pipe. The first worker starts the guard process."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._lock = threading.Lock()  # workers are started by threads
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, pid: int) -> None:
        """Must be called when a worker has been started."""
        with self._lock:
            self._pids.add(pid)
            self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Must be called when a worker has been killed, before `join` frees its process id for another process."""
        with self._lock:
            self._pids.discard(pid)
            self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:  # the guard may have been killed
            self._process = self._start()
            line = "".join(f"+{pid}\n" for pid in self._pids)
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__]
        process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)
        util.Finalize(process, _close, (process,), exitpriority=0)  # runs before multiprocessing waits for workers
        return process


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


GUARD = Guard()
"""The guard of this process."""


def end_worker(pid: int) -> None:
    """Kills the process group of a worker, and the worker itself, which may not have made its group yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def main(lines: IO[str]) -> None:
    """Main loop of the guard process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # only the end of the trainer ends the guard
        signal.signal(number, signal.SIG_IGN)
    pids: set[int] = set()
    for line in lines:
        (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
    for pid in pids:
        end_worker(pid)


if __name__ == "__main__":
    main(sys.stdin)
