"""`python -m benchmarks.step.compare`: a whole GRPO step of ours beside TRL's; writes benchmarks/results/step.*.

`workload` defines the step: rollout, rewards and update, on the same prompts. Each side is a process of its own
(`sides`). The sides take turns, one step each: A B C, A B C, ... The last line of the output is JSON. Run it on a
machine that does nothing else; it takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.step.workload import MAX_STEPS, Workload
from benchmarks.support.sides import ROOT, Side, take_turns

OURS, OURS_VLLM = "rlft_fast", "rlft_fast, vLLM"
# A micro-batch has eight completions and their prompt. All 64 at once are no faster, and take twice the memory.
_ACTOR = {"actor": {"max_tokens": 1024}}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("ours", _ACTOR),
    OURS_VLLM: ("ours", _ACTOR | {"rollout": {"backend": "vllm"}}),
    "TRL, 8 sequences": ("trl", {"per_device_train_batch_size": 8, "gradient_checkpointing": False}),
    "TRL, 16 sequences": ("trl", {"per_device_train_batch_size": 16, "gradient_checkpointing": False}),
}
_DEFAULT = [OURS, OURS_VLLM, "TRL, 8 sequences"]
# Each side samples with its own random numbers, so lengths differ a little. A ratio of times needs similar lengths.
MAX_TOKEN_DIFFERENCE = 0.05


def run(model: str, work: Workload, rounds: int, threads: int, names: list[str]) -> list[Side]:
    """The sides with their steps."""
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for i, name in enumerate(names):
            kind, options = SIDES[name]
            arguments = [kind, model, f"{folder}/{i}", json.dumps(asdict(work)), json.dumps(options)]
            sides.append(Side.start(name, "benchmarks.step.sides", arguments, threads))
        take_turns(sides, rounds)
    return sides


def check_same_work(sides: list[Side]) -> float:
    """Returns the largest relative difference in tokens; raises if prompts differ, or tokens differ too much."""
    ours, largest = sides[0], 0.0
    for side in sides[1:]:
        if [step["prompts"] for step in side.steps] != [step["prompts"] for step in ours.steps]:
            raise RuntimeError(f"{side.name} had other prompts than {ours.name}")
        largest = max(largest, abs(timed_tokens(side) / timed_tokens(ours) - 1))
    if largest > MAX_TOKEN_DIFFERENCE:
        counts = ", ".join(f"{side.name} {timed_tokens(side)}" for side in sides)
        raise RuntimeError(f"the sides generated too different numbers of tokens to compare their times: {counts}")
    return largest


def timed_tokens(side: Side) -> int:
    """Tokens that were generated in the timed steps."""
    return sum(step["num_tokens"] for step in side.steps[1:])


def main() -> int:
    from rlft_fast.demo import smollm2_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=Workload.max_new_tokens)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps per side, after a first one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=_DEFAULT, help="the first one must be ours")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if not 1 <= args.rounds < MAX_STEPS:
        parser.error(f"--rounds must be 1 to {MAX_STEPS - 1}, got {args.rounds}")
    kinds = [SIDES[name][0] for name in args.sides]
    if kinds[0] != "ours" or "trl" not in kinds:
        parser.error(f"--sides must begin with one of ours and have one of TRL's, got {', '.join(args.sides)}")
    names = [name for name in args.sides if name != OURS_VLLM or importlib.util.find_spec("vllm")]
    work = Workload(max_new_tokens=args.max_new_tokens)
    sides = run(str(smollm2_folder()), work, args.rounds, args.threads, names)
    difference = check_same_work(sides)

    from benchmarks.step.report import write_report

    ratios = write_report(sides, work, difference, args.threads, args.output)
    print(json.dumps(ratios))
    return 0 if ratios["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
