"""Runs in processes of their own, which tests watch and kill."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
ALONE = [sys.executable, "-m", "rlft_fast"]


def ancestry(pid: int) -> set[str]:
    found: set[str] = set()
    while pid > 1 and str(pid) not in found:
        found.add(str(pid))
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            break
    return found


def wait_for(condition: Callable[[], bool], run: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie counts as ended: it stays in the process table until its new parent reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_ends(pids: list[int]) -> None:
    """The kernel ends a killed process a moment later. What is not killed sleeps for a minute."""
    deadline = time.perf_counter() + 5.0
    while any(is_running(pid) for pid in pids) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]
