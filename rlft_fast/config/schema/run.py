"""The whole configuration of a run of reinforcement learning, and the rules that connect its sections."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlft_fast.config.base import Section, rule
from rlft_fast.config.paths import DataPath, FunctionName, ModelPath
from rlft_fast.config.resume import MayChange
from rlft_fast.config.schema.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from rlft_fast.config.schema.cluster import ClusterConfig
from rlft_fast.config.schema.environment import EnvironmentConfig
from rlft_fast.config.schema.model import CriticConfig, EngineConfig, ModelConfig, ScoringConfig, TeacherConfig
from rlft_fast.config.schema.roles import Role, StepPhase
from rlft_fast.config.schema.rollout import LARGEST_VLLM_RANK, SMALLEST_VLLM_TEMPERATURE, RolloutConfig
from rlft_fast.config.schema.servers import ServerUrl
from rlft_fast.config.schema.training import CheckpointConfig, HeldOutConfig, RowsConfig, RunConfig, TrackerName

SERVER_PART = "server"
"""Name of the part of a reward that a server gives."""
MODEL_PART = "model"
"""Name of the part of a reward that ``reward.model`` gives."""
_TAKEN_PARTS = (SERVER_PART, MODEL_PART, "environment", "length")


class DataConfig(RowsConfig):
    """Where prompts come from: a file, a dataset folder, the Hub, or a reasoning-gym task."""

    path: MayChange[DataPath | dict[str, DataPath] | None] = None
    """File of rows (JSONL, JSON, CSV, TSV, parquet; texts also .gz), dataset folder, hf://OWNER/NAME/SPLIT, or several
    of them by name; null: give a task."""
    streaming: bool = False
    """Read a row when a step takes it: for files of JSON lines or parquet that do not fit into memory.

    The first 1000 rows of each file are checked at the start, and the others when they are read."""
    task: str | None = None
    """Name of a reasoning-gym task, instead of a path; null: give a path."""
    task_options: dict[str, Any] = Field(default={})
    """Options of the reasoning-gym task."""
    task_size: Annotated[PositiveInt, Field(le=10_000_000)] = 2000
    """Problems to generate from the reasoning-gym task."""

    @rule
    def _streams_files(self) -> Iterator[str]:
        if self.streaming and self.path is None:
            yield "streaming reads files, and a task is made in memory: leave it out, or give a path"
        if self.streaming and self.overlong != "refuse":
            yield (
                f"streaming numbers the rows before they are read, so data.overlong: {self.overlong} cannot leave any "
                "out: set overlong: refuse, or leave streaming out"
            )

    @rule
    def _one_source(self) -> Iterator[str]:
        if (self.path is None) == (self.task is None):
            yield "give either path (file or folder of rows) or task (reasoning-gym), not both"
        if self.task is None and self.task_options:
            yield "task_options are options of a reasoning-gym task: leave them out, or give a task instead of a path"


class JudgeConfig(Section):
    """A language model as a judge, behind a URL with OpenAI's chat completions. It answers with temperature 0."""

    model: str
    """Name of the model on the server."""
    prompt: str
    """Jinja template of the question. It reads prompt, completion and the columns of the row."""
    score: str = r"(-?\d+(?:\.\d+)?)(?:[\s*]*(?:/|out of)[\s*]*\d+(?:\.\d+)?)?"
    """Pattern whose group is the score. The last match in the judge's answer counts; by default its last number, which
    is 8 in 8/10 and in 8 out of 10."""
    max_tokens: MayChange[PositiveInt] = 1024
    """Most tokens of the judge's answer."""


