"""`python -m benchmarks.learning.distillation`: the demo's trained policy teaches the model that the demo began with.

Writes benchmarks/results/distillation.*. A leg (a variant, a seed) is a process of its own. Minutes depend on what else
the machine does, and CPU seconds nearly not. A finished leg is one JSON file in benchmarks/results/distillation, and is
kept. The teacher, the policy that the demo's leg of the first seed ends with, is kept in --teacher.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.learning.legs import leg_parser, run_legs
from benchmarks.learning.race import RESULTS
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import save

LEVEL, MAX_WORK = 0.8, 1 / 3
VARIANTS = {
    "rl": "the demo: rewards, no teacher",
    "distil": "the teacher's 64 most likely ids at each token of the policy's own samples",
    "sft": "cross entropy of the teacher's samples",
}
STEPS = {"rl": 28, "distil": 5, "sft": 8}
LEARNING_RATE, ROWS = 1e-4, 32  # of a step of the two that have a teacher
EVALUATE_EVERY = {"rl": 4, "distil": 1, "sft": 1}
FIRST_SEED = 0
WORK = {"seconds": "s", "cpu": "CPU s"}
"""Columns of a point, and what they count."""

METHOD = """\
The teacher is the policy after the demo's 28 steps (seed {first}). Both ways to learn from it start from the demo's
first model, in float32, with {rows} rows a step and the learning rate {rate} falling to 0. `distil` samples one answer
of the policy to each prompt, and its loss is KL(teacher ‖ policy) over the teacher's 64 most likely ids and all others
together. `sft` samples the teacher's answers at temperature 1, leaves out the answers that were cut off, and learns
from rows of the others; its work includes the sampling, of no more answers than its steps read. It has as many steps as
it takes to work no less than `distil`. Greedy accuracy on 128 held-out problems has a standard error of 0.03. Loading
and evaluations are not counted."""


class Clock:
    """Seconds and CPU seconds of the parts that count."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        seconds, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - seconds
        self.cpu += time.process_time() - cpu


def demo_values(folder: Path, seed: int) -> dict[str, Any]:
    """Settings of the demo, in float32."""
    from rlft_fast.demo import demo_config, smollm2_folder, write_problems

    values = demo_config(smollm2_folder(), folder / "run", *write_problems(folder / "data"), seed).model_dump()
    values["actor"]["compute_dtype"] = "float32"  # on every machine
    return values


def run_rl(folder: Path, seed: int, teacher: Path, clock: Clock) -> Iterator[tuple[int, Any]]:
    """The demo; its policy becomes the teacher if there is none."""
    from rlft_fast.config import Config
    from rlft_fast.trainer import PPOTrainer

    with contextlib.closing(PPOTrainer(Config.parse(demo_values(folder, seed)))) as trainer:
        yield from learn_by_rollouts(trainer, STEPS["rl"], clock)
        if not teacher.exists():
            trainer.models.export(folder / "hf")
            shutil.copytree(folder / "hf", teacher)


def run_distil(folder: Path, seed: int, teacher: Path, clock: Clock) -> Iterator[tuple[int, Any]]:
    """On-policy distillation."""
    from rlft_fast.config import Config
    from rlft_fast.trainer import PPOTrainer

    values = demo_values(folder, seed)
    values["steps"] = STEPS["distil"]
    values["reward"] |= {"function": None, "truncation_penalty": 0.0}
    values["evaluation"]["function"] = "rlft_fast.rewards:last_number"
    values["teacher"] = {
        "model": str(teacher),
        "loss": "topk",
        "top_k": 64,
        "max_tokens": 4096,
        "compute_dtype": "float32",
    }
    values["algorithm"] = {"advantage": "none"}
    values["rollout"] |= {"prompts_per_step": ROWS, "samples_per_prompt": 1}
    values["actor"]["optimizer"]["learning_rate"] = LEARNING_RATE
    with contextlib.closing(PPOTrainer(Config.parse(values))) as trainer:
        yield from learn_by_rollouts(trainer, STEPS["distil"], clock)


