"""Refuses a run that does not fit into memory, before the run starts, and names settings with which it fits."""

import json
import math
from collections.abc import Iterator
from typing import Any

from rlft_fast.config import Config, Role, run_roles, set_key
from rlft_fast.engine.memory.engine import USABLE, MemoryPlanError
from rlft_fast.engine.memory.generator import GeneratorMemory
from rlft_fast.engine.memory.run import (
    MemoryPlan,
    Phase,
    largest_actor_max_tokens,
    longest_sequence,
    plan_memory,
    surely_exceeds,
    surely_fits,
)
from rlft_fast.engine.memory.search import Proposal, Search
from rlft_fast.engine.memory.simulation import build_plain
from rlft_fast.engine.sharding import is_wrapped
from rlft_fast.models import PolicyModel

_GIB = 2**30
_WIDER_GENERATORS = 3  # values of vLLM's `tensor_parallel` that are tried: wider ones only generate slower
_SAMPLE_BYTES = 256  # at least: the texts and ids of an answer as Python objects, and its seed, row and reward


class DoesNotFitError(ValueError):
    """A run needs more memory than there is."""


def check_run(
    config: Config, world_size: int, memory_bytes: float, device_type: str, host_bytes: float
) -> MemoryPlan | None:
    """Checks that a run fits into memory. Called before the run, and before the process joins a process group.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device, from `rlft_fast.engine.sharding.device_memory`.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.

    Returns:
        The plan; None if a rough estimate fits easily.

    Raises:
        DoesNotFitError: the run needs more than `USABLE` of the memory. The message has the numbers, and changes of
            the configuration with which the run fits.
        MemoryPlanError: a model cannot be planned.
        ValueError: a folder, a shard size or `sequence_parallel` cannot be used.
    """
    config = config.for_device(device_type)
    if surely_fits(config, world_size, memory_bytes, device_type, host_bytes):
        return None
    plan = plan_memory(config, world_size, memory_bytes, device_type)
    if plan.fits(memory_bytes, host_bytes):
        return plan

    if plan.refusal:
        raise DoesNotFitError(plan.refusal)
    reason = _reason(plan, world_size, memory_bytes, host_bytes)
    raise DoesNotFitError(f"{reason}. {advice(config, plan, world_size, memory_bytes, device_type, host_bytes)}")


def fitting_changes(
    config: Config, world_size: int, memory_bytes: float, device_type: str, host_bytes: float
) -> dict[str, Any]:
    """The fastest changes of the configuration with which a run fits; none if it fits as it is.

    Arguments as in `check_run`.

    Raises:
        DoesNotFitError: no settings are enough. The message names the missing GPUs or memory.
        MemoryPlanError: a model cannot be planned.
        ValueError: a folder, a shard size or `sequence_parallel` cannot be used.
    """
    config = config.for_device(device_type)
    if surely_fits(config, world_size, memory_bytes, device_type, host_bytes):
        return {}
    plan = plan_memory(config, world_size, memory_bytes, device_type)
    if plan.fits(memory_bytes, host_bytes):
        return {}
    proposal = propose(config, plan, world_size, memory_bytes, device_type, host_bytes)
    if not proposal.fits:
        raise DoesNotFitError(_missing(proposal, memory_bytes))
    return proposal.changes


def check_samples(config: Config, host_bytes: float) -> None:
    """Checks that the answers of a step, and those to one held-out prompt, fit into memory, however short they are.

    Args:
        config: configuration of the run.
        host_bytes: CPU memory for each rank. Every rank holds all answers.

    Raises:
        DoesNotFitError: they do not fit.
    """
    rollout, evaluation = config.rollout, config.evaluation
    number = rollout.prompts_per_step * rollout.samples_per_prompt
    keys = "rollout.prompts_per_step * rollout.samples_per_prompt"
    if evaluation is not None and evaluation.samples_per_prompt > number:
        number, keys = evaluation.samples_per_prompt, "evaluation.samples_per_prompt"
    if number * _SAMPLE_BYTES > host_bytes:
        raise DoesNotFitError(
            f"{number:,} answers at once ({keys}) take at least {number * _SAMPLE_BYTES / 1e9:,.1f} GB of CPU memory, "
            f"and each process has {host_bytes / 1e9:.1f} GB: lower the number"
        )


