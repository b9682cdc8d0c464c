"""What a model of a run is, and in which phases of a step it works."""

from dataclasses import dataclass
from typing import Literal

from rlft_fast.config.schema.model import EngineConfig

HeadKind = Literal["logprob", "value", "score"]
StepPhase = Literal["generate", "score", "infer", "update", "sync"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model of a run.

    Attributes:
        path: folder of the model.
        config: of its engine.
        head: "logprob" of a policy or a reference, "value" of a critic, "score" of a reward model.
        trains: whether it has an optimizer.
        phases: the phases of a step in which it works.
        temperature: of its log-probabilities.
        top_k: how many of the most likely ids it tells of each token; None: none.
        part: name of the part of the reward that its scores are; None: it scores nothing.
    """

    path: str
    config: EngineConfig
    head: HeadKind
    trains: bool
    phases: tuple[StepPhase, ...]
    temperature: float = 1.0
    top_k: int | None = None
    part: str | None = None
