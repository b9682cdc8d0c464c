"""Sides of a comparison. Each side is a process of its own, so that memory is counted per side.

The driver holds a `Side`, and the process holds a `Reporter`. The driver asks for one step at a time. Both talk in
lines of JSON over the process's input and output.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.harness import reset_peak, status_bytes

ROOT = Path(__file__).parents[2]


@dataclass
class Side:
    """A process that makes one step on request.

    Attributes:
        name: the side's name in the report.
        process: the side's process.
        steps: the side's answers, one per step.
    """

    name: str
    process: subprocess.Popen
    steps: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, module: str, arguments: list[str], threads: int) -> Side:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        side = cls(name, process)
        side._read()  # it is ready
        return side

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        self.steps.append(self._read())
        self._read()  # it is ready again
        return self.steps[-1]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}, see its output above")
        return json.loads(line)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step but the first, which also makes the optimizer's state."""
        return [step["seconds"] for step in self.steps[1:]]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu_s(self) -> float:
        """Of the process's CPU seconds, which other processes of the machine change less than its seconds."""
        return statistics.median(step["cpu_seconds"] for step in self.steps[1:])

    @property
    def spread_s(self) -> float:
        return max(self.seconds) - min(self.seconds)

    @property
    def peak_mib(self) -> float:
        """The most that was resident during a step."""
        return max(step["peak_bytes"] for step in self.steps) / 2**20

    @property
    def memory_mib(self) -> float:
        """The peak, less the resident set after the imports: imported libraries are not part of a step."""
        return self.peak_mib - self.steps[0]["baseline_bytes"] / 2**20


def take_turns(sides: Sequence[Side], rounds: int) -> None:
    """Runs a first step of every side, then `rounds` rounds of timed steps, and stops all sides."""
    for number in range(1 + rounds):
        for side in sides:
            print(f"step {number}: {side.name}: {json.dumps(side.step())}", file=sys.stderr, flush=True)
    for side in sides:
        side.stop()


class Reporter:
    """Waits for the driver before a step, and reports seconds and memory after the step.

    Memory is counted from the resident set at construction; construct it after the imports.
    """

    def __init__(self) -> None:
        self.baseline_bytes = status_bytes("VmRSS")
        self._replies = os.fdopen(os.dup(1), "w")  # libraries may print, and the driver must not read their output
        os.dup2(2, 1)

    def start(self) -> bool:
        """Whether another step is wanted."""
        self.say({"ready": True})
        if not sys.stdin.readline():
            return False
        reset_peak()
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()
        return True

    def finish(self, peak_bytes: float = 0, **facts: Any) -> None:
        """Reports a step.

        Args:
            peak_bytes: the highest peak of a part of the step, if the step has restarted the peak for its parts.
            facts: what else is reported.
        """
        seconds, cpu_seconds = time.perf_counter() - self._start_s, time.process_time() - self._start_cpu_s
        peak_bytes = max(peak_bytes, status_bytes("VmHWM"))
        memory = {"peak_bytes": peak_bytes, "baseline_bytes": self.baseline_bytes}
        self.say({"seconds": seconds, "cpu_seconds": cpu_seconds, **facts, **memory})

    def say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._replies, flush=True)
