"""What the benchmark of the trainers finds: its measurements, and how far the heads agree."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.support.harness import Results


@dataclass(frozen=True)
class Agreement:
    """How far both heads of a trainer agree.

    Attributes:
        loss: difference of the losses, beside their size where it is more than 1.
        gradient: norm of the difference of all gradients, beside the norm of the gradients.
    """

    loss: float
    gradient: float


@dataclass
class Comparison:
    """Times and memory of every pass, and the agreement by trainer."""

    results: Results = field(default_factory=Results)
    agreement: dict[str, Agreement] = field(default_factory=dict)