def advice(
    config: Config,
    plan: MemoryPlan,
    world_size: int,
    memory_bytes: float,
    device_type: str = "cuda",
    host_bytes: float = math.inf,
) -> str:
    """The fastest settings with which a run fits whose plan does not, as a sentence. The settings were planned.

    Args:
        config: configuration of the run.
        plan: its plan.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.
    """
    proposal = propose(config, plan, world_size, memory_bytes, device_type, host_bytes)
    if proposal.fits:
        return f"It fits with {' '.join(_option(*change) for change in proposal.changes.items())}"
    return _missing(proposal, memory_bytes)


def propose(
    config: Config, plan: MemoryPlan, world_size: int, memory_bytes: float, device_type: str, host_bytes: float
) -> Proposal:
    """The fastest changes of the configuration with which a run fits. Arguments as in `advice`."""

    def planned(changes: dict[str, Any]) -> MemoryPlan | None:
        try:
            other = changed(config, changes)
            if surely_exceeds(other, world_size, memory_bytes, device_type):
                return None
            return plan_memory(other, world_size, memory_bytes, device_type)
        except MemoryPlanError:
            raise
        except ValueError:  # the run cannot have this setting
            return None

    largest = largest_actor_max_tokens(config, plan, world_size, memory_bytes, device_type)
    failing = [phase.name for phase in plan.phases if phase.total_bytes > phase.limit(memory_bytes)]
    refused = bool(plan.refusal)
    decisions = [*_decisions(config, world_size, memory_bytes, device_type, largest, failing, refused=refused)]
    search = Search(config, plan, world_size, memory_bytes, device_type, host_bytes)
    return search.fastest(decisions, planned)


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration with other values for some dotted keys.

    Raises:
        ConfigError: the values are not valid together.
    """
    values = config.model_dump()
    for key, value in changes.items():
        set_key(values, key.split("."), value)
    return Config.parse(values)


def _missing(proposal: Proposal, memory_bytes: float) -> str:
    if proposal.plan.refusal:
        return f"No other settings are enough: {proposal.plan.refusal}"
    worst, ranks = proposal.plan.worst(memory_bytes), proposal.enough_ranks
    more = f"about {ranks} ranks" if ranks else "more memory (more ranks are not enough)"
    return (
        f"No other settings are enough: the phase '{worst.name}' takes at least {worst.total_bytes / 1e9:.1f} GB of "
        f"{worst.limit(memory_bytes) / 1e9:.1f} with any: use {more}, shorter sequences or a smaller model"
    )


def _reason(plan: MemoryPlan, world_size: int, memory_bytes: float, host_bytes: float) -> str:
    worst = plan.worst(memory_bytes)
    if worst.total_bytes <= worst.limit(memory_bytes):
        return (
            f"models off the GPUs need {plan.host_bytes / _GIB:.2f} GiB of the CPU's memory for each of {world_size} "
            f"ranks, but {USABLE:.0%} of a rank's {host_bytes / _GIB:.2f} GiB are {USABLE * host_bytes / _GIB:.2f}"
        )
    return (
        f"the phase '{worst.name}' needs {worst.total_bytes / _GIB:.2f} GiB on each of {world_size} ranks "
        f"({_parts(plan, worst)}), but {worst.limit(memory_bytes) / _GIB:.2f} of a device's {memory_bytes / _GIB:.2f} "
        "GiB may be used"
    )


def _parts(plan: MemoryPlan, phase: Phase) -> str:
    """Bytes of a phase by owner, and the two largest parts of the model that trains."""
    owners = [f"{owner} {size / _GIB:.2f}" for owner, size in phase.memory.items() if size]
    kind, _, name = phase.name.partition(" ")
    if kind != "update":
        return ", ".join(owners)
    memory = plan.engines[name].memory
    largest = sorted(memory, key=lambda part: memory[part], reverse=True)[:2]
    return f"{', '.join(owners)}; most for {' and '.join(largest)}"


def _decisions(
    config: Config,
    world_size: int,
    memory_bytes: float,
    device_type: str,
    largest: int,
    failing: list[str],
    *,
    refused: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Decisions that lower memory: for each the changes of the configuration among which to choose.

    Two models that train and do not fit get the same settings, since the combinations of their own are too many.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        largest: token cap with which the policy's update fits.
        failing: names of the phases that do not fit. Keys that do not lower the memory of these phases are left out.
        refused: whether vLLM could not start.
    """
    rollout, as_the_actor = config.rollout, {"score", "infer reference"} & {*failing}
    settings: dict[str, dict[Any, dict[str, Any]]] = {}
    for name, role in run_roles(config).items():
        in_failing = {f"update {name}", f"infer {name}"} & {*failing} or (name == "actor" and as_the_actor)
        if role.trains and in_failing:
            caps = {longest_sequence(config)} | ({largest} if name == "actor" else set())
            for key, values in _stronger(config, role, world_size, caps):
                for value in values:
                    settings.setdefault(key, {}).setdefault(value, {})[f"{name}.{key}"] = value
    for choices in settings.values():
        yield [{}, *choices.values()]
    if device_type == "cuda":
        yield from _offloads(config)
        own = not rollout.servers and (config.cluster is None or config.cluster.generators is None)
        if rollout.backend == "vllm" and own and (refused or "sync" in failing):
            yield _choices("rollout.vllm.tensor_parallel", _wider_generators(config, world_size, memory_bytes))
    if rollout.backend == "hf" and "generate" in failing:
        smaller = [2**n for n in reversed(range((rollout.batch_size - 1).bit_length()))]
        yield _choices("rollout.batch_size", smaller)


