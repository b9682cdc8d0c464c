"""What the configurations of all objectives share: the model, its engine, checkpoints, held-out data and logs."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from rlft_fast.config.base import ConfigError, Section, explain, rule, sections, set_key, without_password
from rlft_fast.config.paths import AS_TYPED, HUB, DataPath, LocalPath, ModelPath, as_typed
from rlft_fast.config.reader import read_file, read_value, write
from rlft_fast.config.resume import MayChange
from rlft_fast.config.schema.cluster import ClusterConfig
from rlft_fast.config.schema.model import EngineConfig
from rlft_fast.config.schema.roles import Role
from rlft_fast.files import read_text


class RowsConfig(Section):
    """Where rows of data are, and how their prompts become tokens."""

    path: MayChange[DataPath | dict[str, DataPath] | None] = None
    """File of rows (JSONL, JSON, CSV, TSV, parquet; texts also .gz), dataset folder, hf://OWNER/NAME/SPLIT, or several
    of them by name."""
    weights: dict[str, PositiveFloat] = Field(default={})
    """Share of each named set of path in the rows that are taken, as weights; {}: every row once in a pass."""
    max_rows: MayChange[PositiveInt | dict[str, PositiveInt] | None] = None
    """Rows of each set that are read, from its first on, or so many of each named set; null: all."""
    shuffle: bool = True
    """Take the rows in another random order in every pass; false: in the order of path."""
    shuffle_seed: Annotated[NonNegativeInt, Field(le=2**63 - 1)] | None = None
    """Seed of the order of the rows; null: seed."""
    overlong: Literal["refuse", "filter", "truncate"] = "refuse"
    """Rows with too many tokens. refuse: an error names them; filter: leave them out; truncate: of a prompt keep the
    last tokens, of a sequence to learn from the first. The run tells how many they are."""
    prompt_column: str = "prompt"
    """Name of the column with the prompt, which is a text or a list of chat messages."""
    template: str | None = None
    """Jinja template that makes prompts from columns, such as "{{ question }} Choose: {{ options }}".

    null: prompt_column has them."""
    system_prompt: str | None = None
    """System message of prompts that have none of their own; null: none, but a chat template may add its own."""
    template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as enable_thinking: false. The row's chat_template_kwargs come first."""
    chat: bool = True
    """Apply the chat template to text prompts; false: tokenize them as they are."""

    @property
    def sets(self) -> dict[str, str]:
        """Sources of the rows by name. A single set has the name ""."""
        return {} if self.path is None else _by_name(self.path)

    @rule
    def _sets_are_named(self) -> Iterator[str]:
        yield from _wrong_names(self.path)
        if self.weights and {*self.weights} != {*self.sets}:
            yield _unlike_sets("weights", self.weights, self.sets)
        if isinstance(self.max_rows, dict) and not {*self.max_rows} <= {*self.sets}:
            yield _unlike_sets("max_rows", self.max_rows, self.sets)

    @rule
    def _order_is_random(self) -> Iterator[str]:
        if self.shuffle_seed is not None and not self.shuffle:
            yield "shuffle_seed is the seed of an order that shuffle: false leaves out: leave it out"

    @rule
    def _template_is_used(self) -> Iterator[str]:
        for name in ("system_prompt", "template_kwargs"):
            if getattr(self, name) not in (None, {}) and not self.chat:
                yield f"{name} needs the chat template, which chat: false leaves out: set chat: true, or no {name}"


def _by_name(path: str | dict[str, str]) -> dict[str, str]:
    return path if isinstance(path, dict) else {"": path}


def _wrong_names(path: str | dict[str, str] | None) -> Iterator[str]:
    """Messages about names of sets."""
    if isinstance(path, dict) and not path:
        yield "path names no set: give a file, or several by name"
    if isinstance(path, dict) and (wrong := [name for name in path if not name.isidentifier()]):
        yield f"path has a set named {wrong[0]!r}: a name has letters, digits and underscores, no digit first"


def _unlike_sets(key: str, given: Iterable[str], sets: Iterable[str]) -> str:
    names = [name for name in sets if name]
    expected = f"expected {', '.join(names)}" if names else "but path names no sets, as path: {a: a.jsonl} does"
    return f"{key} names {', '.join(given)}, {expected}"