def learn_by_rollouts(trainer: Any, steps: int, clock: Clock) -> Iterator[tuple[int, Any]]:
    """Steps of a loop, with the trainer that evaluates before the first and after each."""
    trainer.start(0)
    yield 0, trainer
    num_prompts = 0
    for step in range(steps):
        with clock.running():
            num_prompts += trainer.learn(trainer.collect(step, num_prompts)).num_prompts
        yield step + 1, trainer


def run_sft(folder: Path, seed: int, teacher: Path, clock: Clock) -> Iterator[tuple[int, Any]]:
    """Fine-tuning on the teacher's samples."""
    from rlft_fast.config import Config, SFTConfig
    from rlft_fast.trainer import PPOTrainer, RowsTrainer

    values = demo_values(folder, seed)
    path = folder / "answers.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in answers(values, teacher, clock)))
    config = {
        "objective": "sft", "model": values["model"], "output_dir": str(folder / "sft"), "steps": STEPS["sft"],
        "seed": seed, "batch_size": ROWS, "data": {"path": str(path), "chat": False, "max_sequence_tokens": 128},
        "actor": {"max_tokens": 4096, "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "linear"},
                  "compute_dtype": "float32"},
    }  # fmt: skip
    with (
        contextlib.closing(PPOTrainer(Config.parse(values))) as judge,
        contextlib.closing(RowsTrainer(SFTConfig.model_validate(config))) as trainer,
    ):
        judge.start(0)
        yield 0, judge
        for step in range(STEPS["sft"]):
            with clock.running():
                trainer.train_step(step)
            judge.actor.model.load_state_dict(trainer.models.actor.model.state_dict())
            yield step + 1, judge


