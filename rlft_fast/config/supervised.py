"""The configuration of a run that learns from rows of data, without sampling."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rlft_fast.config.base import rule
from rlft_fast.config.model import EngineConfig
from rlft_fast.config.paths import LocalPath
from rlft_fast.config.resume import MayChange
from rlft_fast.config.roles import Role, StepPhase
from rlft_fast.config.training import CheckpointConfig, HeldOutConfig, RowsConfig, RunConfig, TrackerName


class SFTDataConfig(RowsConfig):
    """Texts to learn from.

    A row has messages; or a prompt with its completion, each a text or messages; or a text.
    """

    path: MayChange[LocalPath]
    """JSONL file, or folder written by datasets.save_to_disk."""
    messages_column: str = "messages"
    """Name of the column with a conversation. The assistant's messages are learned."""
    completion_column: str = "completion"
    """Name of the column with the answer to the prompt, which is learned."""
    text_column: str = "text"
    """Name of the column with a whole text, which is learned from its second token to an end token."""
    max_sequence_tokens: PositiveInt = 4096
    """Most tokens of a row. A longer row is an error that names it."""


class SFTEvaluationConfig(HeldOutConfig):
    """The loss on held-out rows, before, during and after training."""

    @property
    def kinds(self) -> list[str]:
        """The mean loss of the tokens that are learned in training."""
        return ["held_out_loss"]


class SFTConfig(RunConfig):
    """A run of supervised fine-tuning."""

    cluster: ClassVar[None] = None  # pyrefly: ignore [bad-override] (models live in the processes of torchrun)

    objective: Literal["sft"] = "sft"
    """What the model learns: sft, from texts; rl, from rewards of what it samples (rlft-fast train --help)."""
    data: SFTDataConfig
    """Texts to learn from."""
    batch_size: PositiveInt = 32
    """Rows of a step, of all processes together."""
    actor: EngineConfig = EngineConfig()
    """How the model is held in memory, run and trained."""
    evaluation: MayChange[SFTEvaluationConfig | None] = None
    """The loss on held-out rows."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    log: MayChange[tuple[TrackerName, ...]] = ("jsonl",)
    """Trackers that get the numbers of each step. The file metrics.jsonl is always written."""

    @rule
    def _longest_row_fits(self) -> Iterator[str]:
        longest, most = self.data.max_sequence_tokens, self.actor.max_tokens
        if most < longest:
            yield (
                f"actor.max_tokens is {most}, but a row may have data.max_sequence_tokens={longest}: raise the first "
                "or lower the second"
            )

    @property
    def roles(self) -> dict[str, Role]:
        """The model that trains."""
        phases: tuple[StepPhase, ...] = ("update",) if self.evaluation is None else ("infer", "update")
        return {"actor": Role(path=self.model, config=self.actor, head="logprob", trains=True, phases=phases)}

    @property
    def longest_taught(self) -> int:
        """Most tokens of a row."""
        return self.data.max_sequence_tokens

    @property
    def sequences_per_update(self) -> float:
        """Rows of a step."""
        return self.batch_size
