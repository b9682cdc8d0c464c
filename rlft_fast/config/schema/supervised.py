"""The configurations of runs that learn from rows of data, without sampling."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rlft_fast.config.base import Section, rule
from rlft_fast.config.paths import DataPath
from rlft_fast.config.resume import MayChange
from rlft_fast.config.schema.cluster import ClusterConfig
from rlft_fast.config.schema.model import EngineConfig, TopKTeacherConfig
from rlft_fast.config.schema.roles import HeadKind, Role, StepPhase
from rlft_fast.config.schema.training import CheckpointConfig, HeldOutConfig, RowsConfig, RunConfig, TrackerName


class TaughtDataConfig(RowsConfig):
    """Rows to learn from."""

    path: MayChange[DataPath | dict[str, DataPath]]
    """File of rows (JSONL, JSON, CSV, TSV, parquet; texts also .gz), dataset folder, hf://OWNER/NAME/SPLIT, or several
    of them by name."""
    max_sequence_tokens: PositiveInt = 4096
    """Most tokens of a sequence. For rows with a longer one see overlong."""


class SFTDataConfig(TaughtDataConfig):
    """Texts to learn from.

    A row has messages; or a prompt with its completion, each a text or messages; or a text.
    """

    messages_column: str = "messages"
    """Name of the column with a conversation. The assistant's messages are learned."""
    completion_column: str = "completion"
    """Name of the column with the answer to the prompt, which is learned."""
    text_column: str = "text"
    """Name of the column with a whole text, which is learned from its second token to an end token."""


class PairDataConfig(TaughtDataConfig):
    """Pairs to learn from.

    A row has a prompt with two answers, each a text or messages; or two conversations with equal beginnings.
    """

    chosen_column: str = "chosen"
    """Name of the column with the better answer."""
    rejected_column: str = "rejected"
    """Name of the column with the worse answer."""


class RewardDataConfig(PairDataConfig):
    """Pairs to learn from, with margins."""

    margin_column: str = "margin"
    """Name of the column with the margin by which the score of the better answer should be higher; missing: 0."""


class SFTEvaluationConfig(HeldOutConfig):
    """The loss on held-out rows, before, during and after training."""

    @property
    def kinds(self) -> list[str]:
        """The mean loss of the tokens that are learned in training."""
        return ["held_out_loss"]


class PairEvaluationConfig(HeldOutConfig):
    """How often the better one of a held-out pair is rated higher, before, during and after training."""

    @property
    def kinds(self) -> list[str]:
        """The share of pairs that are rated right, and the mean loss."""
        return ["held_out_pair_accuracy", "held_out_loss"]


