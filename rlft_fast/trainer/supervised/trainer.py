"""What the runs that learn from rows share: an optimizer step on the next rows, and numbers on held-out rows.

The rows of a step are a function of the seed and the step, so a run that continues from a checkpoint repeats what the
uninterrupted run would have done. The number of processes changes a run by rounding alone.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft_fast.config import DPOConfig, RunConfig, SFTConfig, TaughtConfig, fixed_settings
from rlft_fast.data import Batch
from rlft_fast.engine import TRAINED, CheckpointManager, weighted
from rlft_fast.rl import BradleyTerryLoss, LikelihoodLoss, PairLoss, PreferenceLoss
from rlft_fast.run import Evaluated, Phases, StepResult, dotted
from rlft_fast.trainer.inputs import model_checksums
from rlft_fast.trainer.learn import asked_of_teacher, check_embeddings, with_teacher
from rlft_fast.trainer.models import build_taught, check_finite, notes_on
from rlft_fast.trainer.prompts import ImageError, overlong_notes
from rlft_fast.trainer.supervised.data import Rows, RowsData, check_row_lengths, check_row_tokens
from rlft_fast.trainer.supervised.pairs import PairRows
from rlft_fast.trainer.supervised.reference import Reference
from rlft_fast.trainer.supervised.rows import TaughtRows, chunks
from rlft_fast.world import World, init_distributed

_CAPS = 8  # micro-batches of each process in a batch that is inferred, so that each rank has equal work


def rows_identity(config: RunConfig, data: RowsData) -> dict[str, Any]:
    """What a run has to have in common with the run that it continues."""
    return {"data": data.descriptions, "checksum": model_checksums(config), "settings": fixed_settings(config)}


class RowsTrainer:
    """The model and the rows of a configuration, and one step of learning with them.

    Everything that can be wrong with the input is checked here, before anything runs.

    Args:
        config: the run.
        world: the processes that train together; None: the processes that torchrun has started.

    Raises:
        ValueError: model or data cannot be used.
    """

    example_prompts: Sequence[str] = ()

    def __init__(self, config: TaughtConfig, world: World | None = None) -> None:
        self.world = world = world or init_distributed(config.timeout_minutes)
        world.require_agreement("configuration", dict(dotted(config.model_dump(mode="json"))))
        self.config = config
        self.data = RowsData.load(config)
        world.require_agreement("data", dict(dotted(self.data.descriptions)))
        self.loss = loss_of(config)
        elsewhere = None if config.cluster is None else lambda: self.models.take_usage()  # of the models of now
        self.phases = Phases(world, elsewhere=elsewhere)
        self._load_models()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._check_models()
            stack.pop_all()
        self._has_reference = False
        if isinstance(self.loss, PreferenceLoss):
            self._attach_references()
            if states := CheckpointManager(Path(config.output_dir) / "checkpoints").states():
                # while the model is the reference: one of the checkpoints may be loaded next
                self._infer_references([(state["step"], state.get("num_prompts", 0)) for state in states])

    def _load_models(self) -> None:
        self.models = build_taught(self.config, self.world)
        self.teacher = self.models.engines.get("teacher")

    def _check_models(self) -> None:
        num_embeddings = self.models.actor.facts.num_embeddings
        check_row_tokens(num_embeddings, self.data)
        for name, engine in self.models.engines.items():
            check_row_lengths("model" if name == "actor" else f"{name}.model", engine.facts.longest, self.data)
        if self.teacher is not None:
            assert isinstance(self.config, SFTConfig)
            assert self.config.teacher is not None
            check_embeddings(num_embeddings, self.teacher.facts.num_embeddings, self.config.teacher)
            check_finite("teacher.model", self.teacher)

    def _attach_references(self) -> None:
        """Gives each set its log-probabilities under the reference, which may be kept in the folder of the run."""
        actor, identity = self.config.for_device(self.world.device.type).actor, rows_identity(self.config, self.data)
        model = {"checksum": identity["checksum"], "dtypes": [actor.compute_dtype, actor.param_dtype]}
        folder = Path(self.config.output_dir).absolute() / "reference"

        def attached(name: str, rows: Rows) -> PairRows:
            assert isinstance(rows, PairRows)
            told = json.dumps({**model, "rows": rows.description}, sort_keys=True)
            path = folder / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.npy"
            lengths = [length - 1 for length in rows.sequences.num_tokens]
            return replace(rows, reference=Reference(lengths, path, self.world))

        held_out: dict[str, Rows] = {
            name: attached(f"held_out{name and '_'}{name}", rows) for name, rows in self.data.held_out.items()
        }
        self.data = replace(self.data, rows=attached("training", self.data.rows), held_out=held_out)

    def _infer_references(self, begins: Sequence[tuple[int, int]] = ((0, 0),), *, keeps: bool = False) -> None:
        """Infers what is missing of the rows that the run reads: the model is the reference until it trains.

        Args:
            begins: where the run may begin: complete steps, and rows that these steps have taken.
            keeps: whether the folder of the run is this run's, and keeps what is inferred.
        """
        used: set[int] = set()
        for step, first in begins:
            count = (self.config.steps - step) * self.config.batch_size
            used |= {*(self._rows(first, count) if count < len(self.data.rows) else range(len(self.data.rows)))}
        self._infer_reference(self.data.rows, sorted(used), keeps=keeps)
        for rows in self.data.held_out.values():
            self._infer_reference(rows, range(len(rows)), keeps=keeps)
        self._has_reference = True

    def _require_reference(self) -> None:
        """Infers before the first step where no run has started the trainer."""
        if isinstance(self.loss, PreferenceLoss) and not self._has_reference:
            self._infer_references()

    def _infer_reference(self, rows: Rows, used: Sequence[int], *, keeps: bool) -> None:
        assert isinstance(rows, PairRows)
        assert rows.reference is not None
        reference, actor = rows.reference, self.models.actor
        if keeps:
            reference.keep()
        for pairs in self._chunks(rows, reference.missing(used)):
            reference.put(pairs, actor.infer(rows.batch(pairs), ("logprob",))["logprob"])
        reference.sync()

    def _chunks(self, rows: Rows, used: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of rows that are inferred together: a few micro-batches, so that no batch holds a whole set."""
        return chunks(used, rows.num_tokens, _CAPS * self.models.actor.config.max_tokens * self.models.num_devices)

    def _rows(self, first: int, count: int) -> list[int]:
        """Rows of the stream."""
        return self.data.stream.rows(first, count, self.config.seed)

    def _batch(self, rows: Rows, numbers: Sequence[int]) -> Batch:
        """The named rows. A file of an image that is gone on one rank ends the run on all."""
        if isinstance(rows, TaughtRows) and rows.images:
            return self.world.together(lambda: rows.batch(numbers), ImageError)
        return rows.batch(numbers)

    def train_step(self, step: int, first_prompt: int | None = None) -> StepResult:
        """An optimizer step on the next rows.

        Args:
            step: counts from 0.
            first_prompt: number of rows that the steps before have taken; None: ``batch_size`` each.
        """
        started, size, actor = time.perf_counter(), self.config.batch_size, self.models.actor
        self._require_reference()
        self.phases.restart()
        torch.manual_seed((self.config.seed * 1_000_003 + step) % 2**63)  # for dropout
        first = step * size if first_prompt is None else first_prompt
        batch = self._batch(self.data.rows, self._rows(first, size))
        if self.teacher is not None:
            assert isinstance(self.config, SFTConfig)
            with self.phases.timed("teacher"):
                outputs = self.teacher.infer(batch, asked_of_teacher(self.config.teacher))
                batch = with_teacher(batch, outputs, actor.facts.num_embeddings)
        with self.phases.timed("update"):
            metrics = actor.train_step(batch, self.loss, schedule_step=step)
        metrics = {"train_loss": metrics.pop("loss")} | metrics | self.phases.metrics()
        metrics |= actor.facts.utilisation(
            actor.facts.flops.of(batch), self.phases.seconds["update"], self.models.num_devices
        )
        metrics |= {"tokens": batch.num_tokens, "taught_tokens": int(batch.loss_mask_T.sum())}
        seconds = time.perf_counter() - started
        metrics |= {"seconds": seconds, "tokens_per_second": batch.num_tokens / seconds}
        return StepResult(metrics=metrics, num_prompts=size)

    def evaluate(self) -> Evaluated:
        """The numbers of each held-out set, and their means over the sets."""
        self._require_reference()
        found = {name: self._measure(rows) for name, rows in self.data.held_out.items()}
        kinds = [] if self.config.evaluation is None else self.config.evaluation.kinds
        metrics = {kind: sum(numbers[kind] for numbers in found.values()) / len(found) for kind in kinds}
        metrics |= {f"{kind}_{name}": found[name][kind] for name in found if name for kind in kinds}
        return Evaluated(metrics=metrics, examples=[], num_scored=sum(map(len, self.data.held_out.values())))

    def _measure(self, rows: Rows) -> dict[str, float]:
        """The loss and its metrics, means over all rows. A teacher is not asked."""
        found: dict[str, float] = {}
        size = 0
        for each in self._chunks(rows, range(len(rows))):
            batch = self._batch(rows, each)
            own = (
                int(batch.loss_mask_T.sum()) if isinstance(self.loss, LikelihoodLoss) else len(each)
            )  # tokens or pairs
            for name, value in self._measure_batch(batch).items():
                found[name] = found.get(name, 0.0) + own * value
            size += own
        return {f"held_out_{name}": value / size for name, value in found.items()}

    def _measure_batch(self, batch: Batch) -> dict[str, float]:
        loss = LikelihoodLoss() if isinstance(self.loss, LikelihoodLoss) else self.loss
        (name,) = TRAINED[self.config.head][:1]
        asked = batch.active_T
        fields = {f"{name}_T": self.models.actor.infer(batch, (name,))[name][asked]}
        fields["entropy_T"] = torch.zeros_like(fields[f"{name}_T"])  # which is not measured
        weighed, scale = weighted(batch, loss)
        for key in loss.fields:
            if key == "sequence_T":
                fields[key] = torch.searchsorted(batch.cu_seqlens.long(), asked.nonzero().squeeze(1), right=True) - 1
            else:
                values = getattr(weighed, key)
                fields[key] = values if key.endswith("_B") else values[asked]
        total = scale * loss.per_token(fields).sum(dtype=torch.float64)
        return {"loss": total.item()} | {name: value.item() for name, value in loss.metrics(fields).items()}

    # ---- the state of a run -------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Starts new workers in place of all workers, after some were lost, with the weights of the model folders."""
        self.models.close()
        self._load_models()

    def identity(self) -> dict[str, Any]:
        """See `Trainer`."""
        return rows_identity(self.config, self.data)

    def notes(self) -> Iterator[str]:
        """See `Trainer`."""
        yield from notes_on(self.models.engines, self.models.trained)
        yield from overlong_notes({name: rows.overlong for name, rows in self.data.named.items()})

    def start(self, step: int) -> None:
        """Keeps the log-probabilities of the reference in the folder of the run.

        Before the first step, the missing ones are inferred. Later the model is not the reference any more.
        """
        if isinstance(self.loss, PreferenceLoss):
            self._infer_references([] if step else [(0, 0)], keeps=True)

    def is_after(self, step: int) -> bool:
        """See `Trainer`: every step ends with its update."""
        return True

    def state(self) -> dict[str, Any]:
        """Nothing adapts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `state`."""

    def ahead(self, *, waits: bool) -> dict[str, Tensor]:
        """Nothing: steps are made in turn."""
        return {}

    def load_ahead(self, tensors: Mapping[str, Any]) -> None:
        """See `ahead`."""

    def close(self) -> None:
        """Ends workers."""
        self.models.close()


def loss_of(config: TaughtConfig) -> LikelihoodLoss | PairLoss:
    """What the updates of a run minimise."""
    if isinstance(config, DPOConfig):
        return PreferenceLoss(
            kind=config.loss.kind, beta=config.loss.beta, label_smoothing=config.loss.label_smoothing,
            length_normalized=config.loss.length_normalized,
        )  # fmt: skip
    if isinstance(config, SFTConfig) and (teacher := config.teacher) is not None:
        return LikelihoodLoss(
            coef=teacher.cross_entropy_weight, teacher_coef=teacher.weight, teacher_tail=teacher.add_tail
        )
    return BradleyTerryLoss() if config.head == "score" else LikelihoodLoss()
