"""How far a run has come: what its checkpoints hold beside the models."""

import json
import math
import os.path
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rlft_fast.config import HUB, Config, RunConfig
from rlft_fast.run.records import read_metrics

_EARLIER_NAMES = {"objective": "trainer"}


@dataclass(kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: complete steps.
        num_prompts: prompts that these steps took from the stream.
        seconds: of these steps.
        tokens: of these steps, prompts included.
        evaluated: the step after which the last evaluation was.
        before: metrics of the evaluation before the first step, as `as_json` gives them.
        examples_before: answers of this evaluation.
        after: metrics of the last evaluation.
        examples_after: answers of this evaluation.
        num_scored: held-out prompts with a judged answer.
        measured: how these evaluations were made, see `measure_of_evaluations`; None: unknown, or there were none.
        log_bytes: sizes of the logs, see `RunLog.num_bytes`.
        trainer: see `Trainer.state`.
        best: the step and the value of the best evaluation, and how it was measured.
    """

    step: int = 0
    num_prompts: int = 0
    seconds: float = 0.0
    tokens: int = 0
    evaluated: int = 0
    before: dict[str, float | None] | None = None
    examples_before: list[str] | None = None
    after: dict[str, float | None] | None = None
    examples_after: list[str] | None = None
    num_scored: int = 0
    measured: dict[str, Any] | None = None
    log_bytes: dict[str, int] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any] | None, config: RunConfig) -> Self:
        """The progress that a checkpoint of this or an earlier version holds; None: the beginning.

        A best value that was measured otherwise is forgotten: values of different measures are not compared.
        """
        state = {_EARLIER_NAMES.get(name, name): value for name, value in (state or {}).items()}
        if state.get("before") is None and state.get("accuracy_before") is not None:
            state["before"] = {"accuracy": state["accuracy_before"]}
        if state and state.get("num_prompts") is None:  # of a run of rl: its steps had room for all refills
            assert isinstance(config, Config)
            room = config.rollout.prompts_per_step * (1 + config.algorithm.max_refills)
            state["num_prompts"] = state.get("step", 0) * room
        if (best := state.get("best")) is not None:
            now = measure_of_best(config)
            if now != {"name": best.get("name"), "measured": _with_absolute_paths(best.get("measured"))}:
                state["best"] = None
        names = {own.name for own in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in names})

    def state(self) -> dict[str, Any]:
        """What `of_checkpoint` takes."""
        return asdict(self)

    def measure_by(self, measure: dict[str, Any] | None) -> bool:
        """Forgets the evaluations if the coming ones are made otherwise: their numbers are not compared.

        Args:
            measure: of the coming evaluations, see `measure_of_evaluations`; None: there are none.

        Returns:
            Whether there were any to forget.
        """
        is_other = None not in (measure, self.measured) and measure != self.measured
        if is_other:
            self.before = self.examples_before = self.after = self.examples_after = None
        self.measured = measure or self.measured
        return is_other

    def add_step(self, metrics: Mapping[str, float], num_prompts: int) -> None:
        """Counts a complete step with these metrics."""
        self.step += 1
        self.num_prompts += num_prompts
        self.seconds += metrics["seconds"]
        self.tokens += round(metrics["tokens_per_second"] * metrics["seconds"])

    def is_best(self, name: str, value: float | None) -> bool:
        """Whether the value is better than all values so far, if it is finite. The best loss is the lowest."""
        if value is None or not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value < self.best["value"] if name.startswith("held_out_loss") else value > self.best["value"]

    def is_beaten(self, name: str, run: Path) -> bool:
        """Whether a later step of the run had a better value than all values so far."""
        rows = read_metrics(run, warn=lambda _: None) if (run / "metrics.jsonl").is_file() else []
        return any(row["step"] > self.step and self.is_best(name, row.get(name)) for row in rows)

    def summary(self, config: RunConfig) -> dict[str, Any]:
        """What ``summary.json`` holds of a finished run."""
        summary: dict[str, Any] = {
            "steps": self.step,
            "minutes": round(self.seconds / 60, 3),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }
        if config.evaluation is not None:
            names, both = config.evaluation.metrics, {"before": self.before or {}, "after": self.after or {}}
            summary = {f"{name}_{when}": found.get(name) for name in names for when, found in both.items()} | summary
            if self.best is not None:
                summary |= {"best_step": self.best["step"], f"{self.best['name']}_best": self.best["value"]}
        return summary


def as_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers that JSON has, which are finite, and None in place of others."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def measure_of_best(config: RunConfig) -> dict[str, Any]:
    """The number that decides on the best policy, and how it is measured."""
    return {"name": config.checkpoint.best, "measured": _with_absolute_paths(config.measured)}


def measure_of_evaluations(config: RunConfig, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The held-out rows, wherever they are, and how they are measured, as JSON holds it; None: they are not.

    Args:
        config: of the run.
        identity: see `Trainer.identity`.
    """
    if config.measured is None:
        return None
    rows = {name: found for name, found in identity.get("data", {}).items() if name.startswith("held_out")}
    how = {name: value for name, value in config.measured.items() if name not in ("path", "max_rows")}
    found: dict[str, Any] = json.loads(json.dumps({"rows": rows, "how": how}))
    return found


def _with_absolute_paths(measured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A measure with the paths of its sets from the root on: a run may go on from another folder."""
    if measured is None:
        return None
    path = measured["path"]
    sets = path if isinstance(path, Mapping) else {"": path}
    absolute = {name: path if path.startswith(HUB) else os.path.abspath(path) for name, path in sets.items()}
    return {**measured, "path": absolute}