class TaughtConfig(RunConfig):
    """What the runs that learn from rows share."""

    head: ClassVar[HeadKind] = "logprob"

    data: TaughtDataConfig
    """Rows to learn from."""
    batch_size: PositiveInt = 32
    """Rows of a step, of all processes together."""
    actor: EngineConfig = EngineConfig()
    """How the model is held in memory, run and trained."""
    evaluation: MayChange[HeldOutConfig | None] = None
    """Numbers on held-out rows."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    cluster: MayChange[ClusterConfig | None] = None
    """Workers on a Ray cluster; null: the processes that torchrun has started, or this process alone."""
    log: MayChange[tuple[TrackerName, ...]] = ("jsonl",)
    """Trackers that get the numbers of each step. The file metrics.jsonl is always written."""

    @rule
    def _workers_have_a_model(self) -> Iterator[str]:
        given = {} if self.cluster is None else {**self.cluster.groups, "generators": self.cluster.generators}
        for name, workers in given.items():
            if workers is not None and name not in self.roles:
                yield f"cluster.{name} is given, but objective {self.objective} has none: leave it out"

    @rule
    def _longest_row_fits(self) -> Iterator[str]:
        longest, most = self.longest_taught, self.actor.max_tokens
        if most < longest:
            yield (
                f"actor.max_tokens is {most}, but a row may have {longest} tokens with "
                f"data.max_sequence_tokens={self.data.max_sequence_tokens}: raise the first or lower the second"
            )

    @property
    def roles(self) -> dict[str, Role]:
        """The model that trains."""
        phases: tuple[StepPhase, ...] = ("update",) if self.evaluation is None else ("infer", "update")
        return {"actor": Role(path=self.model, config=self.actor, head=self.head, trains=True, phases=phases)}

    @property
    def longest_taught(self) -> int:
        """Most tokens of what stays together: a row, or the two sequences of a pair."""
        return self.data.max_sequence_tokens

    @property
    def sequences_per_update(self) -> float:
        """Rows of a step."""
        return self.batch_size


class SFTTeacherConfig(TopKTeacherConfig):
    """A frozen model whose distributions of the taught tokens are learned, too."""

    cross_entropy_weight: NonNegativeFloat = 1.0
    """Weight of -log π of the taught tokens in the loss; 0: the teacher alone teaches."""


class SFTConfig(TaughtConfig):
    """A run of supervised fine-tuning."""

    objective: Literal["sft"] = "sft"
    """What the model learns: sft, from texts; rl, from rewards of what it samples (rlft-fast train --help)."""
    data: SFTDataConfig
    """Texts to learn from."""
    teacher: SFTTeacherConfig | None = None
    """A model to distil on the rows."""
    evaluation: MayChange[SFTEvaluationConfig | None] = None
    """The loss on held-out rows."""

    def for_device(self, device_type: str) -> Self:
        """With `ModelConfig.for_device` of each model."""
        resolved, teacher = super().for_device(device_type), self.teacher
        device_type = self.device_of_models(device_type)
        return resolved.model_copy(update={"teacher": None if teacher is None else teacher.for_device(device_type)})

    @rule
    def _longest_row_fits_the_teacher(self) -> Iterator[str]:
        if self.teacher is not None and self.teacher.max_tokens < self.longest_taught:
            yield (
                f"teacher.max_tokens is {self.teacher.max_tokens}, but a row may have {self.longest_taught} tokens "
                f"with data.max_sequence_tokens={self.data.max_sequence_tokens}: raise the first or lower the second"
            )

    @property
    def model_folders(self) -> dict[str, str | None]:
        """Folders of the model that learns and of its teacher, by key."""
        return {"model": self.model, "teacher.model": None if self.teacher is None else self.teacher.model}

    @property
    def roles(self) -> dict[str, Role]:
        """The model that trains, and its teacher."""
        if (teacher := self.teacher) is None:
            return super().roles
        role = Role(
            path=teacher.model, config=teacher.engine, head="logprob", trains=False, phases=("infer",),
            top_k=teacher.num_ids,
        )  # fmt: skip
        return {**super().roles, "teacher": role}


class PairConfig(TaughtConfig):
    """What the runs that learn from pairs share."""

    data: PairDataConfig
    """Pairs to learn from."""
    evaluation: MayChange[PairEvaluationConfig | None] = None
    """Accuracy and loss on held-out pairs."""

    @property
    def longest_taught(self) -> int:
        """Most tokens of a pair."""
        return 2 * self.data.max_sequence_tokens


class PreferenceConfig(Section):
    """The loss of a pair. With Δ the difference of the log-ratios log π - log π_ref of its two answers."""

    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: -log sigmoid(beta Δ); ipo: (Δ - 1 / (2 beta))², Δ of means over tokens; hinge: max(0, 1 - beta Δ)."""
    beta: PositiveFloat = 0.1
    """How closely the policy is held to the reference, which is the policy before training."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs whose order is expected to be wrong. Read by sigmoid."""
    length_normalized: bool = False
    """Log-ratios are means over the tokens of an answer instead of sums."""

    @rule
    def _smoothing_is_read(self) -> Iterator[str]:
        if self.label_smoothing and self.kind != "sigmoid":
            yield f"label_smoothing is read by kind: sigmoid, but kind is {self.kind}: leave it out"


class DPOConfig(PairConfig):
    """A run of direct preference optimization."""

    objective: Literal["dpo"] = "dpo"
    """What the model learns: dpo, which answers are preferred; rl, from rewards (rlft-fast train --help)."""
    loss: PreferenceConfig = PreferenceConfig()
    """The loss of a pair."""

    @property
    def roles(self) -> dict[str, Role]:
        """The policy. Before its first step it infers the log-probabilities of the reference."""
        return {"actor": replace(super().roles["actor"], phases=("infer", "update"))}


class RewardModelConfig(PairConfig):
    """A run that trains a reward model."""

    head: ClassVar[HeadKind] = "score"

    objective: Literal["reward"] = "reward"
    """What the model learns: reward, to score answers; rl, from rewards of what it samples (rlft-fast train --help)."""
    data: RewardDataConfig
    """Pairs to learn from."""

    @property
    def longest_taught(self) -> int:
        """Most tokens of a pair, with a token behind each sequence."""
        return 2 * (self.data.max_sequence_tokens + 1)
