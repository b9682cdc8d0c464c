"""A guard process kills the trainer's workers after the trainer has ended, also after a SIGKILL.

The guard reads lines from a pipe whose other end only the trainer holds: ``+PID MARK`` when a worker has started,
``-PID MARK`` when it has been killed. When the pipe ends, the guard kills the remaining workers with their processes. A
worker cannot watch the trainer itself: a function that is busy in C stops every Python thread of the worker. A
parent-death signal from the kernel would not reach the processes that a function started.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import util
from typing import IO

MARK = "RLFT_FAST_WORKER"
"""A variable in the environment of a worker and its processes. Its value is the worker's own."""
_ROUNDS = 20
_EXEC_S = 0.05  # a process that is being started has no environment yet: for up to 14 ms beside five busy processes


class Guard:
    """The trainer's side of the pipe. The first worker starts the guard process."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._lock = threading.Lock()  # workers are started by threads
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, pid: int, mark: str) -> None:
        """Must be called when a worker has been started."""
        with self._lock:
            self._workers.add(f"{pid} {mark}")
            self._tell(f"+{pid} {mark}\n")

    def forget(self, pid: int, mark: str) -> None:
        """Must be called when a worker has been killed, before `join` frees its process id for another process."""
        with self._lock:
            self._workers.discard(f"{pid} {mark}")
            self._tell(f"-{pid} {mark}\n")

    def _tell(self, line: str) -> None:
        try:
            if self._process is None or self._process.poll() is not None:
                raise BrokenPipeError
            self._write(line)
        except BrokenPipeError:  # the guard has not been started, or has been killed, maybe just now
            self._process = self._start()
            self._write("".join(f"+{worker}\n" for worker in self._workers))

    def _write(self, lines: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(lines.encode())

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__]
        # Another thread may be starting a worker. With the worker's mark, the guard would end with the worker.
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True, env=unmarked)
        util.Finalize(process, _close, (process,), exitpriority=0)  # runs before multiprocessing waits for workers
        return process


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


GUARD = Guard()
"""The guard of this process."""


def end_worker(pid: int, mark: str) -> None:
    """Kills a worker, its process group, and on Linux all processes whose environment has its mark.

    A process that left the group, with a session of its own, has inherited the environment.

    Args:
        pid: of the worker, which may not have made its group yet.
        mark: the value of `MARK` in the worker's environment.
    """
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    entry = f"{MARK}={mark}".encode()
    for _ in range(_ROUNDS):  # a process that was found may have started another process meanwhile
        if not (marked := _marked(entry)):
            time.sleep(_EXEC_S)
            if not (marked := _marked(entry)):
                return
        for found in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)


def _marked(entry: bytes) -> list[int]:
    """Processes that have the entry in their environment. A process that has ended has no environment."""
    found = []
    for pid in os.listdir("/proc") if sys.platform == "linux" else []:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if pid.isdecimal() and entry in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def main(lines: IO[str]) -> None:
    """Main loop of the guard process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # only the end of the trainer ends the guard
        signal.signal(number, signal.SIG_IGN)
    workers: set[str] = set()
    for line in lines:
        (workers.add if line[0] == "+" else workers.discard)(line[1:])
    for worker in workers:
        pid, mark = worker.split()
        end_worker(int(pid), mark)


if __name__ == "__main__":
    main(sys.stdin)
