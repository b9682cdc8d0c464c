"""`python -m benchmarks.bench_engine`: one GRPO update of our engine beside TRL's; writes benchmarks/results/engine.*.

The work is that of `engine_workload`. Each side lives in a process of its own (`engine_sides`), so that its memory is
its own, and makes one update whenever it is told to: A B C, A B C, ... The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sides import ROOT, Side, take_turns

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


def run(model: str, scale: float, rounds: int, threads: int, names: list[str]) -> tuple[list[Side], list[dict]]:
    """The sides with their updates, and our engine's seconds by part."""
    with tempfile.TemporaryDirectory() as folder:
        common = [model, str(scale), f"{folder}/old_logprobs.safetensors"]
        prepare = [sys.executable, "-m", "benchmarks.engine_sides", "prepare", *common, "{}"]
        subprocess.run(prepare, cwd=ROOT, check=True)

        def start(name: str, kind: str, options: dict[str, Any]) -> Side:
            return Side.start(name, "benchmarks.engine_sides", [kind, *common, json.dumps(options)], threads)

        sides = [start(name, *SIDES[name]) for name in names]
        take_turns(sides, rounds)
        profiled = start("profile", "profile", SIDES[OURS][1])
        parts = [profiled.step() for _ in range(1 + rounds)][1:]
        profiled.stop()
    return sides, parts


def check_same_work(sides: list[Side]) -> float:
    """Raises unless loss and gradient norm of every update agree; returns the largest relative difference."""
    largest = 0.0
    for side in sides[1:]:
        for ours, theirs in zip(sides[0].steps, side.steps, strict=True):
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
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    sides, parts = run(str(smollm2_folder()), args.scale, args.rounds, args.threads, args.sides)
    difference = check_same_work(sides)

    from benchmarks.engine_report import write_report

    ratios = write_report(sides, parts, difference, vars(args))
    print(json.dumps(ratios))
    return 0 if ratios["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
