"""`python -m benchmarks.bench_engine`: one GRPO update of our engine beside TRL's; writes benchmarks/results/engine.*.

The work is that of `engine_workload`. Each side lives in a process of its own (`engine_sides`), so that its memory is
its own, and makes one update whenever it is told to: A B C, A B C, ... The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
OURS = "rlft_fast"
# transformers' default batch size. Other sizes and Liger's kernels were tried, see METHOD in engine_report.
_EIGHT = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
_FOUR = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("ours", {"max_tokens": 384}),
    "rlft_fast, after inferring old log-probs": ("ours", {"max_tokens": 384, "infers": True}),
    "TRL, 8 sequences": ("trl", _EIGHT | {"gradient_checkpointing": False}),
    "TRL, 8 sequences, recomputing": ("trl", _EIGHT | {"gradient_checkpointing": True}),
    "TRL, 4 sequences": ("trl", _FOUR | {"gradient_checkpointing": False}),
}
_DEFAULT = [name for name in SIDES if "recomputing" not in name]  # which takes twice as long
# Of loss and gradient norm. torch's float32 norm, which TRL reports, is itself 2e-5 off on tensors of 28 M elements: of
# the same gradients it gives 61.63408, in float64 it is 61.63536, and our grad_norm gives 61.63536.
TOLERANCE = 1e-4


@dataclass
class Side:
    """A process that makes updates when told to, see `engine_sides`.

    Attributes:
        name: what the report calls it.
        process: where it runs.
        updates: its answers, one per update.
    """

    name: str
    process: subprocess.Popen
    updates: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, arguments: list[str], threads: int) -> Side:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_sides", *arguments], cwd=_ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        side = cls(name, process)
        side._read()  # it is ready
        return side

    def update(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        self.updates.append(self._read())
        self._read()  # it is ready again
        return self.updates[-1]

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
        """Without the first update, which also makes the optimizer's state."""
        return [update["seconds"] for update in self.updates[1:]]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        return max(self.seconds) - min(self.seconds)

    @property
    def peak_mib(self) -> float:
        """The most that was resident during an update."""
        return max(update["peak_bytes"] for update in self.updates) / 2**20

    @property
    def memory_mib(self) -> float:
        """That, less what was resident after the imports, which is no matter of the update."""
        return self.peak_mib - self.updates[0]["baseline_bytes"] / 2**20


def run(model: str, scale: float, rounds: int, threads: int, names: list[str]) -> tuple[list[Side], list[dict]]:
    """The sides with their updates, and our engine's seconds by part."""
    with tempfile.TemporaryDirectory() as folder:
        common = [model, str(scale), f"{folder}/old_logprobs.safetensors"]
        prepare = [sys.executable, "-m", "benchmarks.engine_sides", "prepare", *common, "{}"]
        subprocess.run(prepare, cwd=_ROOT, check=True)
        sides = [Side.start(name, [SIDES[name][0], *common, json.dumps(SIDES[name][1])], threads) for name in names]
        for number in range(1 + rounds):
            for side in sides:
                update = side.update()
                print(f"update {number}: {side.name}: {json.dumps(update)}", file=sys.stderr, flush=True)
        for side in sides:
            side.stop()
        profiled = Side.start("profile", ["profile", *common, json.dumps(SIDES[OURS][1])], threads)
        parts = [profiled.update() for _ in range(1 + rounds)][1:]
        profiled.stop()
    return sides, parts


def check_same_work(sides: list[Side]) -> float:
    """Raises unless loss and gradient norm of every update agree; returns the largest relative difference."""
    largest = 0.0
    for side in sides[1:]:
        for ours, theirs in zip(sides[0].updates, side.updates, strict=True):
            for key in ("loss", "grad_norm"):
                difference = abs(ours[key] - theirs[key]) / abs(ours[key])
                if difference > TOLERANCE:
                    raise RuntimeError(f"{side.name} did other work: {key} {theirs[key]}, ours {ours[key]}")
                largest = max(largest, difference)
    return largest


def main() -> int:
    from rlft_fast.demo import smollm2_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.5, help="factor on the lengths of all sequences")
    parser.add_argument("--rounds", type=int, default=2, help="timed updates per side, after a first one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=_DEFAULT, help="the first one must be ours")
    parser.add_argument("--output", type=Path, default=_ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    sides, parts = run(str(smollm2_folder()), args.scale, args.rounds, args.threads, args.sides)
    difference = check_same_work(sides)

    from benchmarks.engine_report import write_report

    ratios = write_report(sides, parts, difference, vars(args))
    print(json.dumps(ratios))
    return 0 if ratios["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
