"""`python -m benchmarks.learning.curriculum`: the demo with `algorithm.curriculum` and `first_samples`, and without.

Writes benchmarks/results/curriculum.*. A leg (a variant, a seed) is a process of its own and ends after two evaluations
in a row at the level. Minutes depend on what else the machine does. Sampled tokens, trained tokens and prompts do not,
and CPU seconds nearly not. A finished leg is one JSON file in benchmarks/results/curriculum, and is kept.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.learning.legs import leg_parser, run_legs
from benchmarks.learning.race import RESULTS
from benchmarks.learning.report import crossing
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import environment
from benchmarks.support.picture import save

LEVEL, EVALUATE_EVERY, MAX_MINUTES = 0.8, 2, 0.75
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "curriculum": {"curriculum": 0.5},
    "both": {"curriculum": 0.5, "first_samples": 4},
}
WORK = {"sampled": "sampled tokens", "trained": "trained tokens", "cpu": "CPU s", "seconds": "s", "prompts": "prompts"}
"""Columns of a step, and what they count."""
BARS = ("sampled", "cpu", "seconds")

METHOD = """\
Every leg is the demo (GRPO, `skip_equal_groups`, 16 prompts of 8 samples a step) with the settings of its variant. The
greedy accuracy on 128 held-out problems is measured every {every} steps, and its standard error is 0.035. Clocks stop
for that. Work to {level} is interpolated between the evaluations before and after accuracy first is there. Trained
tokens are the response tokens that run in the update."""


def run_leg(variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains until the level, and counts the work of each step."""
    from rlft_fast.config import Config
    from rlft_fast.demo import demo_config, smollm2_folder, write_problems
    from rlft_fast.trainer import PPOTrainer

    values = demo_config(smollm2_folder(), folder / "run", *write_problems(folder / "data"), seed).model_dump()
    values["algorithm"] |= VARIANTS[variant]
    trainer = PPOTrainer(Config.parse(values))
    steps: list[dict[str, float]] = []
    num_prompts = 0
    with contextlib.closing(trainer):
        trainer.start(0)
        accuracy = [(0, trainer.evaluate().metrics["accuracy"])]
        while len(steps) < trainer.config.steps and min(value for _, value in accuracy[-2:]) < LEVEL:
            seconds, cpu = time.perf_counter(), time.process_time()
            experience = trainer.collect(len(steps), num_prompts)
            result = trainer.learn(experience)
            num_prompts += result.num_prompts
            steps.append({
                "seconds": time.perf_counter() - seconds, "cpu": time.process_time() - cpu,
                "prompts": len(experience.prompts), "sampled": len(experience.samples.token_ids_T),
                "trained": int(experience.batch.active_T.sum()),
                "zero_std_group_share": result.metrics["zero_std_group_share"],
            })  # fmt: skip
            if len(steps) % EVALUATE_EVERY == 0:
                accuracy.append((len(steps), trainer.evaluate().metrics["accuracy"]))
                print(variant, seed, accuracy[-1], file=sys.stderr, flush=True)
    return {"variant": variant, "seed": seed, "settings": VARIANTS[variant], "steps": steps, "accuracy": accuracy,
            "environment": environment() | versions()}  # fmt: skip


def work_to_level(leg: dict[str, Any], column: str) -> float:
    """Sum of a column over the steps until accuracy first is at the level; infinity where it never is."""
    until = [0.0, *accumulate(step[column] for step in leg["steps"])]
    return crossing([(until[step], accuracy) for step, accuracy in leg["accuracy"]], LEVEL)


def equal_until_level(leg: dict[str, Any]) -> float:
    """The mean share of groups with equal rewards, over the steps until accuracy first is at the level."""
    last = next((step for step, accuracy in leg["accuracy"] if accuracy >= LEVEL), len(leg["steps"]))
    return statistics.mean(step["zero_std_group_share"] for step in leg["steps"][:last])


