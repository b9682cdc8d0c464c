"""Settings that lower a run's memory: for each decision the changes of the configuration among which to choose."""

import math
from collections.abc import Container, Iterator
from typing import Any, TypeVar

from rlft_fast.config import Config, EngineConfig, ModelConfig, Role, RunConfig, run_roles, set_key, value_at
from rlft_fast.engine.memory.generator import GeneratorMemory
from rlft_fast.engine.memory.simulation import build_plain
from rlft_fast.engine.sharding import is_wrapped
from rlft_fast.models import PolicyModel, RLModel

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)

_WIDER_GENERATORS = 3  # values of vLLM's `tensor_parallel` that are tried: wider ones only generate slower


def decisions(
    config: RunConfig,
    world_size: int,
    memory_bytes: float,
    device_type: str,
    largest: int,
    failing: list[str],
    *,
    refused: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Decisions that lower memory: for each the changes of the configuration among which to choose.

    Two models that train and do not fit get the same settings, since the combinations of their own are too many. A
    decision without choices means that nothing helps.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        largest: token cap with which the policy's update fits.
        failing: names of the phases that do not fit. Keys that do not lower the memory of these phases are left out.
        refused: whether vLLM could not start.
    """
    as_the_actor = {"score", "infer reference"} & {*failing}
    settings: dict[str, dict[Any, dict[str, Any]]] = {}
    for name, role in run_roles(config).items():
        in_failing = {f"update {name}", f"infer {name}"} & {*failing} or (name == "actor" and as_the_actor)
        if role.trains and in_failing:
            caps = {config.longest_taught} | ({largest} if name == "actor" else set())
            for key, values in _stronger(config, role, world_size, caps):
                for value in values:
                    settings.setdefault(key, {}).setdefault(value, {})[f"{name}.{key}"] = value
    for choices in settings.values():
        yield [{}, *choices.values()]
    yield from _state_choices(config, device_type)
    if isinstance(config, Config):
        yield from _decisions_of_rollout(config, world_size, memory_bytes, device_type, failing, refused=refused)


def _decisions_of_rollout(
    config: Config, world_size: int, memory_bytes: float, device_type: str, failing: list[str], *, refused: bool
) -> Iterator[list[dict[str, Any]]]:
    rollout = config.rollout
    if refused or (device_type == "cuda" and _shares_vllm(config) and "sync" in failing):
        wider = _wider_generators(config, world_size, memory_bytes) if _shares_vllm(config) else []
        yield _choices("rollout.vllm.tensor_parallel", wider)[refused:]
    if rollout.backend == "hf" and "generate" in failing:
        smaller = [2**n for n in reversed(range((rollout.batch_size - 1).bit_length()))]
        yield _choices("rollout.batch_size", smaller)


def decided_by_memory(config: RunConfig) -> dict[str, Any]:
    """By dotted key, each "auto" that memory decides, with its value where memory has no limit."""
    found: dict[str, Any] = {}
    for name, role in run_roles(config).items():
        if isinstance(role.config, EngineConfig) and role.trains:
            if role.config.activation_checkpointing == "auto":
                found[f"{name}.activation_checkpointing"] = "none"
            if role.config.reduce_every_micro_batch == "auto" and role.config.param_dtype == "float32":
                found[f"{name}.reduce_every_micro_batch"] = False
    if isinstance(config, Config) and _shares_vllm(config) and config.rollout.vllm.tensor_parallel == "auto":
        found["rollout.vllm.tensor_parallel"] = 1
    return found


def _shares_vllm(config: Config) -> bool:
    """Whether vLLM runs in the processes that train, several of which can hold one copy of the weights."""
    rollout = config.rollout
    return rollout.backend == "vllm" and rollout.vllm.process == "colocated" and not config.has_servers


def only(decision: list[dict[str, Any]], keys: Container[str]) -> list[dict[str, Any]]:
    """The choices of a decision, without the changes of other keys."""
    kept = [{key: value for key, value in changes.items() if key in keys} for changes in decision]
    return [changes for i, changes in enumerate(kept) if changes not in kept[:i]]


def _stronger(config: RunConfig, role: Role, world_size: int, caps: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """Settings of a model that trains, each with the values that need less memory than its own."""
    engine, modes = role.config, ["none", "selective", "full", "offload"]
    yield (
        "max_tokens",
        [cap for cap in sorted(caps, reverse=True) if config.longest_taught <= cap < engine.max_tokens],
    )
    yield "activation_checkpointing", modes[modes.index(engine.activation_checkpointing) + 1 : -1]
    is_packed = not _model(role).padded_because
    yield "sequence_parallel", _divisors(_heads(role), world_size, 2 * engine.sequence_parallel) * is_packed
    waits = is_wrapped(engine, world_size) and not engine.reduce_every_micro_batch
    yield "reduce_every_micro_batch", [True] * waits
    yield "shard_size", [-1] * (engine.shard_size not in (-1, world_size))


def _choices(key: str, values: list[Any]) -> list[dict[str, Any]]:
    return [{}, *({key: value} for value in values)]


def _wider_generators(config: Config, world_size: int, memory_bytes: float) -> list[int]:
    """The least values of vLLM's `tensor_parallel` with which it starts, which divide the ranks and attention heads."""
    actor, key = run_roles(config)["actor"], "rollout.vllm.tensor_parallel"
    policy = _model(actor)
    assert isinstance(policy, PolicyModel)
    wider = _divisors(_heads(actor), world_size, 2 * config.rollout.vllm.tensor_parallel_size)
    refusals = (
        (n, GeneratorMemory(changed(config, {key: n}), policy, world_size, memory_bytes, "cuda").refusal())
        for n in wider
    )
    return [n for n, refusal in refusals if not refusal][:_WIDER_GENERATORS]


def _model(role: Role) -> RLModel:
    return build_plain(role.path, role.config, role.head, role.trains)


def _heads(role: Role) -> int:
    return getattr(_model(role).backbone.config.get_text_config(), "num_attention_heads", None) or 1


def _divisors(number: int, other: int, least: int) -> list[int]:
    common = math.gcd(number, other)
    return [n for n in range(least, common + 1) if common % n == 0]


def _state_choices(config: RunConfig, device_type: str) -> Iterator[list[dict[str, Any]]]:
    """Where a model's weights and moments are kept, and how wide the moments are: one of all ways for each model."""
    names = dict.fromkeys(("actor", "critic", "reference", "teacher", *run_roles(config)))
    for name in names:
        section = value_at(config, name)
        if not isinstance(section, ModelConfig):
            continue
        optimizer = section.optimizer if isinstance(section, EngineConfig) else None
        adamw = optimizer if optimizer is not None and optimizer.name == "adamw" else None
        choices: list[dict[str, Any]] = [{}]
        if device_type == "cuda" and not (section.cpu_offload or section.offload_between_phases):
            if not section.cuda_graphs:
                choices.append({f"{name}.offload_between_phases": True})
            if not (section.cuda_graphs or (optimizer is not None and optimizer.cpu_offload)):
                choices.append({f"{name}.cpu_offload": True})
            if adamw is not None and not adamw.cpu_offload:
                choices.append({f"{name}.optimizer.cpu_offload": True})
        if adamw is not None:
            dtypes = ("float32", "bfloat16", "int8")
            narrower = dtypes[dtypes.index(adamw.moment_dtype) + 1 :]
            choices += [{f"{name}.optimizer.moment_dtype": dtype} for dtype in narrower]
        yield choices


def changed(config: AnyConfig, changes: dict[str, Any]) -> AnyConfig:
    """The configuration with other values for some dotted keys.

    Raises:
        ConfigError: the values are not valid together.
    """
    values = config.model_dump()
    for key, value in changes.items():
        set_key(values, key.split("."), value)
    kind: type[AnyConfig] = type(config)
    return kind.parse(values)
