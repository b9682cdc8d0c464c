"""`python -m benchmarks.learning.race`: the time to accuracy beside TRL; writes benchmarks/results/learning.*.

Every leg (a task, a side, a seed) is a process of its own; one runs at a time. A finished leg is one JSON file in
benchmarks/results/learning. It is kept while it was made with the current settings, so the same command continues after
an interruption, on the same machine or from a clone. The report comes from the files of the finished legs alone.

The first leg of a task times a few steps of TRL with each of its settings. The legs of TRL take the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.learning.report import write_report
from benchmarks.learning.workload import NUM_STEPS, SEEDS, SETTINGS, TASKS
from benchmarks.support.document import versions
from benchmarks.support.harness import environment

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
RUNS = _ROOT / "runs" / "learning"
SIDES = ("trl", "ours-hf", "ours-vllm")
TRL_TIMES, UPDATES = "trl-times", "updates"  # legs of a few steps, with the first seed alone


@dataclass(frozen=True)
class Leg:
    """One side with one task and one seed."""

    task: str
    side: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.side}-seed{self.seed}"

    def read(self, folder: Path) -> dict[str, Any] | None:
        """The finished leg, or None where it is missing or was made with other settings."""
        path = folder / f"{self.name}.json"
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        return found if found["settings"] == SETTINGS else None

    def run(self, folder: Path) -> None:
        """Runs the leg and writes its file.

        Raises:
            FileNotFoundError: TRL's settings have not been timed.
            subprocess.CalledProcessError: the leg failed; its output is beside its run, with the suffix .txt.
        """
        run = RUNS / self.name
        shutil.rmtree(run, ignore_errors=True)
        RUNS.mkdir(parents=True, exist_ok=True)
        log = RUNS / f"{self.name}.txt"
        print(f"{self.name}: started", flush=True)
        command = [sys.executable, "-m", "benchmarks.learning.sides", self.side, self.task, str(self.seed),
                   str(NUM_STEPS), str(run)]  # fmt: skip
        if self.side == "trl":
            command.append(self._fastest_setting(folder))
        with open(log, "w") as errors:
            started = datetime.now(UTC)
            load = os.getloadavg()[0]
            done = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, stderr=errors, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        for name in ("checkpoints", "hf"):  # the weights are large
            shutil.rmtree(run / name, ignore_errors=True)
        facts = environment() | versions() | {"started": f"{started:%Y-%m-%d %H:%M} UTC", "load before": f"{load:.2f}"}
        found = {**asdict(self), "settings": SETTINGS, "environment": facts, **result}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.with_suffix(".part").write_text(json.dumps(found) + "\n")
        path.with_suffix(".part").rename(path)
        print(
            f"{self.name}: {(datetime.now(UTC) - started).total_seconds() / 60:.1f} minutes with evaluations",
            flush=True,
        )

    def _fastest_setting(self, folder: Path) -> str:
        times = Leg(self.task, TRL_TIMES, SEEDS[0])
        if (found := times.read(folder)) is None:
            raise FileNotFoundError(f"{self.name} needs {times.name}.json: run the side {TRL_TIMES} first")
        measured = {name: seconds for name, seconds in found["seconds_per_step"].items() if seconds is not None}
        return min(measured, key=measured.__getitem__)


def all_legs(tasks: list[str], sides: list[str], seeds: list[int]) -> list[Leg]:
    """The legs, first those of one seed with all sides, so that an interrupted race has whole comparisons."""
    return [
        Leg(task, side, seed)
        for seed in seeds
        for task in tasks
        for side in sides
        if side not in (TRL_TIMES, UPDATES) or seed == SEEDS[0]
    ]


def finished_legs(folder: Path) -> list[dict[str, Any]]:
    """The finished legs of the race's seeds, in the order of a race."""
    return [found for leg in all_legs([*TASKS], [*SIDES], [*SEEDS]) if (found := leg.read(folder))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="(default: all)")
    parser.add_argument(
        "--sides", nargs="+", choices=(TRL_TIMES, *SIDES, UPDATES), default=[TRL_TIMES, *SIDES, UPDATES],
        help="(default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", nargs="+", type=int, choices=SEEDS, default=[*SEEDS], help="to run now (default: %(default)s)"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the report of what is finished")
    options = parser.parse_args()
    folder = RESULTS / "learning"
    for leg in all_legs(options.tasks, options.sides, options.seeds):
        if options.report_only or leg.read(folder):
            continue
        if leg.side == "ours-vllm" and find_spec("vllm") is None:
            print(f"{leg.name}: skipped, vLLM is not installed (make install-vllm)", flush=True)
            continue
        leg.run(folder)
    legs = finished_legs(folder)
    if not legs:
        raise SystemExit("no leg is finished")
    times, updates = (
        {task: found for task in TASKS if (found := Leg(task, side, SEEDS[0]).read(folder))}
        for side in (TRL_TIMES, UPDATES)
    )
    print(write_report(legs, times, updates, RESULTS))


if __name__ == "__main__":
    main()
