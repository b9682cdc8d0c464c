"""`python -m benchmarks.step.overlap`: steps whose environment is slow, at several bounds on staleness.

Each run is a whole run of `rlft_fast.trainer.train` in a process of its own. Its episodes wait for `SlowTool`, and with
``rollout.update: in-flight`` later episodes are played while the policy trains. Writes benchmarks/results/overlap.*;
it takes about 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.pyplot as plt
import torch

import rlft_fast.trainer.models
from benchmarks.step.slow_tool import MEDIAN_S, P99_S, draw_of, latency_s
from benchmarks.support.document import Bar, bar_table, fill, table, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import OURS_COLOR, save
from rlft_fast.config import Config
from rlft_fast.trainer import train
from rlft_fast.trainer.learn import Learner
from tests.support.runs.copied_generator import copied_rollout
from tests.support.tiny_models import EOS_TOKEN_ID, save_tiny_model

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
PARTS = ("generate", "update", "sync")
MAX_RATIOS, MAX_IDLE = {1: 0.6, 2: 0.5, 4: 0.4}, 0.15
FIRST_ROW = 256  # a row's number decides its latencies
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@dataclass(frozen=True)
class Workload:
    """A run.

    Attributes:
        prompts: of a step.
        samples: episodes of a prompt.
        calls: slow answers of an episode.
        update_s: seconds of an update. A tiny policy is updated, and the rest is slept, as on a device of its own.
        steps: of the run, and how many of its last ones are measured.
    """

    prompts: int = 16
    samples: int = 8
    calls: int = 1
    update_s: float = 12.0
    steps: int = 16
    measured: int = 11


@dataclass
class Leg:
    """A run with a bound on staleness.

    Attributes:
        max_staleness: the bound.
        seconds: of each measured step.
        waited: seconds in which the training waited, of each measured step.
        longest: the longest latency of an episode, of each step of the run.
        parts: mean seconds of a measured step by phase.
    """

    max_staleness: int
    seconds: list[float]
    waited: list[float]
    longest: list[float]
    parts: dict[str, float]

    @property
    def idle(self) -> float:
        return sum(self.waited) / sum(self.seconds)


def config_of(folder: Path, work: Workload, max_staleness: int) -> Config:
    """The run, whose model and data are written to its folder."""
    model = save_tiny_model("llama", folder / "model", initializer_range=0.05)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"eos_token_id": [EOS_TOKEN_ID, *range(0, 256, 4)]}  # a reply has four tokens on average
    (model / "generation_config.json").write_text(json.dumps(ends))
    numbers = range(FIRST_ROW, FIRST_ROW + work.prompts * work.steps)
    rows = [json.dumps({"prompt": f"Row {i}.", "seed": i}) for i in numbers]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    beside = {"backend": "vllm", "vllm": {"process": "separate"}, "max_staleness": max_staleness, "update": "in-flight"}
    return Config.parse({
        "model": str(model), "output_dir": str(folder / "run"), "steps": work.steps, "seed": 1,
        "data": {"path": str(folder / "rows.jsonl"), "chat": True}, "reward": {},
        "environment": {
            "name": "benchmarks.step.slow_tool:SlowTool", "max_turns": work.calls + 1, "timeout_s": 600,
            "options": {"calls": work.calls},
        },
        "rollout": {
            "prompts_per_step": work.prompts, "samples_per_prompt": work.samples, "max_prompt_tokens": 64,
            "max_new_tokens": 100 * (work.calls + 1), "batch_size": work.prompts * work.samples,
            **(beside if max_staleness else {}),
        },
        "actor": {"compute_dtype": "float32", "max_tokens": 4096},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def lasting(seconds: float) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Has a function take so many seconds, if it would take less."""

    def wrap(function: Callable[..., T]) -> Callable[..., T]:
        def slept(*args: Any) -> T:
            ends = time.monotonic() + seconds
            found = function(*args)
            time.sleep(max(ends - time.monotonic(), 0.0))
            return found

        return slept

    return wrap


def run(folder: Path, work: Workload, max_staleness: int) -> Leg:
    """A run in this process."""
    if max_staleness:
        rlft_fast.trainer.models.build_rollout = lambda engine, *_: copied_rollout(engine)
    Learner.update = lasting(work.update_s)(Learner.update)
    train(config_of(folder, work, max_staleness))
    read = lambda name: [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]  # noqa: E731
    lines, times = (read(name)[-work.measured :] for name in ("metrics.jsonl", "timeline.jsonl"))
    names = sorted({name for line in lines for name in line if name.startswith("seconds_")})
    generated = [line.get("seconds_environment", 0.0) for line in lines]
    return Leg(
        max_staleness, [line["end"] - line["start"] for line in times],
        [line["seconds_wait"] for line in lines] if max_staleness else generated,
        longest_latencies(read("samples.jsonl"), work),
        {name: statistics.mean(line.get(name, 0.0) for line in lines) for name in names},
    )  # fmt: skip


def longest_latencies(samples: Sequence[dict[str, Any]], work: Workload) -> list[float]:
    """The longest latency of an episode, by step."""
    asked: dict[int, set[int]] = {}
    for sample in samples:
        asked.setdefault(sample["step"], set()).add(int(sample["prompt"].partition("Row ")[2].partition(".")[0]))
    episodes = lambda rows: (draw_of(row, number) for row in rows for number in range(work.samples))  # noqa: E731
    waits = lambda draw: sum(latency_s(draw) for _ in range(work.calls))  # noqa: E731
    return [max(map(waits, episodes(asked[step]))) for step in sorted(asked)]


