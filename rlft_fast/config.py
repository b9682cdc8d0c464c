"""Configuration of a training run: a YAML file plus dotted overrides, typed and validated, every key known.

The docstring under a field is its help text (``rlft-fast train --help``).
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

Decay = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what to do."""


class Section(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class OptimizerConfig(Section):
    """AdamW, gradient clipping and the learning-rate schedule."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; biases and norms are never decayed."""
    max_grad_norm: NonNegativeFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; null or 0 only measures it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from 0."""


class LoraConfig(Section):
    """Low-rank adapters: the model's own weights stay as they are."""

    rank: PositiveInt = 16
    """Rank of the update of each matrix."""
    alpha: PositiveInt = 32
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers, as peft takes them; all-linear: every one in the blocks. lm_head: the head, too."""


class ModelConfig(Section):
    """How a model is held in memory and run."""

    max_tokens: PositiveInt = 16384
    """Most tokens of one micro-batch; must hold the longest sequence."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass and of gathered weights; optimizer state is float32 always."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights between steps; bfloat16 keeps their float32 masters in the optimizer, none if frozen."""
    shard_size: Literal["auto"] | int = -1
    """Processes that share one copy of the model: -1 all, 1 each has its own, auto the fewest that it fits in."""
    reshard_after_forward: bool = True
    """Give a block's gathered weights back after its forward pass; false saves communication and costs memory."""
    wrap: tuple[str, ...] | None = None
    """Classes of the blocks whose weights are gathered together; null: found by the model's structure."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each micro-batch, every one with its part of the tokens (Ulysses); for long sequences."""
    compile: bool = False
    """Compile each block by torch.compile."""
    cpu_offload: bool = False
    """Keep weights and optimizer state in CPU memory always, and copy blocks to the GPU as they run."""
    offload_between_phases: bool = False
    """Keep weights and optimizer state in CPU memory while another model or the rollout has the GPU."""
    workspace_mib: PositiveInt | None = None
    """Most memory for logits at any time, in MiB; None: 64 on the CPU, by shape on a GPU."""

    @field_validator("shard_size")
    @classmethod
    def _shard_size(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value != -1 and value < 1:
            raise ValueError(f"got {value}: give -1 (all processes), a number of processes, or auto")
        return value

    @model_validator(mode="after")
    def _memory(self) -> Self:
        if self.param_dtype == "bfloat16" and self.compute_dtype == "float32":
            raise ValueError("param_dtype bfloat16 needs compute_dtype bfloat16: float32 cannot be gathered from it")
        if self.cpu_offload and self.offload_between_phases:
            raise ValueError("cpu_offload keeps everything on the CPU already: leave offload_between_phases out")
        return self


class EngineConfig(ModelConfig):
    """One model with its optimizer."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute blocks in the backward pass: whole, or (selective) all but matrix products and attention."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients after every micro-batch and not once a step: sends more, but no rank holds whole gradients."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW, clipping and schedule."""


class CriticConfig(EngineConfig):
    """The value model of PPO."""

    model: str | None = None
    """Folder of the model that the critic starts from; null: the policy's."""
    value_clip: PositiveFloat = 0.2
    """How far a value may move from its value at rollout before its loss is clipped."""


class DataConfig(Section):
    """Where prompts come from: a JSONL file, a Hugging Face dataset folder, or a reasoning-gym task."""

    path: str | None = None
    """JSONL file, or folder written by datasets.save_to_disk."""
    task: str | None = None
    """Name of a reasoning-gym task, instead of a path."""
    task_options: dict[str, Any] = {}
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
        return self


class RewardConfig(Section):
    """What completions are worth."""

    function: str | dict[str, float] | None = None
    """module:function or file.py:function, or several with their weights; null: the reasoning-gym task's own."""
    model: str | None = None
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


class VLLMConfig(Section):
    """vLLM as the generator."""

    process: Literal["colocated", "separate"] = "colocated"
    """In the training processes themselves, or in a process beside each, which weights are sent to."""
    transfer: Literal["auto", "shared_memory", "ipc", "nccl"] = "auto"
    """How weights are sent to a separate process; auto: ipc on GPUs, shared_memory on CPUs."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one copy of the generator."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of a GPU's memory for the generator's weights and key-value cache."""
    cpu_cache_gib: PositiveFloat = 1.0
    """Memory of the key-value cache where the generator runs on the CPU."""
    check_weights: bool = False
    """After every sync compare checksums of all weights as sent and as received; costs about as much as a sync."""


class RolloutConfig(Section):
    """Sampling of completions."""

    backend: Literal["hf", "vllm"] = "hf"
    """What generates: transformers with the policy itself, or vLLM with a copy of its weights."""
    vllm: VLLMConfig = VLLMConfig()
    """Settings of backend vllm."""
    prompts_per_step: PositiveInt = 8
    """Prompts sampled per step, over all processes."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt: the group of GRPO."""
    max_prompt_tokens: PositiveInt = 512
    """A longer prompt is an error that names its row."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of a completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities of training use it too."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, as an end token does."""
    batch_size: PositiveInt = 64
    """Completions generated at once on each process."""


_GROUP_ADVANTAGES = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline", "opo", "gpg", "optimal-token")
_ADVANTAGES = ("gae", *_GROUP_ADVANTAGES, "reinforce++", "remax")
_POLICY_LOSSES = (
    "ppo", "dual-clip", "two-sided", "gspo", "gmpo", "cispo", "sapo", "dppo-tv", "reinforce", "clip-cov", "kl-cov",
)  # fmt: skip


class AlgorithmConfig(Section):
    """What is learned from a rollout: see docs/methods.md."""

    advantage: str = "grpo"
    """gae, grpo, dr-grpo, rloo, reinforce++(-baseline), remax, opo, gpg, optimal-token; or module:function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token, of gae and reinforce++."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE: λ."""
    skip_equal_groups: bool = False
    """Leave out prompts whose samples all got the same reward; without a signal they only cost time."""
    max_refills: NonNegativeInt = 0
    """With skip_equal_groups: most further rollouts of a step, made until prompts_per_step prompts are left."""
    mask_truncated: bool = False
    """Learn nothing from completions cut off at max_new_tokens; they still count in their group."""
    epochs: PositiveInt = 1
    """Passes over each rollout."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    policy_loss: str = "ppo"
    """ppo, dual-clip, two-sided, gspo, gmpo, cispo, sapo, dppo-tv, reinforce, clip-cov, kl-cov; or module:function."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """How far below 1 the policy ratio is followed; null: as the loss has it (ppo: 0.2)."""
    clip_high: NonNegativeFloat | None = None
    """How far above 1 the policy ratio is followed; null: as the loss has it (ppo: 0.2)."""
    loss_options: dict[str, float] = {}
    """Other options of the policy loss by name, for example {max_ratio: 3.0} of dual-clip."""
    high_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tokens that the policy learns from: those where it is least certain."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_target: PositiveFloat | None = None
    """Entropy per token that the bonus aims at: its weight moves by entropy_step, and is not applied above it."""
    entropy_step: PositiveFloat = 0.005
    """How much the weight of the bonus changes after each optimizer step, with entropy_target."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the initial model; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased"] = "k3"
    """Estimator of that divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence is penalised."""
    kl_target: PositiveFloat | None = None
    """Divergence per token that kl_coef adapts to; null: kl_coef stays as it is."""
    kl_horizon: PositiveInt = 10000
    """Sequences over which an adaptive kl_coef may grow by a fifth."""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant", "token-sum"] = (
        "token-mean"
    )
    """Mean over all tokens, or over sequences of their mean, sum, or sum over max_new_tokens; or the sum of all."""
    rollout_correction: Literal[
        "none", "token-truncate", "token-mask", "sequence-mask", "sequence-truncate", "bypass"
    ] = "none"
    """What makes up for a sampler whose probabilities differ: importance weights, or (bypass) ratios against it."""
    correction_low: NonNegativeFloat | None = None
    """Lowest importance weight that the masks keep; null: as the correction has it."""
    correction_high: PositiveFloat | None = None
    """Highest importance weight; null: as the correction has it."""

    @field_validator("advantage")
    @classmethod
    def _advantage(cls, value: str) -> str:
        return _name_or_function(value, _ADVANTAGES)

    @field_validator("policy_loss")
    @classmethod
    def _policy_loss(cls, value: str) -> str:
        return _name_or_function(value, _POLICY_LOSSES)

    @model_validator(mode="after")
    def _coefficients(self) -> Self:
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0: give a kl_coef to start from")
        if self.entropy_target is not None and not self.entropy_coef:
            raise ValueError("entropy_target adapts entropy_coef, which is 0: give an entropy_coef to start from")
        if self.max_refills and not self.skip_equal_groups:
            raise ValueError("max_refills replaces the prompts that skip_equal_groups leaves out: set that, too")
        if self.rollout_correction in ("none", "bypass") and (self.correction_low or self.correction_high):
            raise ValueError(f"rollout_correction: {self.rollout_correction} has no bounds: leave them out")
        return self


