"""A lock on ``output_dir/.lock`` allows one run per folder.

The system releases the lock when the process of the run ends, also after a crash. The lock is a POSIX record lock, so
processes that the run forks do not inherit it. Network file systems share it between machines: NFS does, and Lustre
does with the mount option ``flock``.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rlft_fast.files import acquire

NAME = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a folder inside the context. The lock file names this process and is removed at the end.

    Args:
        directory: the folder, which is created if it is missing.

    Raises:
        ValueError: another process holds the lock. The message names the process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with acquire(directory / NAME, lambda file: _lock(file, fcntl.LOCK_EX, directory)) as file:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        file.truncate(0)
        file.write(json.dumps(holder) + "\n")
        file.flush()
        try:
            yield
        finally:
            (directory / NAME).unlink(missing_ok=True)


def require_unlocked(directory: Path) -> None:
    """Raises the ValueError of `locked` if another process holds the folder's lock. Writes nothing."""
    with contextlib.suppress(FileNotFoundError), open(directory / NAME, encoding="utf-8") as file:
        _lock(file, fcntl.LOCK_SH, directory)


def is_in_use(directory: Path) -> bool:
    """Whether another process holds the folder's lock: a run goes on there."""
    try:
        require_unlocked(directory)
    except ValueError:
        return True
    return False


def running_since(directory: Path) -> float | None:
    """When the process that holds the folder's lock took it, in seconds since the epoch; None if no process does."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / NAME).stat().st_mtime if is_in_use(directory) else None
    return None


def _lock(file: IO[str], kind: int, directory: Path) -> None:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise ValueError(
                f"{directory} is in use by {_describe(file)}: wait until that run has ended, stop it, or name another "
                "output_dir"
            ) from None
        warnings.warn(
            f"{file.name} cannot be locked ({error.strerror}), so a second run in this folder would not be noticed",
            stacklevel=4,
        )


def _describe(file: IO[str]) -> str:
    """Describes the process that wrote the file. The file may hold any text."""
    try:
        file.seek(0)
        holder = json.loads(file.read(1000))
        return f"process {int(holder['pid'])} on {holder['host']!a}, which has run since {holder['since']!a}"
    except (ValueError, KeyError, TypeError):
        return "another process"
