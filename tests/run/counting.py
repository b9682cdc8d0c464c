"""A trainer that counts instead of learning. A run of it takes milliseconds, and does all that `Run` does."""

import contextlib
import dataclasses
import json
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlft_fast.config import Config, EngineConfig
from rlft_fast.engine import CheckpointError, CheckpointManager
from rlft_fast.errors import Interrupted
from rlft_fast.run.protocol import Evaluated, StepResult
from rlft_fast.trainer import Run
from rlft_fast.world import STOP, LeftEarlyError, World
from tests.support.runs.curves import without_matplotlib
from tests.trainer.toy import read_lines, toy_config

Strikes = Mapping[tuple[str, int], Callable[[], object]]
"""What happens in a method after so many steps, once."""


class Counter:
    """The engine: one number, as a checkpoint manager saves it and a run looks at it."""

    head = "counting"
    config = EngineConfig()
    model = SimpleNamespace(pretrained=SimpleNamespace(config=SimpleNamespace(architectures=["Counter"])))

    def __init__(self) -> None:
        self.step, self.total = 0, torch.zeros(1, dtype=torch.float64)

    def add(self, value: float) -> None:
        """Halves what there is, so that the order of values matters."""
        self.step += 1
        self.total.mul_(0.5).add_(value)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def counters(self) -> dict[str, int]:
        return {"step": self.step}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self.step = counters["step"]

    def non_finite_weights(self) -> list[str]:
        return [] if self.total.isfinite().all() else ["total"]


@dataclasses.dataclass
class CountingModels:
    trained: Mapping[str, Counter]
    world: World
    max_num: int
    full_disk: Sequence[str]

    def checkpoints(self, folder: Path) -> CheckpointManager:
        return CheckpointManager(folder, self.max_num, world=self.world)

    def export(self, folder: Path) -> None:
        if folder.name in self.full_disk:
            raise CheckpointError("the disk is full")
        folder.mkdir(exist_ok=True)
        (folder / ".export.json").write_text('{"files": ["total.json"]}')
        (folder / "total.json").write_text(json.dumps(self.trained["counter"].total.item()))

    def divergence(self, name: str) -> str:
        return f"the {name} has diverged"


