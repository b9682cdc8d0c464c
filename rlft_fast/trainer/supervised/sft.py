"""Supervised fine-tuning: the model learns the taught tokens of a batch of rows in each step.

The rows of a step are a function of the seed and the step, so a run that continues from a checkpoint repeats what the
uninterrupted run would have done. The number of processes changes a run by rounding alone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlft_fast.config import RunConfig, SFTConfig, fixed_settings
from rlft_fast.engine import CheckpointManager, FSDPEngine, export_hf, role_engine
from rlft_fast.errors import Checks
from rlft_fast.models import load_tokenizer, model_checksum
from rlft_fast.rl import LikelihoodLoss
from rlft_fast.run import Evaluated, Phases, StepResult, dotted
from rlft_fast.trainer.models import divergence
from rlft_fast.trainer.prompts import shuffled_rows
from rlft_fast.trainer.supervised.rows import TaughtRows, load_rows
from rlft_fast.world import World, init_distributed


@dataclass(frozen=True, kw_only=True)
class SFTData:
    """The rows of a run.

    Args:
        rows: to learn from.
        held_out: by the name of their set.
    """

    rows: TaughtRows
    held_out: dict[str, TaughtRows]

    @classmethod
    def load(cls, config: SFTConfig) -> "SFTData":
        """Reads and checks all rows. Raises ValueError with everything that was found."""
        tokenizer, checks = load_tokenizer(config.model), Checks()
        sets = {} if config.evaluation is None else config.evaluation.sets
        sources = [config.data.path, *sets.values()]
        found = [checks.run(lambda x=x: load_rows(config.data, tokenizer, config.model, x)) for x in sources]
        checks.raise_found()
        rows, *held_out = (x for x in found if x is not None)
        return cls(rows=rows, held_out=dict(zip(sets, held_out, strict=True)))

    @property
    def descriptions(self) -> dict[str, Any]:
        """What tells the data from other data, by set."""
        sets = {f"held_out{'_' * bool(name)}{name}": found.description for name, found in self.held_out.items()}
        return {"training": self.rows.description} | sets

    def identity(self, config: RunConfig) -> dict[str, Any]:
        """What a run has to have in common with the run that it continues."""
        checksums = {
            name: None if path is None else model_checksum(path) for name, path in config.model_folders.items()
        }
        return {"data": self.descriptions, "checksum": checksums, "settings": fixed_settings(config)}


@dataclass(frozen=True, kw_only=True)
class LocalModels:
    """The models of a run in this process and those beside it, see `rlft_fast.run.protocol.Models`.

    Args:
        config: of the run.
        actor: the model that trains.
        world: the processes that share the model.
    """

    config: RunConfig
    actor: FSDPEngine
    world: World

    @property
    def trained(self) -> Mapping[str, FSDPEngine]:
        return {"actor": self.actor}

    def checkpoints(self, folder: Path) -> CheckpointManager:
        kept = self.config.checkpoint
        return CheckpointManager(folder, kept.max_num, kept.max_mem, self.world)

    def export(self, folder: Path) -> None:
        export_hf(self.actor, folder, overwrite=True)

    def divergence(self, name: str) -> str:
        return divergence(name, self.actor.config)


class SFTTrainer:
    """The model and the rows of a configuration, and one step of learning with them.

    Everything that can be wrong with the input is checked here, before anything runs.

    Args:
        config: the run.
        world: the processes that train together; None: the processes that torchrun has started.

    Raises:
        ValueError: model or data cannot be used.
    """

    example_prompts: Sequence[str] = ()

    def __init__(self, config: SFTConfig, world: World | None = None) -> None:
        self.world = world = world or init_distributed(config.timeout_minutes)
        world.require_agreement("configuration", dict(dotted(config.model_dump(mode="json"))))
        self.config = config
        self.data = SFTData.load(config)
        world.require_agreement("data", dict(dotted(self.data.descriptions)))
        self.loss = LikelihoodLoss()
        self.phases = Phases(world)
        self.restart()
        check_row_tokens(self.models.actor.facts.num_embeddings, self.data)

    def train_step(self, step: int, first_prompt: int | None = None) -> StepResult:
        """An optimizer step on the next rows.

        Args:
            step: counts from 0.
            first_prompt: number of rows that the steps before have taken; None: ``batch_size`` each.
        """
        started, size, actor = time.perf_counter(), self.config.batch_size, self.models.actor
        self.phases.restart()
        torch.manual_seed((self.config.seed * 1_000_003 + step) % 2**63)  # for dropout
        first = step * size if first_prompt is None else first_prompt
        batch = self.data.rows.batch(shuffled_rows(len(self.data.rows), first, size, self.config.seed))
        with self.phases.timed("update"):
            metrics = actor.train_step(batch, self.loss, schedule_step=step)
        metrics = {"train_loss": metrics.pop("loss")} | metrics | self.phases.metrics()
        metrics |= actor.facts.utilisation(actor.facts.flops.of(batch), self.phases.seconds["update"], self.world.size)
        metrics |= {"tokens": batch.num_tokens, "taught_tokens": int(batch.loss_mask_T.sum())}
        seconds = time.perf_counter() - started
        metrics |= {"seconds": seconds, "tokens_per_second": batch.num_tokens / seconds}
        return StepResult(metrics=metrics, num_prompts=size)

    def evaluate(self) -> Evaluated:
        """The mean loss of the taught tokens of each held-out set, and its mean over the sets."""
        losses = {name: self._held_out_loss(rows) for name, rows in self.data.held_out.items()}
        metrics = {"held_out_loss": sum(losses.values()) / len(losses)}
        metrics |= {f"held_out_loss_{name}": loss for name, loss in losses.items() if name}
        return Evaluated(metrics=metrics, examples=[], num_scored=sum(map(len, self.data.held_out.values())))

    def _held_out_loss(self, rows: TaughtRows) -> float:
        batch = rows.batch(range(len(rows)))
        logprob_T = self.models.actor.infer(batch, ("logprob",))["logprob"]
        return -logprob_T[batch.loss_mask_T].mean(dtype=torch.float64).item()

    # ---- the state of a run -------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Loads the model of the model folder."""
        actor = role_engine(self.config, "actor", self.world, self.config.steps)
        self.models = LocalModels(config=self.config, actor=actor, world=self.world)

    def identity(self) -> dict[str, Any]:
        """See `Trainer`."""
        return self.data.identity(self.config)

    def notes(self) -> Iterator[str]:
        """See `Trainer`."""
        if units := self.models.actor.facts.units:
            yield f"actor: units of sharding\n{units}"

    def start(self, step: int) -> None:
        """Nothing: the model is ready."""

    def is_after(self, step: int) -> bool:
        """See `Trainer`: every step ends with its update."""
        return True

    def state(self) -> dict[str, Any]:
        """Nothing adapts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `state`."""

    def close(self) -> None:
        """Nothing was started."""


def check_row_tokens(num_embeddings: int, data: SFTData) -> None:
    """Raises ValueError for a token without an embedding: on a GPU its look-up ends the process without a reason."""
    highest = max(rows.highest_token for rows in (data.rows, *data.held_out.values()))
    if highest >= num_embeddings:
        raise ValueError(
            f"model has embeddings of {num_embeddings} tokens, but the rows have the token {highest}: the tokenizer in "
            "its folder is of another model, or knows tokens that were added without new embeddings"
        )
