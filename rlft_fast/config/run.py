"""A training run: its sections, and what has to hold between them."""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rlft_fast.config.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from rlft_fast.config.base import ConfigError, Loader, LocalPath, Section, explain, set_key
from rlft_fast.config.model import CriticConfig, EngineConfig, ModelConfig
from rlft_fast.config.rollout import RolloutConfig


class DataConfig(Section):
    """Where prompts come from: a JSONL file, a Hugging Face dataset folder, or a reasoning-gym task."""

    path: LocalPath | None = None
    """JSONL file, or folder written by datasets.save_to_disk."""
    task: str | None = None
    """Name of a reasoning-gym task, instead of a path."""
    task_options: dict[str, Any] = Field(default={})
    """Options of the reasoning-gym task."""
    task_size: PositiveInt = 2000
    """How many problems of the reasoning-gym task to make."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    system_prompt: str | None = None
    """System message put before prompts that are texts; null: none, but a chat template may bring its own."""
    chat: bool = True
    """Send text prompts through the chat template; false: tokenize them as they are."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.task is None):
            raise ValueError("give either path (JSONL file or dataset folder) or task (reasoning-gym), not both")
        if self.task is None and self.task_options:
            raise ValueError("task_options are those of a reasoning-gym task: leave them out beside a path")
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is a message of the chat template, which chat: false leaves out")
        return self


class RewardConfig(Section):
    """What completions are worth."""

    function: str | dict[str, float] | None = None
    """module:function or file.py:function, or several with their weights; null: the reasoning-gym task's own."""
    model: LocalPath | None = None
    """Folder of a reward model (sequence classification, one label), whose score is added; runs as the actor does."""
    model_weight: float = 1.0
    """Weight of that score."""
    timeout_s: PositiveFloat | None = None
    """Seconds that a function may take for a sample, in a worker process; over it or crashed: it is left out."""
    workers: PositiveInt = 2
    """With timeout_s: worker processes of each function, on each process."""
    truncation_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a sample that is cut off at max_new_tokens; not in evaluation."""
    overlong_buffer: NonNegativeInt = 0
    """Last tokens before max_new_tokens, in which overlong_penalty sets in linearly; not in evaluation."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Subtracted at the end of overlong_buffer."""


class EvaluationConfig(Section):
    """Greedy accuracy on held-out prompts, before and after training."""

    path: LocalPath
    """JSONL file or dataset folder with the held-out prompts; same columns as the training data."""
    max_new_tokens: PositiveInt = 32
    """Most tokens of an answer."""
    every: NonNegativeInt = 0
    """Also evaluate every so many steps; 0: only before and after."""
    function: str | dict[str, float] | None = None
    """Judges held-out answers instead of reward.function and reward.model, with their time limit; null: these do."""


class CheckpointConfig(Section):
    """When to save, and how much to keep."""

    every: NonNegativeInt = 50
    """Save every so many steps; 0: only at the end."""
    max_num: PositiveInt = 2
    """Complete checkpoints to keep; the disk needs room for one more."""
    max_mem: PositiveFloat | None = None
    """Size of all of them in GB; null: no limit. The newest is always kept."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory, which is as large as what a process writes."""