class RewardServerConfig(Section):
    """A server that scores completions, by one HTTP request for each (the token is in REWARD_API_KEY)."""

    url: MayChange[ServerUrl]
    """URL that gets each completion in a POST of JSON, as OpenRLHF's remote_rm_url does: query, prompts, labels."""
    weight: float = 1.0
    """Weight of the server's rewards."""
    timeout_s: MayChange[Annotated[PositiveFloat, Field(le=86_400)]] = 60.0
    """Seconds for a request. A sample whose last request fails is left out."""
    retries: MayChange[Annotated[NonNegativeInt, Field(le=100)]] = 2
    """Further requests after a failed connection, a timeout, or a status 429 or 5xx."""
    judge: JudgeConfig | None = None
    """The URL leads to a language model, which is asked for a score; null: it leads to a reward server."""


class RewardConfig(Section):
    """How completions are scored."""

    function: FunctionName | dict[FunctionName, float] | None = None
    """module:function or file.py:function, or several with weights; null: the scoring of the reasoning-gym task."""
    server: RewardServerConfig | None = None
    """A server that scores completions. Its reward is the part server."""
    model: MayChange[ModelPath | None] = None
    """Folder of a reward model (sequence classification, one label), run as the actor is. Its score is added."""
    model_weight: float = 1.0
    """Weight of the reward model's score."""
    models: dict[str, ScoringConfig] = Field(default={})
    """Several reward models by name, in place of model. Each is a section: model, weight, and the keys that critic and
    teacher have for memory, such as max_tokens. Each score is a part of the reward by this name."""
    timeout_s: MayChange[Annotated[PositiveFloat, Field(le=31_536_000)] | None] = None
    """Run functions in worker processes, with so many seconds per sample. A sample over time or crashed is left out."""
    workers: MayChange[Annotated[PositiveInt, Field(le=1024)]] = 2
    """With timeout_s: worker processes per function and training process."""
    conversational: bool = False
    """Functions get messages instead of texts where prompts have a chat template, as TRL's conversational ones do."""
    keep_special_tokens: bool = False
    """Functions and reward models see special tokens in the texts of answers, apart from the end token."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward: rewards beyond are set to them, before penalties. Evaluation ignores it.

    algorithm.skip_equal_groups and its like compare rewards within these bounds: rewards beyond one bound are equal."""
    normalize: Literal["none", "scale", "standardize"] = "none"
    """scale: divide rewards by their standard deviation over the run so far; standardize: subtract their mean, too.

    Rewards are in the bounds of clip, with all penalties. Logs have them as they were, and evaluation ignores this."""
    truncation_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a sample cut off at max_new_tokens. Evaluation ignores it."""
    overlong_buffer: NonNegativeInt = 0
    """Over so many last tokens before max_new_tokens, overlong_penalty rises linearly from 0. Evaluation ignores it."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Subtracted from the reward at the end of overlong_buffer."""

    @rule
    def _bounds_have_an_order(self) -> Iterator[str]:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"clip is [{self.clip[0]:g}, {self.clip[1]:g}], expected the lowest reward before the highest"

    @rule
    def _models_are_named(self) -> Iterator[str]:
        if self.model is not None and self.models:
            yield "give either model (it runs as the actor does) or models (each with settings of its own), not both"
        for name in self.models:
            if not name.isidentifier() or name in _TAKEN_PARTS:
                yield (
                    f"models has one named {name!r}: a name has letters, digits and underscores, no digit first, and "
                    f"is none of {', '.join(_TAKEN_PARTS)}"
                )

    @property
    def model_parts(self) -> list[str]:
        """Names of the parts of the reward that reward models give."""
        return [*([] if self.model is None else [MODEL_PART]), *self.models]


