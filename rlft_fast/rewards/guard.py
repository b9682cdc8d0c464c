"""A process that ends the trainer's workers when the trainer has ended, also by SIGKILL.

It reads lines from a pipe whose other end only the trainer has: ``+PID`` when a worker starts, ``-PID`` when it has
ended. At the pipe's end it kills the workers that are left, with everything in their process groups. A worker cannot do
that itself, since a function that is busy in C keeps every thread of it from running; and a parent-death signal, which
the kernel would send, does not reach the processes that a function began.
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
    """The trainer's side. It starts the process with the first worker."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._lock = threading.Lock()  # workers are started by threads
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, pid: int) -> None:
        """To be called when a worker has been started."""
        with self._lock:
            self._pids.add(pid)
            self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """To be called when a worker has been killed, before its number is free for another process."""
        with self._lock:
            self._pids.discard(pid)
            self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:  # somebody has killed it
            self._process = self._start()
            line = "".join(f"+{pid}\n" for pid in self._pids)
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__]
        process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)
        util.Finalize(process, _close, (process,), exitpriority=0)  # before multiprocessing waits for the workers
        return process


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


GUARD = Guard()
"""Of this process."""


def end_worker(pid: int) -> None:
    """Kills a worker with its group, which it may not have come to have yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def main(lines: IO[str]) -> None:
    """The guard's side."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends it is the end of the trainer
        signal.signal(number, signal.SIG_IGN)
    pids: set[int] = set()
    for line in lines:
        (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
    for pid in pids:
        end_worker(pid)


if __name__ == "__main__":
    main(sys.stdin)
