"""An optimizer step under way: what calls of `FSDPEngine.forward_backward` leave for `optimizer_step`."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from rlft_fast.data import Batch, MicroBatchPlan
from rlft_fast.engine.loss import Output
from rlft_fast.world import accumulate


class MicroBatchOutputs(NamedTuple):
    """The outputs of a micro-batch by name, and where they belong: outputs of the head are (A,), of routers (U, K)."""

    outputs: Mapping[str, Tensor]
    micro_batch: Batch
    output_index_A: Tensor
    row_T: Tensor | None


class RankWork(NamedTuple):
    """What this rank has to run."""

    micro_batches: list[Batch]
    whole: tuple[Batch, MicroBatchPlan] | None
    """The batch of all ranks and its plan; None for a `Share`, whose outputs stay on its rank."""


@dataclass
class OpenStep:
    """The calls of `forward_backward` since the last optimizer step."""

    phase: ExitStack = field(default_factory=ExitStack)
    """Holds `train_mode` open."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """This rank's sums of the metrics, on the device."""
    outputs: list[tuple[dict[Output, Tensor], list[MicroBatchOutputs], RankWork]] = field(default_factory=list)
    """Outputs that a caller asked for, which are gathered after the step."""
    is_reduced: bool = False
    """Whether the last call reduced its gradients, and with them those of the calls before."""

    def add(self, metrics: dict[str, Tensor], is_reduced: bool) -> None:
        accumulate(self.totals, metrics)
        self.is_reduced = is_reduced