def answers(values: dict[str, Any], teacher: Path, clock: Clock) -> list[dict[str, str]]:
    """Rows of the teacher's answers, without the answers that were cut off."""
    from rlft_fast.config import Config
    from rlft_fast.trainer import PPOTrainer

    num_prompts = STEPS["sft"] * ROWS
    rollout = values["rollout"] | {"prompts_per_step": num_prompts // 2, "samples_per_prompt": 1}
    config = values | {"model": str(teacher), "rollout": rollout, "algorithm": {"advantage": "reinforce++"}}
    found = []
    with contextlib.closing(PPOTrainer(Config.parse(config))) as trainer:
        trainer.start(0)
        for step in range(2):
            with clock.running():
                experience = trainer.collect(step, step * (num_prompts // 2))
            samples = experience.samples
            found += [
                {"prompt": experience.prompts.texts[row], "completion": text}
                for row, text, ended in zip(samples.row_B.tolist(), samples.texts, samples.stopped_B, strict=True)
                if ended
            ]
    return found


def run_leg(variant: str, seed: int, teacher: Path, folder: Path) -> dict[str, Any]:
    """Learns, and measures accuracy over work."""
    clock, points = Clock(), []
    runs = {"rl": run_rl, "distil": run_distil, "sft": run_sft}
    for step, judge in runs[variant](folder, seed, teacher, clock):
        if step % EVALUATE_EVERY[variant] == 0 or step == STEPS[variant]:
            accuracy = judge.evaluate().metrics["accuracy"]
            points.append({"step": step, "seconds": clock.seconds, "cpu": clock.cpu, "accuracy": accuracy})
            print(variant, seed, points[-1], file=sys.stderr, flush=True)
    return {"variant": variant, "seed": seed, "points": points, "environment": environment() | versions()}


def at_work(leg: dict[str, Any], work: float, column: str) -> float:
    """The accuracy after this much work, between two evaluations by interpolation."""
    before = leg["points"][0]
    for point in leg["points"][1:]:
        if point[column] >= work:
            share = (work - before[column]) / (point[column] - before[column])
            return before["accuracy"] + share * (point["accuracy"] - before["accuracy"])
        before = point
    return before["accuracy"]


def bars_of(legs: list[dict[str, Any]]) -> list[Bar]:
    """What must hold, by means over the seeds that distil and sft have, and over all seeds of rl."""
    by_name = {(leg["variant"], leg["seed"]): leg for leg in legs}
    seeds = [seed for name, seed in by_name if name == "distil" and ("sft", seed) in by_name]
    if not seeds or not (races := [leg for leg in legs if leg["variant"] == "rl"]):
        return []
    distils = [by_name["distil", seed] for seed in seeds]
    ends = [leg["points"][-1] for leg in distils]
    error = 1 - statistics.mean(end["accuracy"] for end in ends)
    bars = [Bar(f"distil: share of wrong answers, {len(seeds)} seeds", error, 1 - LEVEL)]
    for column, name in WORK.items():
        work = statistics.mean(end[column] for end in ends)
        whole = statistics.mean(leg["points"][-1][column] for leg in races)
        bars.append(Bar(f"{name}: distil / rl", work / whole, MAX_WORK))
        other = 1 - statistics.mean(at_work(by_name["sft", seed], work, column) for seed in seeds)
        bars.append(Bar(f"share of wrong answers after equal {name}: distil / sft", error / other, 1.0))
    return bars


def write_report(legs: list[dict[str, Any]], output: Path) -> str:
    """Writes distillation.md, distillation.json and distillation.png; returns the text."""
    rows = [
        (
            f"[{leg['variant']}, seed {leg['seed']}](distillation/{leg['variant']}-seed{leg['seed']}.json)",
            *(f"{leg['points'][-1][column]:.0f}" for column in WORK),
            f"{leg['environment']['load']}",
            ", ".join(f"{point['step']}: {point['accuracy']:.2f}" for point in leg["points"]),
        )
        for leg in legs
    ]
    bars = bars_of(legs)
    sections = [
        "## Bars", bar_table(bars), "## Accuracy",
        table(("leg", *WORK.values(), "load", "accuracy after step: share of right answers"), rows), "## Method",
        fill(METHOD.format(first=FIRST_SEED, rows=ROWS, rate=LEARNING_RATE)),
    ]  # fmt: skip
    facts = legs[0]["environment"]
    raw = {"environment": facts, "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars]}
    return write_files(output, "distillation", "Distillation", facts, sections, raw, lambda path: draw(legs, path))


def draw(legs: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over CPU seconds, a line per leg."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for leg in legs:
        color = f"C{[*VARIANTS].index(leg['variant'])}"
        label = leg["variant"] if leg["seed"] == FIRST_SEED else None
        axis.plot(*zip(*((point["cpu"], point["accuracy"]) for point in leg["points"]), strict=True), ".-", color=color,
                  label=label)  # fmt: skip
    axis.axhline(LEVEL, color="#8d96a3", linewidth=0.8, linestyle=":")
    axis.set_xlabel(WORK["cpu"])
    axis.set_ylabel("held-out accuracy")
    axis.legend(fontsize=8, loc="lower right")
    save(figure, path, "SmolLM2-135M learns sums from its trained copy")


def main() -> None:
    parser = leg_parser(__doc__, VARIANTS)
    parser.add_argument(
        "--teacher", type=Path, default=RESULTS.parents[1] / "build" / "teacher", help="(default: %(default)s)"
    )
    options = parser.parse_args()
    if options.leg:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_leg(options.leg[0], int(options.leg[1]), options.teacher, Path(folder))))
        return
    legs = run_legs(
        "benchmarks.learning.distillation", RESULTS / "distillation", VARIANTS, options,
        ["--teacher", str(options.teacher)],
    )  # fmt: skip
    print(write_report(legs, RESULTS))


if __name__ == "__main__":
    main()