class EvaluationConfig(HeldOutConfig):
    """Accuracy on held-out prompts, before and after training."""

    max_new_tokens: PositiveInt | None = None
    """Most tokens of an answer; null: rollout.max_new_tokens."""
    samples_per_prompt: PositiveInt = 1
    """Answers to each prompt. The accuracy is their mean reward; pass_at_k is the mean reward of the best of k > 1."""
    temperature: NonNegativeFloat = 0.0
    """0: the most likely answer; larger: sampled answers, with the same seeds in every evaluation."""
    function: FunctionName | dict[FunctionName, float] | None = None
    """Scores held-out answers in place of reward and environment, with reward.timeout_s; null: these score them."""

    @rule
    def _samples_differ(self) -> Iterator[str]:
        if self.samples_per_prompt > 1 and not self.temperature:
            yield (
                f"samples_per_prompt is {self.samples_per_prompt}, but with temperature 0 all answers to a prompt are "
                "the same: raise temperature"
            )

    @property
    def kinds(self) -> list[str]:
        """Accuracy, and the reward of the best of several answers."""
        return ["accuracy", *([f"pass_at_{self.samples_per_prompt}"] if self.samples_per_prompt > 1 else [])]


class Config(RunConfig):
    """A run of reinforcement learning."""

    objective: Literal["rl"] = "rl"
    """What the model learns: rl, from rewards of what it samples; sft, dpo and reward, from data."""
    data: DataConfig
    """Prompts to train on."""
    reward: RewardConfig = RewardConfig()
    """How completions are scored."""
    environment: EnvironmentConfig | None = None
    """What answers the policy, turn by turn; null: an answer is one message."""
    environments: dict[str, EnvironmentConfig] = Field(default={})
    """Several, by name, in the place of environment. Each row names its own in the column environment."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How the policy learns from the completions."""
    actor: EngineConfig = EngineConfig()
    """How the policy is held in memory, run and trained."""
    critic: CriticConfig | None = None
    """The value model, as in actor. algorithm.advantage: gae needs it."""
    reference: MayChange[ModelConfig | None] = None
    """The frozen model of the KL penalty; null: settings of the actor. With actor.lora, the policy without adapters."""
    teacher: TeacherConfig | None = None
    """A model to distil into the policy, on the policy's own samples."""
    evaluation: MayChange[EvaluationConfig | None] = None
    """Accuracy on held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    cluster: MayChange[ClusterConfig | None] = None
    """Workers on a Ray cluster; null: the processes that torchrun has started, or this process alone."""
    log: MayChange[tuple[TrackerName, ...]] = ("jsonl",)
    """Trackers that get the numbers of each step. The files metrics.jsonl and samples.jsonl are always written."""
    log_texts: MayChange[NonNegativeInt] = 0
    """Samples per step whose texts the trackers get, too."""
    log_tokens_mib: MayChange[PositiveInt | None] = None
    """Most MiB per step of numbers of each token, in the folder tokens for rlft-fast view; null: none are written."""
    log_samples: MayChange[bool] = False
    """Whether the samples of each step are kept in the folder rollouts, for --replay."""

    @property
    def environments_by_name(self) -> dict[str, EnvironmentConfig]:
        """All environments; the one of ``environment`` has the name ""."""
        return self.environments if self.environment is None else {"": self.environment}

    @property
    def has_servers(self) -> bool:
        """Whether servers generate: given servers, or the run's own on a cluster."""
        return bool(self.rollout.servers) or (self.cluster is not None and self.cluster.generators is not None)

    def for_device(self, device_type: str) -> Self:
        """With `ModelConfig.for_device` of each model."""
        device_type = self.device_of_models(device_type)
        models = {
            "actor": self.actor, "critic": self.critic, "reference": self.reference, "teacher": self.teacher,
        }  # fmt: skip
        scoring = {name: own.for_device(device_type) for name, own in self.reward.models.items()}
        resolved = {name: None if model is None else model.for_device(device_type) for name, model in models.items()}
        return self.model_copy(update={**resolved, "reward": self.reward.model_copy(update={"models": scoring})})

    @model_validator(mode="before")
    @classmethod
    def _correct_what_is_stale(cls, values: Any) -> Any:
        """Where the sampler's weights are older than the policy, importance weights are the default, see `Schedule`."""
        if not isinstance(values, dict):
            return values
        rollout, algorithm = values.get("rollout"), values.get("algorithm")
        stale = rollout.get("max_staleness") if isinstance(rollout, dict) else getattr(rollout, "max_staleness", 0)
        given = {} if algorithm is None else algorithm
        if isinstance(given, AlgorithmConfig):
            given = given.model_dump(exclude_unset=True)
        if not stale or not isinstance(given, dict):
            return values
        return {**values, "algorithm": {"rollout_correction": "token-truncate", **given}}

    @rule
    def _overlaps_nothing_that_reads_it(self) -> Iterator[str]:
        rollout = self.rollout
        if not (staleness := rollout.max_staleness):
            return
        is_inside = rollout.backend == "hf" or rollout.vllm.process == "colocated"
        if self.cluster is None and not self.has_servers and is_inside:
            yield (
                f"rollout.max_staleness is {staleness}, but {rollout.backend} generates in the process that trains: "
                "set backend to vllm with vllm.process: separate or with servers, or max_staleness to 0"
            )
        refused = {
            "a cluster whose workers generate": (self.cluster is not None and not self.has_servers, "they train, too. "
                                                 "Give cluster.generators"),
            "a reward model": (bool(self.reward.model_parts), "it scores in the process that trains"),
            "algorithm.max_refills": (self.algorithm.max_refills > 0, "the number of prompts of a step is not known "
                                      "before it is sampled"),
        }  # fmt: skip
        for name, (is_set, why) in refused.items():
            if is_set:
                yield (
                    f"rollout.max_staleness is {staleness}, and cannot go with {name}: {why}. Leave it out, or set "
                    "max_staleness to 0"
                )

    @rule
    def _clusters_fit(self) -> Iterator[str]:
        if self.cluster is not None:
            for name in ("critic", "reference", "teacher", "reward"):
                groups = {role.partition(".")[0] for role in self.roles}
                if getattr(self.cluster, name) is not None and name not in groups:
                    what = {"reward": "reward model"}.get(name, name)
                    yield f"cluster.{name} is given, but the run has no {what} of its own: leave it out"
        generators = None if self.cluster is None else self.cluster.generators
        if generators is None:
            return
        if self.rollout.backend != "vllm" or self.rollout.servers:
            yield (
                "cluster.generators are vLLM servers of the run's own: set rollout.backend to vllm, and leave out "
                "rollout.servers"
            )
        if self.rollout.structured:
            yield (
                "rollout.structured is for a vLLM in the processes that train, but cluster.generators are servers: "
                "leave out one of the two"
            )
        if max(generators.gpus, 1) != self.rollout.vllm.tensor_parallel_size:
            yield (
                f"cluster.generators.gpus is {generators.gpus}, but rollout.vllm.tensor_parallel is "
                f"{self.rollout.vllm.tensor_parallel_size}: set both to the same number"
            )

    @rule
    def _vllm_takes_the_adapters(self) -> Iterator[str]:
        if not self.rollout.vllm.adapter:
            return
        lora, instead = self.actor.lora, "leave rollout.vllm.adapter out, for merged weights"
        if lora is None:
            yield "rollout.vllm.adapter sends the adapters of actor.lora, which is not given: set it, or leave it out"
        elif "lm_head" in lora.target_modules:
            yield f"actor.lora.target_modules has lm_head, and vLLM is given no adapter of the head: {instead}"
        elif lora.rank > LARGEST_VLLM_RANK:
            yield f"actor.lora.rank is {lora.rank}, and vLLM takes at most {LARGEST_VLLM_RANK}: lower it, or {instead}"
        if self.cluster is not None and self.cluster.generators is not None:
            yield f"cluster.generators are servers, which are given no adapters: {instead}"

    @rule
    def _vllm_takes_the_temperatures(self) -> Iterator[str]:
        if self.rollout.backend != "vllm":
            return
        for name, section in {"rollout": self.rollout, "evaluation": self.evaluation}.items():
            if section is not None and 0 < section.temperature < SMALLEST_VLLM_TEMPERATURE:
                yield (
                    f"{name}.temperature is {section.temperature}, but vLLM would sample at "
                    f"{SMALLEST_VLLM_TEMPERATURE}: raise it, or set rollout.backend to hf"
                )

    @rule
    def _advantage_has_what_it_needs(self) -> Iterator[str]:
        algorithm, samples_per_prompt = self.algorithm, self.rollout.samples_per_prompt
        own, grouped = ":" in algorithm.advantage, algorithm.advantage in GROUP_ADVANTAGES
        if (algorithm.advantage == "gae") != (self.critic is not None) and not own:
            yield (
                "algorithm.advantage: gae needs a critic section, and other built-in advantages take no critic; "
                f"got {algorithm.advantage} {'with' if self.critic else 'without'} a critic"
            )
        if grouped and samples_per_prompt < 2:
            yield (
                f"advantage: {algorithm.advantage} compares samples of one prompt: "
                "rollout.samples_per_prompt must be >= 2"
            )
        if algorithm.skip_equal_groups and not own and not grouped:
            yield (
                "algorithm.skip_equal_groups needs an advantage that compares samples of one prompt "
                f"({', '.join(GROUP_ADVANTAGES)}); {algorithm.advantage} learns from equal rewards too"
            )
        if algorithm.skip_equal_groups and samples_per_prompt < 2:
            yield (
                "algorithm.skip_equal_groups leaves out every prompt that has a single sample: "
                "rollout.samples_per_prompt must be >= 2"
            )

    @rule
    def _samples_differ(self) -> Iterator[str]:
        algorithm, rollout = self.algorithm, self.rollout
        if algorithm.first_samples is not None and algorithm.first_samples >= rollout.samples_per_prompt:
            yield (
                f"algorithm.first_samples is {algorithm.first_samples}, but is only a part of "
                f"rollout.samples_per_prompt, {rollout.samples_per_prompt}: lower it, or leave it out"
            )
        if algorithm.curriculum and rollout.samples_per_prompt < 2:
            yield ("algorithm.curriculum compares samples of one prompt: rollout.samples_per_prompt must be >= 2")
        if 0 < algorithm.curriculum * rollout.prompts_per_step < 1:
            yield (
                f"algorithm.curriculum is {algorithm.curriculum}, which is not one prompt of "
                f"rollout.prompts_per_step, {rollout.prompts_per_step}: raise one of them, or leave curriculum out"
            )

    @rule
    def _mini_batches_have_samples(self) -> Iterator[str]:
        num_samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if num_samples < self.algorithm.mini_batches:
            yield (
                f"algorithm.mini_batches is {self.algorithm.mini_batches}, larger than the number of samples per step, "
                f"{num_samples} (rollout.prompts_per_step * rollout.samples_per_prompt): lower it"
            )

    @rule
    def _reward_is_given(self) -> Iterator[str]:
        reward, filter_by = self.reward, self.algorithm.filter_by
        has_reward = reward.function is not None or reward.model_parts or self.data.task is not None
        has_reward = has_reward or reward.server is not None
        played = self.environments_by_name
        has_reward = has_reward or (bool(played) and all(own.name is not None for own in played.values()))
        if not has_reward and self.algorithm.advantage != "none":
            yield "reward.function is needed: only reasoning-gym tasks and environments have their own scoring"
        if not has_reward and self.evaluation is not None and self.evaluation.function is None:
            yield "evaluation.function is needed, because the run has no reward"
        parts = [*self.function_weights, *reward.model_parts]
        parts += ["environment"] if played else []
        if filter_by is not None and filter_by not in parts:
            yield f"algorithm.filter_by is {filter_by!r}, expected a part of the reward: {', '.join(parts)}"
        evaluation_function = None if self.evaluation is None else self.evaluation.function
        if reward.timeout_s is not None and reward.function is None and evaluation_function is None:
            yield "reward.timeout_s is the limit of reward.function, which is not given: leave it out"
        for key, function in (("reward", reward.function), ("evaluation", evaluation_function)):
            if function == {}:
                yield f"{key}.function names no function: leave it out, or name one"
        if reward.overlong_buffer > self.rollout.max_new_tokens:
            yield (
                f"reward.overlong_buffer is {reward.overlong_buffer}, but it is a part of rollout.max_new_tokens and "
                f"cannot be longer than {self.rollout.max_new_tokens}"
            )

    @rule
    def _environment_can_answer(self) -> Iterator[str]:
        if self.environment is not None and self.environments:
            yield "give either environment or environments (each with a name), not both"
        for name in self.environments:
            if not name.isidentifier():
                yield (
                    f"environments has one named {name!r}: a name has letters, digits and underscores, no digit first"
                )
        if not self.environments_by_name:
            return
        if self.data.streaming:
            yield "environment looks at all rows before the run starts, which data.streaming leaves out: leave out one"
        if self.data.overlong == "truncate":
            yield "environment begins with the conversation of a row, which data.overlong: truncate would cut: filter"
        if not self.data.chat:
            yield "environment needs the chat template, which data.chat: false leaves out: set data.chat: true"

    @rule
    def _reference_has_a_use(self) -> Iterator[str]:
        if self.reference is not None and "reference" not in self.roles:
            yield (
                "reference has nothing to configure: without algorithm.kl_coef there is no reference model, and with "
                "actor.lora it is the policy without adapters: leave the section out"
            )

    @rule
    def _something_teaches(self) -> Iterator[str]:
        if self.algorithm.advantage == "none" and self.teacher is None:
            yield "algorithm.advantage: none learns from a teacher alone: give a teacher section, or another advantage"
        compared = [name for name in ("skip_equal_groups", "curriculum") if getattr(self.algorithm, name)]
        if self.algorithm.advantage == "none" and compared:
            yield (
                f"algorithm.{compared[0]} prefers prompts whose samples differ in reward, but advantage: none learns "
                "from no reward: leave it out"
            )

    @rule
    def _teacher_and_policy_see_all_tokens(self) -> Iterator[str]:
        if self.rollout.top_k is not None and self.teacher is not None and self.teacher.loss == "topk":
            yield (
                "teacher.loss: topk compares distributions over the whole vocabulary, but rollout.top_k samples among "
                "a part of it: leave it out, or set teacher.loss: sampled"
            )

    @rule
    def _longest_sequence_fits(self) -> Iterator[str]:
        longest = self.longest_taught
        engines = {
            "actor": self.actor, "critic": self.critic, "reference": self.reference, "teacher": self.teacher,
        }  # fmt: skip
        for name, engine in engines.items():
            if engine is not None and engine.max_tokens < longest:
                yield (
                    f"{name}.max_tokens is {engine.max_tokens}, but a sequence may have {longest} tokens "
                    f"(rollout.max_prompt_tokens + rollout.max_new_tokens): raise it to at least {longest}"
                )

    @rule
    def _longest_sequence_fits_the_reward_model(self) -> Iterator[str]:
        """``reward.model`` has the actor's token cap."""
        longest = self.longest_scored
        if self.reward.model is not None and self.actor.max_tokens < longest:
            yield (
                f"actor.max_tokens is {self.actor.max_tokens}, but reward.model, which has the same cap, may see "
                f"{longest} tokens (rollout.max_prompt_tokens, the longest answer, and one more): raise it by "
                f"{longest - self.actor.max_tokens}"
            )
        for name, own in self.reward.models.items():
            if own.max_tokens < longest:
                yield (
                    f"reward.models.{name}.max_tokens is {own.max_tokens}, but the model may see {longest} tokens "
                    f"(rollout.max_prompt_tokens, the longest answer, and one more): raise it to at least {longest}"
                )

    @property
    def longest_taught(self) -> int:
        """Most tokens of a prompt and an answer to learn from."""
        return self.rollout.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def frozen_steps(self) -> int:
        """Steps at the start in which the critic alone learns. The policy's learning rate begins behind them."""
        return 0 if self.critic is None else min(self.critic.freeze_actor_steps, self.steps)

    @property
    def longest_scored(self) -> int:
        """Most tokens that a reward model reads: one more than a prompt and an answer have."""
        evaluation = self.evaluation
        judged = self.max_evaluation_tokens if evaluation is not None and evaluation.function is None else 0
        return self.rollout.max_prompt_tokens + max(self.rollout.max_new_tokens, judged) + 1

    @property
    def sequences_per_update(self) -> float:
        """Samples of an optimizer step."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt / self.algorithm.mini_batches

    @property
    def model_folders(self) -> dict[str, str | None]:
        """Folders of policy, reward models, critic and teacher, by key."""
        critic = None if self.critic is None else self.critic.model or self.model
        teacher = None if self.teacher is None else self.teacher.model
        scoring = {f"reward.models.{name}.model": own.model for name, own in self.reward.models.items()}
        return {
            "model": self.model, "reward.model": self.reward.model, **scoring, "critic.model": critic,
            "teacher.model": teacher,
        }  # fmt: skip

    @property
    def measured(self) -> dict[str, Any] | None:
        """How the held-out numbers are measured, as JSON; None: they are not."""
        found = super().measured
        return None if found is None else found | {"max_new_tokens": self.max_evaluation_tokens}

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and an answer, in training or evaluation."""
        return self.rollout.max_prompt_tokens + max(self.rollout.max_new_tokens, self.max_evaluation_tokens)

    @property
    def max_evaluation_tokens(self) -> int:
        """Most tokens of an answer to a held-out prompt; 0 without an evaluation."""
        return 0 if self.evaluation is None else self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    @property
    def function_weights(self) -> dict[str, float]:
        """Weights of reward functions by name. The task's own scoring counts if neither function nor model is given."""
        function, server = self.reward.function, self.reward.server
        if isinstance(function, str):
            function = {function: 1.0}
        if function is None and server is None and not self.reward.model_parts and self.data.task is not None:
            function = {self.data.task: 1.0}
        return (function or {}) | ({} if server is None else {SERVER_PART: server.weight})

    @property
    def roles(self) -> dict[str, Role]:
        """The policy, and the models that the algorithm and the rewards need, by the keys of their sections.

        The reference is a model of its own where the algorithm has a penalty on the divergence and the policy has no
        adapters. Without its adapters the policy is the reference.
        """
        actor, critic, reward = self.actor, self.critic, self.reward.model
        generates: tuple[StepPhase, ...] = ("generate", "infer", "update", "sync")
        sampled = self.rollout.temperature
        policy = Role(path=self.model, config=actor, head="logprob", trains=True, phases=generates, temperature=sampled)
        roles = {"actor": policy}
        if self.algorithm.kl_coef and actor.lora is None:
            frozen = actor if self.reference is None else EngineConfig(**self.reference.model_dump())
            frozen = frozen.model_copy(update={"init_from": None})
            roles["reference"] = replace(policy, config=frozen, trains=False, phases=("infer",))
        if self.teacher is not None:
            frozen = self.teacher.engine
            roles["teacher"] = replace(
                policy, path=self.teacher.model, config=frozen, trains=False, phases=("infer",),
                top_k=self.teacher.num_ids,
            )  # fmt: skip
        if critic is not None:
            path = critic.model or self.model
            roles["critic"] = Role(path=path, config=critic, head="value", trains=True, phases=("infer", "update"))
        if reward is not None:  # it runs as the policy does
            plain = actor.model_copy(update={"lora": None, "init_from": None, "freeze": ()})
            roles["reward"] = _scoring(reward, plain, MODEL_PART)
        for name, own in self.reward.models.items():
            roles[f"reward.models.{name}"] = _scoring(own.model, own.engine, name)
        return roles


def _scoring(path: str, config: EngineConfig, part: str) -> Role:
    return Role(path=path, config=config, head="score", trains=False, phases=("score",), part=part)