def _name_or_function(value: str, names: tuple[str, ...]) -> str:
    if value not in names and ":" not in value:
        raise ValueError(f"expected one of {', '.join(names)}, or module:function for your own")
    return value


class EvaluationConfig(Section):
    """Greedy accuracy on held-out prompts, before and after training."""

    path: str
    """JSONL file or dataset folder with the held-out prompts; same columns as the training data."""
    max_new_tokens: PositiveInt = 32
    """Most tokens of an answer."""
    every: NonNegativeInt = 0
    """Also evaluate every so many steps; 0: only before and after."""


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

    model: str
    """Folder of the policy to train: a Hugging Face causal language model."""
    output_dir: str
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

    @field_validator("model", "output_dir")
    @classmethod
    def _expand_home(cls, path: str) -> str:
        return str(Path(path).expanduser())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        algorithm = self.algorithm
        own = ":" in algorithm.advantage
        if (algorithm.advantage == "gae") != (self.critic is not None) and not own:
            raise ValueError(
                "algorithm.advantage: gae needs a critic section, and no other of ours takes one; "
                f"got {algorithm.advantage} {'with' if self.critic else 'without'} a critic"
            )
        if algorithm.advantage in _GROUP_ADVANTAGES and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"advantage: {algorithm.advantage} compares samples of one prompt: "
                "rollout.samples_per_prompt must be >= 2"
            )
        if algorithm.skip_equal_groups and not own and algorithm.advantage not in _GROUP_ADVANTAGES:
            raise ValueError(
                "algorithm.skip_equal_groups needs an advantage that compares samples of one prompt "
                f"({', '.join(_GROUP_ADVANTAGES)}); {algorithm.advantage} learns from equal rewards too"
            )
        if self.rollout.prompts_per_step * self.rollout.samples_per_prompt < algorithm.mini_batches:
            raise ValueError("algorithm.mini_batches is larger than the number of samples per step")
        if self.reward.function is None and self.reward.model is None and self.data.task is None:
            raise ValueError("reward.function is needed: only reasoning-gym tasks bring their own scoring")
        if self.reward.timeout_s is not None and self.reward.function is None:
            raise ValueError("reward.timeout_s is the limit of reward.function, which is not given")
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
        return self

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
            values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
        for key, value in (overrides or {}).items():
            try:
                _set(values, key.split("."), yaml.load(value, _Loader))
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
            raise ConfigError("\n".join(_explain(cls, problem) for problem in error.errors())) from error

    def to_yaml(self) -> str:
        """The fully resolved configuration; loading it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-6`` is a number, as in YAML 1.2, and not a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _set(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for i, key in enumerate(keys[:-1]):
        if values.get(key) is None:  # absent, or a section that the file switches off
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError(f"{'.'.join(keys)}: {'.'.join(keys[: i + 1])} is a value, not a section")
    values[keys[-1]] = value


def sections(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of the configuration as (dotted name, pydantic field), sections before what they hold."""
    rows: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        rows.append((prefix + name, field))
        if (section := _section_of(field.annotation)) is not None:
            rows += sections(section, f"{prefix}{name}.")
    return rows


def _section_of(annotation: Any) -> type[Section] | None:
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def _explain(config: type[BaseModel], problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = [name for name, _ in sections(config)]
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        suggestion = (same_name or close or [None])[0]
        return f"unknown key {key}" + (f": did you mean {suggestion}?" if suggestion else "")
    if problem["type"] == "missing":
        return f"{key} is missing: it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message}, got {problem['input']!r}" if key else message
