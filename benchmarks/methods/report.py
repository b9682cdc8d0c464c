"""The report of the methods: the section of docs/methods.md, and its curves."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft_fast.run import COLORS, read_metrics

_BEGIN, _END = "<!-- results: begin -->", "<!-- results: end -->"
_LOGS = "../benchmarks/results/methods"  # as docs/methods.md links them
_CURVES = "![Held-out accuracy and mean rewards over the steps of every run](methods.png)"


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        name: of the folder with its log.
        method: its title.
        differs: what its example changes against GRPO's.
        reward: what its rewards are.
        seed: of the run.
        steps: rollouts learned from.
        accuracy: (step, held-out accuracy), from before the first step to after the last.
        reward_mean: mean reward of each step.
    """

    name: str
    method: str
    differs: str
    reward: str
    seed: int
    steps: int
    accuracy: list[tuple[int, float]]
    reward_mean: list[float]

    @classmethod
    def read(cls, folder: Path, method: str, differs: str, reward: str, seed: int) -> Result:
        """From the log of a complete run."""
        rows = read_metrics(folder)
        accuracy = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
        rewards = [row["reward_mean"] for row in rows if "reward_mean" in row]
        return cls(folder.name, method, differs, reward, seed, rows[-1]["step"], accuracy, rewards)


def write_report(results: list[Result], docs: Path) -> None:
    """Replaces the marked section of methods.md, and methods.png.

    Args:
        results: at least one.
        docs: folder with a methods.md that has the markers.

    Raises:
        ValueError: nothing to report, or methods.md has no markers.
    """
    page = docs / "methods.md"
    text = page.read_text()
    if not results or _BEGIN not in text or _END not in text:
        raise ValueError(f"{len(results)} results for {page}, expected some, and the lines {_BEGIN} and {_END} in it")
    section = f"{_BEGIN}\n{table(results)}\n\n{_CURVES}\n{_END}"
    page.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: section, text, flags=re.DOTALL))
    draw(results, docs / "methods.png")


def table(results: list[Result]) -> str:
    """A Markdown table: a line per method, and a column per seed with links to the logs."""
    seeds = sorted({r.seed for r in results})
    header = ["method", "steps", "before", *(f"seed {seed}" for seed in seeds), "mean", "what differs"]
    lines = [header, ["---", *["---:"] * (len(header) - 2), "---"]]
    for method in dict.fromkeys(r.method for r in results):
        runs = {r.seed: r for r in results if r.method == method}
        first = next(iter(runs.values()))
        after = {seed: r.accuracy[-1][1] for seed, r in runs.items()}
        cells = (f"[{after[s]:.3f}]({_LOGS}/{runs[s].name}/metrics.jsonl)" if s in runs else "" for s in seeds)
        mean = statistics.mean(after.values())
        lines.append(
            [method, str(first.steps), f"{first.accuracy[0][1]:.3f}", *cells, f"{mean:.3f}", first.differs]
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: list[Result], path: Path) -> None:
    """Draws held-out accuracy, and mean rewards in one panel per scale; all seeds of a method share one colour."""
    from matplotlib.figure import Figure

    rewards = list(dict.fromkeys(r.reward for r in results))
    figure = Figure(figsize=(4.2 * (1 + len(rewards)), 3.4), layout="constrained")
    accuracy, *panels = figure.subplots(1, 1 + len(rewards))
    methods = list(dict.fromkeys(r.method for r in results))
    for r in results:
        style: dict[str, Any] = {"color": COLORS[methods.index(r.method) % len(COLORS)], "linewidth": 1.5}
        label = r.method if r is next(other for other in results if other.method == r.method) else None
        accuracy.plot(*zip(*r.accuracy, strict=True), marker="o", markersize=4, label=label, **style)
        panels[rewards.index(r.reward)].plot(range(1, len(r.reward_mean) + 1), r.reward_mean, **style)
    titles = ["Held-out accuracy", *(f"Mean reward: {reward}" for reward in rewards)]
    for axis, title in zip([accuracy, *panels], titles, strict=True):
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    accuracy.set_ylim(0, 1.03)
    figure.legend(loc="outside upper center", ncols=len(methods), frameon=False)
    figure.savefig(path, dpi=150)
