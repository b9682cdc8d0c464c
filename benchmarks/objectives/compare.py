"""`python -m benchmarks.objectives.compare`: SFT, DPO and a reward model beside TRL; writes results/objectives.*.

`workload` defines the rows. Every side is a process of its own, and makes one step at a time in turn with the others.
Run it on a machine that does nothing else, with 10 GiB free.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.objectives.report import write_report
from benchmarks.objectives.workload import (
    LEAN,
    OBJECTIVES,
    OURS,
    PADDING_FREE,
    RECOMPUTING,
    THEIRS,
    Workload,
    prepare,
)
from benchmarks.support.sides import ROOT, Side, take_turns

_KEEPS = {"gradient_checkpointing": False}  # TRL's default is the recomputing side
# Tokens of our micro-batches: little more than the longest row or pair that is admitted.
_CAPS = {"sft": 384, "dpo": 768, "reward": 768}

SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("ours", {}),
    LEAN: ("ours", {"activation_checkpointing": "full"}),
    THEIRS: ("trl", _KEEPS),
    RECOMPUTING: ("trl", {"gradient_checkpointing": True}),
    PADDING_FREE: ("trl", _KEEPS | {"padding_free": True}),
}
_OF_SFT_ALONE = {PADDING_FREE}  # TRL's DPO falls back to padding, and its reward trainer always pads


def run(
    model: str, work: Workload, rounds: int, threads: int, objectives: list[str], names: list[str]
) -> dict[str, list[Side]]:
    """The sides of each objective with their steps."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(model, Path(folder), work)
        for objective in objectives:
            sides = []
            for name in names:
                if name in _OF_SFT_ALONE and objective != "sft":
                    continue
                kind, options = SIDES[name]
                options = {"max_tokens": _CAPS[objective]} | options if kind == "ours" else options
                arguments = [kind, objective, model, folder, json.dumps(options)]
                sides.append(Side.start(name, "benchmarks.objectives.sides", arguments, threads))
            take_turns(sides, rounds)
            found[objective] = sides
    return found


def main() -> int:
    from rlft_fast.demo import smollm2_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=Workload.num_rows, help="rows of a step of SFT")
    parser.add_argument("--pairs", type=int, default=Workload.num_pairs, help="pairs of a step of the others")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps per side, after a first one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=[*OBJECTIVES])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="ours first")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    work = replace(Workload(), num_rows=args.rows, num_pairs=args.pairs)
    sides = run(str(smollm2_folder()), work, args.rounds, args.threads, args.objectives, args.sides)
    return 0 if write_report(sides, work, args.threads, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