class HeldOutConfig(Section):
    """Held-out data, on which the model is measured before, during and after training."""

    path: MayChange[DataPath | dict[str, DataPath]]
    """Held-out rows, as in data.path, or several sets of them by name; same columns as the training data."""
    max_rows: MayChange[PositiveInt | None] = None
    """Rows of each set that are read, from its first on; null: all."""
    every: MayChange[NonNegativeInt] = 0
    """Steps between evaluations; 0: evaluate only before and after training."""

    @rule
    def _sets_have_names(self) -> Iterator[str]:
        yield from _wrong_names(self.path)

    @property
    def sets(self) -> dict[str, str]:
        """Paths of the held-out sets by name. A single set has the name ""."""
        return _by_name(self.path)

    @property
    @abstractmethod
    def kinds(self) -> list[str]:
        """Names of the numbers that an evaluation gives for each set; the first is the number to show."""

    @property
    def metrics(self) -> list[str]:
        """Names of all numbers that an evaluation gives: means over the sets, then the numbers of each named set."""
        return self.kinds + [f"{kind}_{name}" for name in self.sets if name for kind in self.kinds]


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    every: MayChange[NonNegativeInt] = 50
    """Steps between checkpoints; 0: save only at the end."""
    max_num: MayChange[PositiveInt] = 2
    """Complete checkpoints to keep. The disk needs room for one more."""
    max_mem: MayChange[PositiveFloat | None] = None
    """Most GB for all checkpoints; null: no limit. The newest checkpoint is always kept."""
    asynchronous: MayChange[bool] = True
    """Write while training goes on, from a copy in host memory. The copy is as large as what the process writes."""
    store: MayChange[str | None] = None
    """Address to which checkpoints, logs and the model are copied, such as s3://bucket/run; null: none."""
    best: MayChange[str | None] = None
    """Number of the evaluation, such as accuracy, at whose best value the model is exported to the folder best.

    The best loss is the lowest, the best of all other numbers the highest."""


TrackerName = Literal["jsonl", "tensorboard", "wandb", "trackio", "mlflow", "prometheus", "opentelemetry"]


class ProfileConfig(Section):
    """Traces by torch's profiler, in the folder profile of output_dir. ui.perfetto.dev opens them."""

    steps: MayChange[tuple[PositiveInt, ...]]
    """Numbers of the steps to trace, from 1 as in metrics.jsonl. A trace of a step may have hundreds of MB."""
    ranks: MayChange[tuple[NonNegativeInt, ...]] = (0,)
    """Processes that trace, from 0."""