def _stronger(config: Config, role: Role, world_size: int, caps: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """Settings of a model that trains, each with the values that need less memory than its own."""
    engine, modes = role.config, ["none", "selective", "full"]
    yield (
        "max_tokens",
        [cap for cap in sorted(caps, reverse=True) if longest_sequence(config) <= cap < engine.max_tokens],
    )
    yield "activation_checkpointing", modes[modes.index(engine.activation_checkpointing) + 1 :]
    yield "sequence_parallel", _divisors(_heads(role), world_size, 2 * engine.sequence_parallel)
    waits = is_wrapped(engine, world_size) and not engine.reduce_every_micro_batch
    yield "reduce_every_micro_batch", [True] * waits
    yield "shard_size", [-1] * (engine.shard_size not in (-1, world_size))


def _choices(key: str, values: list[Any]) -> list[dict[str, Any]]:
    return [{}, *({key: value} for value in values)]


def _wider_generators(config: Config, world_size: int, memory_bytes: float) -> list[int]:
    """The least values of vLLM's `tensor_parallel` with which it starts, which divide the ranks and attention heads."""
    actor, key = run_roles(config)["actor"], "rollout.vllm.tensor_parallel"
    policy = build_plain(actor.path, actor.config, actor.head, actor.trains)
    assert isinstance(policy, PolicyModel)
    wider = _divisors(_heads(actor), world_size, 2 * config.rollout.vllm.tensor_parallel)
    refusals = (
        (n, GeneratorMemory(changed(config, {key: n}), policy, world_size, memory_bytes, "cuda").refusal())
        for n in wider
    )
    return [n for n, refusal in refusals if not refusal][:_WIDER_GENERATORS]


def _heads(role: Role) -> int:
    model = build_plain(role.path, role.config, role.head, role.trains)
    return model.backbone.config.get_text_config().num_attention_heads


def _divisors(number: int, other: int, least: int) -> list[int]:
    common = math.gcd(number, other)
    return [n for n in range(least, common + 1) if common % n == 0]


def _offloads(config: Config) -> Iterator[list[dict[str, Any]]]:
    sections = {"actor": config.actor, "critic": config.critic, "reference": config.reference}
    for name, section in sections.items():
        if section is not None and not (section.cpu_offload or section.offload_between_phases):
            yield [{}, {f"{name}.offload_between_phases": True}, {f"{name}.cpu_offload": True}]


def _option(key: str, value: Any) -> str:
    return f"--{key} {json.dumps(value) if isinstance(value, bool) else value}"
