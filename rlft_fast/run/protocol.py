"""What a run drives: a trainer and its models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlft_fast.config import RunConfig
from rlft_fast.world import World

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step leaves for the run's logs.

    Args:
        metrics: with ``seconds`` in all, and ``tokens_per_second``.
        num_prompts: prompts or rows that the step took from the stream.
        records: lines of ``samples.jsonl``; they are made when they are read, on the first rank.
        warnings: for users.
        tokens: on the first rank: numbers of each token, see `rlft_fast.run.records.tokens`; None where none are kept.
        samples: on the first rank: all that `write_rollout` keeps of the step; None where nothing is kept.
    """

    metrics: dict[str, float]
    num_prompts: int
    records: Iterable[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()
    tokens: "dict[str, Tensor] | None" = None
    samples: "dict[str, Tensor] | None" = None


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The numbers of the held-out sets.

    Args:
        metrics: by the names of `HeldOutConfig.metrics`.
        examples: answers to `Trainer.example_prompts`.
        num_scored: rows that the numbers are of: of rl prompts with a judged answer.
    """

    metrics: dict[str, float]
    examples: list[str]
    num_scored: int


class Models(Protocol):
    """The models of a trainer, as a run saves them."""

    @property
    def trained(self) -> Mapping[str, Any]:
        """The engines that train, by name."""

    @property
    def checkpoints(self) -> Callable[[Path], Any]:
        """Makes the manager of the checkpoints in a folder, a `CheckpointManager` or what stands for it."""

    @property
    def export(self) -> Callable[[Path], None]:
        """Writes the model that the run makes to a folder."""

    def divergence(self, name: str) -> str:
        """Says that the engine has diverged, and which settings to lower."""


class Trainer(Protocol):
    """The steps of a run. All ranks call a method together."""

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        ...

    @property
    def world(self) -> World:
        """Of this process."""
        ...

    @property
    def models(self) -> Models:
        """The models of now: `restart` makes new ones."""
        ...

    @property
    def example_prompts(self) -> Sequence[str]:
        """Texts of the held-out prompts whose answers are shown; empty without a held-out set."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """What a run has to have in common with the run that it continues, see `require_same`."""
        ...

    def notes(self) -> Iterable[str]:
        """What a run says of its models at its start."""
        ...

    def start(self, step: int) -> None:
        """Makes the models ready for the step after so many steps."""
        ...

    def train_step(self, step: int, first_prompt: int) -> StepResult:
        """A step, counted from 0, after so many prompts of the stream.

        Raises:
            StepError: a part of the step failed.
        """
        ...

    def evaluate(self) -> Evaluated:
        """Scores the models as they are. Raises StepError."""
        ...

    def is_after(self, step: int) -> bool:
        """Whether models are as so many steps have left them. They may not be where a step failed at its end."""
        ...

    def state(self) -> dict[str, Any]:
        """What continues the trainer beside its models, as JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave; {} at the beginning."""
        ...

    def ahead(self, *, waits: bool) -> dict[str, Any]:
        """Work on coming steps that a checkpoint keeps. If it ``waits``, what is under way is finished before."""
        ...

    def load_ahead(self, tensors: Mapping[str, Any]) -> None:
        """Takes what `ahead` gave, among other values; {} at the beginning."""
        ...

    def restart(self) -> None:
        """Makes new models in place of lost ones, with the weights of the model folders."""
        ...

    def close(self) -> None:
        """Ends everything that the trainer has started."""
        ...
