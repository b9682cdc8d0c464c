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