class Config(Section):
    """A training run."""

    model: LocalPath
    """Folder of the policy to train: a Hugging Face causal language model."""
    output_dir: LocalPath
    """Folder for everything the run writes."""
    steps: PositiveInt
    """Rollouts to make and learn from."""
    seed: NonNegativeInt = 0
    """Seed of sampling, data order and mini-batches."""
    timeout_minutes: PositiveFloat = 30
    """How long a process waits for the others before the run ends, naming those that are gone."""
    data: DataConfig
    """Prompts to train on."""
    reward: RewardConfig = RewardConfig()
    """How completions are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is learned from them."""
    actor: EngineConfig = EngineConfig()
    """The policy."""
    critic: CriticConfig | None = None
    """The critic; needed by advantage: gae."""
    reference: ModelConfig | None = None
    """The frozen model of the KL penalty; null: held as the policy is. With actor.lora it is the policy itself."""
    evaluation: EvaluationConfig | None = None
    """Held-out accuracy."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        algorithm = self.algorithm
        own = ":" in algorithm.advantage
        if (algorithm.advantage == "gae") != (self.critic is not None) and not own:
            raise ValueError(
                "algorithm.advantage: gae needs a critic section, and no other of ours takes one; "
                f"got {algorithm.advantage} {'with' if self.critic else 'without'} a critic"
            )
        if algorithm.advantage in GROUP_ADVANTAGES and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"advantage: {algorithm.advantage} compares samples of one prompt: "
                "rollout.samples_per_prompt must be >= 2"
            )
        if algorithm.skip_equal_groups and not own and algorithm.advantage not in GROUP_ADVANTAGES:
            raise ValueError(
                "algorithm.skip_equal_groups needs an advantage that compares samples of one prompt "
                f"({', '.join(GROUP_ADVANTAGES)}); {algorithm.advantage} learns from equal rewards too"
            )
        if algorithm.skip_equal_groups and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "algorithm.skip_equal_groups leaves out every prompt that has a single sample: "
                "rollout.samples_per_prompt must be >= 2"
            )
        if self.rollout.prompts_per_step * self.rollout.samples_per_prompt < algorithm.mini_batches:
            raise ValueError("algorithm.mini_batches is larger than the number of samples per step")
        if self.reward.function is None and self.reward.model is None and self.data.task is None:
            raise ValueError("reward.function is needed: only reasoning-gym tasks bring their own scoring")
        parts = [*self.function_weights, *(["model"] if self.reward.model is not None else [])]
        if algorithm.filter_by is not None and algorithm.filter_by not in parts:
            raise ValueError(
                f"algorithm.filter_by is {algorithm.filter_by!r}, expected a part of the reward: {', '.join(parts)}"
            )
        evaluation_function = None if self.evaluation is None else self.evaluation.function
        if self.reward.timeout_s is not None and self.reward.function is None and evaluation_function is None:
            raise ValueError("reward.timeout_s is the limit of reward.function, which is not given")
        for key, function in (("reward", self.reward.function), ("evaluation", evaluation_function)):
            if function == {}:
                raise ValueError(f"{key}.function names no function: leave it out, or name one")
        if self.reward.overlong_buffer > self.rollout.max_new_tokens:
            raise ValueError("reward.overlong_buffer is a part of rollout.max_new_tokens and cannot be longer")
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if self.reference is not None and (self.actor.lora is not None or not algorithm.kl_coef):
            raise ValueError(
                "reference has nothing to configure: without algorithm.kl_coef there is none, and with actor.lora it "
                "is the policy without its adapters"
            )
        for name, engine in (("actor", self.actor), ("critic", self.critic), ("reference", self.reference)):
            if engine is not None and engine.max_tokens < longest:
                raise ValueError(
                    f"{name}.max_tokens is {engine.max_tokens}, but a sequence may have {longest} tokens "
                    "(rollout.max_prompt_tokens + rollout.max_new_tokens): raise it to at least that"
                )
        self._check_room_for_the_reward_model()
        return self

    @property
    def function_weights(self) -> dict[str, float]:
        """Weights of the reward functions by name: of those given, else of the task's own, which a model replaces."""
        function = self.reward.function
        if isinstance(function, str):
            return {function: 1.0}
        if function is None and self.reward.model is None and self.data.task is not None:
            return {self.data.task: 1.0}
        return function or {}

    def _check_room_for_the_reward_model(self) -> None:
        """It runs as the actor does, and is asked at one token more than a sequence has."""
        evaluation = self.evaluation
        judged = evaluation.max_new_tokens if evaluation is not None and evaluation.function is None else 0
        longest = self.rollout.max_prompt_tokens + max(self.rollout.max_new_tokens, judged) + 1
        if self.reward.model is not None and self.actor.max_tokens < longest:
            raise ValueError(
                f"actor.max_tokens is {self.actor.max_tokens}, but reward.model, which runs as the actor does, may see "
                f"{longest} tokens (rollout.max_prompt_tokens, the longest answer, and one more): raise it by "
                f"{longest - self.actor.max_tokens}"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: dict[str, str] | None = None) -> Self:
        """Reads a YAML file and applies overrides.

        Args:
            path: the YAML file.
            overrides: dotted keys to YAML values, for example ``{"rollout.temperature": "0.7"}``.

        Raises:
            ConfigError: unreadable file, unknown key (with a suggestion), or a value of the wrong type or range.
        """
        try:
            values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
        for key, value in (overrides or {}).items():
            try:
                set_key(values, key.split("."), yaml.load(value, Loader))
            except yaml.YAMLError as error:
                raise ConfigError(f"{key}: {value!r} is not a YAML value: {error}") from error
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates a nested dictionary.

        Raises:
            ConfigError: naming every key that is wrong.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(cls, values, error.errors())) from error

    def to_yaml(self) -> str:
        """The fully resolved configuration; loading it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