def ideal(leg: Leg, work: Workload) -> float:
    """Seconds of a measured step where latencies, updates and the bound are all there is."""
    ends: list[float] = []
    for step, longest in enumerate(leg.longest):
        starts = ends[step - leg.max_staleness - 1] if step > leg.max_staleness else 0.0
        ends.append(max(ends[-1] if ends else 0.0, starts + longest) + work.update_s)
    return (ends[-1] - ends[-1 - work.measured]) / work.measured


def run_apart(work: Workload, max_staleness: int) -> Leg:
    """A run in a process of its own. As in rlft-fast, the main module of the process imports nothing.

    The processes of environments are forked from a process that has imported the main module.
    """
    start = f"import sys; from {__spec__.name} import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", start, "--leg", folder, str(max_staleness), json.dumps(asdict(work))]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return Leg(**json.loads((Path(folder) / "leg.json").read_text()))


METHOD = """\
{prompts} x {samples} episodes a step. An episode has {calls} answer(s) of an environment, each after a log-normal
latency with median {median:g} s and 99th percentile {p99:g} s. A row's seed decides its latencies, so each step has the
same latencies in all runs. Few steps have few long latencies, so the rows were chosen: of the rows of 58 runs, those
whose ideal times of a step at S = 0, 1, 2 and 4 are nearest to the means over 20,000 steps (35.4, 20.1, 15.6, 13.1 s).
An update takes {update_s:g} s: it trains a tiny policy and sleeps for the rest, as an update on a device of its own.
Replies have four tokens on average, and are sampled in real calls. So latency, updates and the schedule are nearly all
of a step. With S = 0, the policy samples itself, and the step samples, waits and trains
in turn. With S > 0 (`rollout.max_staleness: S`, `rollout.update: in-flight`), a copy of the policy samples in threads
of the same process.

The runs go at the same time, with a thread of torch each. They have {steps} steps, and the last {measured} are
measured. The time of a step is from the end of the step before to its end. The training is idle while it waits for
samples or for the generator to take weights (`seconds_wait`); with S = 0, while it waits for the environment. The ideal
has the same latencies, updates and bound, and nothing else takes time."""


def write_report(legs: Sequence[Leg], work: Workload, output: Path) -> bool:
    """Writes overlap.md, overlap.json and overlap.png; returns whether all bars hold."""
    mean = {leg.max_staleness: statistics.mean(leg.seconds) for leg in legs}
    last = max(legs, key=lambda leg: leg.max_staleness)
    bars = [
        Bar(f"time of a step, S = {bound} / S = 0", mean[bound] / mean[0], limit)
        for bound, limit in MAX_RATIOS.items()
        if bound in mean
    ]
    bars += [Bar(f"idle share of the training, S = {last.max_staleness}", last.idle, MAX_IDLE)]
    rows = [
        (
            f"{leg.max_staleness}", f"{mean[leg.max_staleness]:.1f}", f"{ideal(leg, work):.1f}",
            f"{min(leg.seconds):.1f}", f"{max(leg.seconds):.1f}", f"{mean[leg.max_staleness] / mean[0]:.2f}",
            f"{leg.idle:.0%}", *(f"{leg.parts.get(f'seconds_{name}', 0.0):.1f}" for name in PARTS),
        )
        for leg in legs
    ]  # fmt: skip
    header = ("S", "s of a step", "ideal, s", "fastest", "slowest", "of S = 0", "idle", *(f"{x}, s" for x in PARTS))
    facts = environment()
    method = fill(METHOD.format(**asdict(work), median=MEDIAN_S, p99=P99_S))
    sections = ["## Bars", bar_table(bars), "## Steps", table(header, rows), "## Method", method]
    raw = {"environment": facts, "work": asdict(work), "legs": [asdict(leg) for leg in legs]}
    print(write_files(
        output, "overlap", "Slow environments beside the training", facts, sections, raw,
        lambda path: save_plot(mean, path, f"{facts['cpu']}, {facts['date']}"),
    ))  # fmt: skip
    return all(bar.holds for bar in bars)


def save_plot(mean: dict[int, float], path: Path, subtitle: str) -> None:
    figure, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
    bars = axis.barh([f"S = {bound}" for bound in mean], [*mean.values()], color=OURS_COLOR)
    axis.bar_label(bars, fmt="{:.1f}", padding=4)
    axis.set_xlabel("seconds of a step")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, subtitle)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4], help="on staleness, with 0")
    parser.add_argument("--work", type=json.loads, default={}, help="changes to the workload, as JSON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--leg", nargs=3, metavar=("FOLDER", "S", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.leg:
        folder, bound, work = args.leg
        leg = run(Path(folder), Workload(**json.loads(work)), int(bound))
        (Path(folder) / "leg.json").write_text(json.dumps(asdict(leg)))
        return 0
    work = Workload(**args.work)
    with ThreadPoolExecutor(len(args.bounds)) as threads:
        legs = [*threads.map(partial(run_apart, work), args.bounds)]
    return 0 if write_report(legs, work, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