def ratios(legs: list[dict[str, Any]], variant: str, column: str) -> dict[int, tuple[float, float]]:
    """Work with the keys, and without, of each seed that has both."""
    by_name = {(leg["variant"], leg["seed"]): work_to_level(leg, column) for leg in legs}
    seeds = [seed for name, seed in by_name if name == variant and ("plain", seed) in by_name]
    return {seed: (by_name[variant, seed], by_name["plain", seed]) for seed in seeds}


def bars_of(legs: list[dict[str, Any]]) -> list[Bar]:
    """Sums of work with the keys over sums without, over the seeds that have both."""
    bars = []
    for variant in [name for name in VARIANTS if name != "plain"]:
        for column in BARS:
            if pairs := ratios(legs, variant, column):
                ours, plain = (sum(own) for own in zip(*pairs.values(), strict=True))
                name = f"{WORK[column]} to {LEVEL}, {variant} / plain, {len(pairs)} seeds"
                bars.append(Bar(name, ours / plain, MAX_MINUTES))
    return bars


def by_seed(legs: list[dict[str, Any]]) -> str:
    """The ratios of sampled tokens of single seeds: how far the bars are from being sure."""
    told = []
    for variant in [name for name in VARIANTS if name != "plain"]:
        if pairs := ratios(legs, variant, "sampled"):
            told.append(f"{variant} {', '.join(f'{ours / plain:.2f}' for ours, plain in pairs.values())}")
    return f"Ratios of sampled tokens of the single seeds: {'; '.join(told)}."


def write_report(legs: list[dict[str, Any]], output: Path) -> str:
    """Writes curriculum.md, curriculum.json and curriculum.png; returns the text."""
    rows = [
        (
            f"[{leg['variant']}, seed {leg['seed']}](curriculum/{leg['variant']}-seed{leg['seed']}.json)",
            *(f"{work_to_level(leg, column):.0f}" for column in WORK),
            f"{equal_until_level(leg):.2f}",
            f"{leg['environment']['load']}",
            " ".join(f"{accuracy:.2f}" for _, accuracy in leg["accuracy"]),
        )
        for leg in legs
    ]
    header = ("leg", *WORK.values(), "equal groups until then", "load", f"accuracy, every {EVALUATE_EVERY} steps")
    bars = bars_of(legs)
    sections = [
        "## Bars", bar_table(bars), by_seed(legs), f"## Work to {LEVEL}", table(header, rows), "## Method",
        fill(METHOD.format(every=EVALUATE_EVERY, level=LEVEL)),
    ]  # fmt: skip
    facts = legs[0]["environment"]
    raw = {"environment": facts, "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars]}
    return write_files(
        output, "curriculum", "Samples that teach", facts, sections, raw, lambda path: draw(legs, path)
    )  # fmt: skip


def draw(legs: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over sampled tokens and over CPU seconds, a line per leg."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, column in zip(axes, ("sampled", "cpu"), strict=True):
        for leg in legs:
            until = [0.0, *accumulate(step[column] for step in leg["steps"])]
            points = [(until[step], accuracy) for step, accuracy in leg["accuracy"]]
            color = f"C{[*VARIANTS].index(leg['variant'])}"
            axis.plot(*zip(*points, strict=True), ".-", color=color, label=leg["variant"] if not leg["seed"] else None)
        axis.axhline(LEVEL, color="#8d96a3", linewidth=0.8, linestyle=":")
        axis.set_xlabel(WORK[column])
    axes[0].set_ylabel("held-out accuracy")
    axes[0].legend(fontsize=8, loc="lower right")
    save(figure, path, "the demo, SmolLM2-135M")


def main() -> None:
    options = leg_parser(__doc__, VARIANTS).parse_args()
    if options.leg:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_leg(options.leg[0], int(options.leg[1]), Path(folder))))
        return
    legs = run_legs("benchmarks.learning.curriculum", RESULTS / "curriculum", VARIANTS, options)
    print(write_report(legs, RESULTS))


if __name__ == "__main__":
    main()