class RunConfig(Section):
    """What a run of any objective has. Each objective is a subclass, see `rlft_fast.config.OBJECTIVES`."""

    objective: str
    """What the model learns."""
    model: MayChange[ModelPath]
    """Folder of the model to train, a Hugging Face causal language model; or its name on the Hub, if it is cached."""
    output_dir: MayChange[LocalPath]
    """Folder for everything the run writes."""
    steps: MayChange[PositiveInt]
    """Training steps."""
    seed: Annotated[NonNegativeInt, Field(le=2**63 - 1)] = 0
    """Seed of every random choice, such as the order of the data."""
    timeout_minutes: MayChange[Annotated[PositiveFloat, Field(le=525_600)]] = 30
    """Minutes that a process waits for another before the run ends with an error that names the missing process."""
    profile: MayChange[ProfileConfig | None] = None
    """Traces of chosen steps."""

    if TYPE_CHECKING:  # every objective has them, among its own keys
        data: RowsConfig
        actor: EngineConfig
        evaluation: HeldOutConfig | None
        checkpoint: CheckpointConfig
        cluster: ClusterConfig | None
        log: tuple[TrackerName, ...]

    def for_device(self, device_type: str) -> Self:
        """With `ModelConfig.for_device` of each model."""
        device_type = self.device_of_models(device_type)
        return self.model_copy(update={"actor": self.actor.for_device(device_type)})

    def device_of_models(self, device_type: str) -> str:
        """The kind of device of the actor's workers with a cluster, otherwise of this process.

        So all parts of a run compute in one dtype.
        """
        if self.cluster is None:
            return device_type
        return "cuda" if self.cluster.actor.gpus else "cpu"

    @rule
    def _profiled_here(self) -> Iterator[str]:
        if self.profile is not None and self.cluster is not None:
            yield "profile traces the processes of torchrun, and the run has a cluster section: leave one of them out"

    @rule
    def _best_is_evaluated(self) -> Iterator[str]:
        best, found = self.checkpoint.best, [] if self.evaluation is None else self.evaluation.metrics
        if best is not None and best not in found:
            expected = f"one of {', '.join(found)}" if found else "null, because the run has no evaluation"
            yield f"checkpoint.best is {best!r}, expected {expected}"

    @property
    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """The models of the run, see `run_roles`."""

    @property
    @abstractmethod
    def longest_taught(self) -> int:
        """Most tokens of a sequence to learn from."""

    @property
    @abstractmethod
    def sequences_per_update(self) -> float:
        """Sequences of an optimizer step."""

    @property
    def model_folders(self) -> dict[str, str | None]:
        """Folders of the models by key; None where there is none."""
        return {"model": self.model}

    @property
    def start_folders(self) -> dict[str, str]:
        """Folders of weights to start from in place of the models', by key."""
        starts = {f"{name}.init_from": role.config.init_from for name, role in self.roles.items()}
        return {key: path for key, path in starts.items() if path is not None}

    @property
    def data_files(self) -> dict[str, str]:
        """Files and folders of the data by key."""
        held_out = {} if self.evaluation is None else self.evaluation.sets
        return {
            f"{section}.path{'.' * bool(name)}{name}": path
            for section, sets in (("data", self.data.sets), ("evaluation", held_out))
            for name, path in sets.items()
            if not path.startswith(HUB)
        }

    @property
    def measured(self) -> dict[str, Any] | None:
        """How the held-out numbers are measured, as JSON; None: they are not."""
        if self.evaluation is None:
            return None
        measured = self.evaluation.model_dump(mode="json", exclude={"every"})
        return measured if measured["max_rows"] else {k: v for k, v in measured.items() if k != "max_rows"}  # as before

    @classmethod
    def load(cls, path: str | Path, overrides: dict[str, str] | None = None) -> Self:
        """Reads a YAML file, and sets the overrides in it.

        Args:
            path: the YAML file.
            overrides: values by dotted key, as `read_value` reads them: ``{"rollout.temperature": "0.7"}``.

        Raises:
            ConfigError: unreadable file, unknown key (with a suggestion), or a value of the wrong type or range.
        """
        try:
            values = read_file(read_text(Path(path)), cls)
        except RecursionError as error:
            raise ConfigError(f"cannot read the configuration {path}: it is nested too deeply") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {without_password(str(error))}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must be a YAML mapping of keys to values, got {type(values).__name__}")
        for key, value in (overrides or {}).items():
            try:
                set_key(values, key.split("."), read_value(value, key, cls))
            except yaml.YAMLError as error:
                shown = without_password(value)
                raise ConfigError(f"{key}: {shown!r} is no list or mapping in YAML: {_problem(error)}") from error
        own = cls.model_fields["objective"].default
        if (other := values.get("objective", own)) != own:
            raise ConfigError(f"{path} has objective: {other}, but only objective: {own} can do this")
        return cls.parse(values, AS_TYPED)

    @classmethod
    def parse(cls, values: dict[str, Any], context: Mapping[str, Any] | None = None) -> Self:
        """Validates a nested dictionary.

        Args:
            values: the dictionary.
            context: `AS_TYPED` for values as a user has typed them; None: paths are taken as they are, but for ``~``.

        Raises:
            ConfigError: a value is wrong. The message names every wrong key.
        """
        try:
            return cls.model_validate(values, context=context)
        except ValidationError as error:
            raise ConfigError(explain(cls, values, error.errors(), _keys_of_others(cls))) from error

    def to_yaml(self, folder: str | Path = "") -> str:
        """The resolved configuration with every key. Loading the text gives an equal configuration.

        Args:
            folder: relative paths are written from this folder on: with the working directory they become absolute.
        """
        return write(self.model_dump(mode="json", context=as_typed(folder)))


def run_roles(config: RunConfig) -> dict[str, Role]:
    """The models of a run by name, in the order in which they infer; they update in the reverse order."""
    return config.roles


def _keys_of_others(config: type[RunConfig]) -> dict[str, list[str]]:
    """The keys of all objectives but this one, by objective."""
    kinds = [RunConfig]
    for kind in kinds:  # which grow
        kinds += kind.__subclasses__()
    others = {kind.model_fields["objective"].default: kind for kind in kinds if kind is not config}
    return {name: [key for key, _ in sections(kind)] for name, kind in others.items() if isinstance(name, str)}


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error)