class CountingTrainer:
    """See `rlft_fast.run.protocol.Trainer`.

    A step adds a random number and the number of prompts so far, so that its result depends on the number of the step,
    on the place in the stream, on random states, on the engine and on the state beside the engine.

    Args:
        config: of the run.
        strikes: what happens to this trainer in a method: ``train_step`` (before the number is added), ``added``,
            ``evaluate`` or ``restart``.
        accuracy: of an evaluation after so many steps; None: the number itself. A value of None is no number.
        world: the processes that count together.
        full_disk: names of folders to which no model can be exported.
    """

    def __init__(
        self, config: Config, strikes: Strikes | None = None, *, accuracy: Mapping[int, float | None] | None = None,
        world: World | None = None, full_disk: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.config = config
        self.world = world or World.current()
        self.strikes = dict(strikes or {})
        self.accuracy, self.full_disk = accuracy, full_disk
        self.closed, self.started, self.restarts = 0, [], 0
        self._new()

    def _new(self) -> None:
        self.counter, self.bonus, self.version = Counter(), 0, 0
        self.models = CountingModels(
            {"counter": self.counter}, self.world, self.config.checkpoint.max_num, self.full_disk
        )

    def strike(self, method: str) -> None:
        self.strikes.pop((method, self.counter.step), lambda: None)()

    @property
    def example_prompts(self) -> Sequence[str]:
        return ["sun", "moon"] if self.config.evaluation is not None else []

    def identity(self) -> Mapping[str, Any]:
        return {"checksum": {"model": "counter"}, "settings": {"seed": self.config.seed}}

    def notes(self) -> Iterable[str]:
        return ["this run counts"]

    def start(self, step: int) -> None:
        assert step == self.counter.step
        if step == 0:
            torch.manual_seed(self.config.seed)
        self.started.append(step)
        self.version = step + 1

    def train_step(self, step: int, first_prompt: int) -> StepResult:
        assert step == self.counter.step
        with contextlib.suppress(LeftEarlyError), STOP.alone():
            self.strike("train_step")
        STOP.leave_or_finish(self.world)
        self.counter.add(torch.rand(()).item() + first_prompt + self.bonus)
        self.version = self.counter.step + 1
        self.strike("added")
        self.bonus += 1
        number, num_prompts = self.counter.step, 2 + step % 2
        keeps_tokens = self.config.log_tokens_mib is not None and self.world.is_first
        metrics = {"total": self.counter.total.item(), "seconds": 3.0, "tokens_per_second": 8.0 * num_prompts}
        records = ({"prompt": f"prompt {first_prompt + i}"} for i in range(num_prompts))
        return StepResult(
            metrics=metrics, num_prompts=num_prompts, records=records, warnings=["three"] if number == 3 else [],
            tokens={"sample_B": torch.arange(num_prompts)} if keeps_tokens else None,
        )  # fmt: skip

    def evaluate(self) -> Evaluated:
        with contextlib.suppress(LeftEarlyError), STOP.alone():
            self.strike("evaluate")
        STOP.leave_together(self.world)
        value = self.counter.total.item() if self.accuracy is None else self.accuracy[self.counter.step]
        metrics = {} if value is None else {"accuracy": value}
        return Evaluated(metrics=metrics, examples=[f"{i} after {self.counter.step}" for i in range(2)], num_scored=2)

    def is_after(self, step: int) -> bool:
        return self.version == step + 1

    def state(self) -> dict[str, Any]:
        return {"bonus": self.bonus}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.bonus = state.get("bonus", 0)

    def ahead(self, *, waits: bool) -> dict[str, torch.Tensor]:
        return {}

    def load_ahead(self, tensors: Mapping[str, Any]) -> None: ...

    def restart(self) -> None:
        self.restarts += 1
        self._new()

    def close(self) -> None:
        self.closed += 1


def counting_config(folder: Path, **changes: Any) -> Config:
    """Six steps, a checkpoint after the third, and evaluations after every second; see `toy_config`."""
    evaluation = {"path": str(folder / "held_out.jsonl"), "every": 2}
    values = {"steps": 6, "evaluation": evaluation, "checkpoint__every": 3} | changes
    return toy_config(folder / "no model", folder, **values)


def count(
    folder: Path, strikes: Strikes | None = None, *, resume: bool | str = False, force: bool = False,
    accuracy: Mapping[int, float | None] | None = None, draws: bool = False, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run in ``folder / "run"``, which draws no curve unless it is asked to."""
    trainer = CountingTrainer(counting_config(folder, **changes), strikes, accuracy=accuracy)
    try:
        with contextlib.nullcontext() if draws else without_matplotlib():
            return Run(trainer).run(resume, force=force)
    finally:
        assert trainer.closed == 1


def by_signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


def lose(folder: Path, store: str) -> None:
    """A run with a store that a signal stops in its step 5, and whose folder is lost then."""
    with pytest.raises(Interrupted):
        count(folder, {("train_step", 4): by_signal(signal.SIGTERM)}, checkpoint__store=store)
    shutil.rmtree(folder / "run")


def raising(error: BaseException) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def checkpoints(folder: Path, run: str = "run") -> list[str]:
    """Names of the entries in the folder of a run's checkpoints."""
    inside = folder / run / "checkpoints"
    return sorted(path.name for path in inside.iterdir()) if inside.exists() else []


def rows_of(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the time of day."""
    return [{k: v for k, v in row.items() if k != "time"} for row in read_lines(folder / run / "metrics.jsonl")]


def result_of(folder: Path, run: str = "run") -> dict[str, Any]:
    """What a run leaves that an interruption must not change: lines, the model and the summary."""
    texts = {name: (folder / run / name).read_text() for name in ("samples.jsonl", "summary.json", "hf/total.json")}
    return {"metrics": rows_of(folder, run), "newest": checkpoints(folder, run)[-1], **texts}
