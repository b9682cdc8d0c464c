"""Refuses a run that does not fit into memory, before the run starts, and names settings with which it fits."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from rlft_fast.config import Config, Role, run_roles, set_key
from rlft_fast.engine.memory.engine import USABLE, MemoryPlanError
from rlft_fast.engine.memory.run import (
    MemoryPlan,
    Phase,
    largest_actor_max_tokens,
    longest_sequence,
    plan_memory,
    surely_exceeds,
    surely_fits,
)
from rlft_fast.engine.memory.simulation import build_plain
from rlft_fast.engine.sharding import is_wrapped

_GIB = 2**30
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
    """Changes of the configuration with which a run fits whose plan does not, as a sentence. Every change is planned.

    Args:
        config: configuration of the run.
        plan: its plan, without a `refusal`.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.
    """

    def fits(changes: dict[str, Any]) -> bool:
        try:
            other = changed(config, changes)
            if surely_exceeds(other, world_size, memory_bytes, device_type):
                return False
            return plan_memory(other, world_size, memory_bytes, device_type).fits(memory_bytes, host_bytes)
        except MemoryPlanError:
            raise
        except ValueError:  # the run cannot have this setting
            return False

    largest = largest_actor_max_tokens(config, plan, world_size, memory_bytes, device_type)
    failing = [phase.name for phase in plan.phases if phase.total_bytes > phase.limit(memory_bytes)]
    remedies = {key: values for key, values in _remedies(config, world_size, device_type, largest, failing) if values}
    return _advice(remedies, fits)


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration with other values for some dotted keys.

    Raises:
        ConfigError: the values are not valid together.
    """
    values = config.model_dump()
    for key, value in changes.items():
        set_key(values, key.split("."), value)
    return Config.parse(values)


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


def _advice(remedies: dict[str, list[Any]], fits: Callable[[dict[str, Any]], bool]) -> str:
    """Names changes with which the run fits: single changes, or else several together. Every change was tried."""
    # The strongest value is planned first: where it does not fit, no milder value does, and a plan takes seconds.
    alone = {
        key: next((value for value in values[:-1] if fits({key: value})), values[-1])
        if fits({key: values[-1]})
        else None
        for key, values in remedies.items()
    }
    if found := [_setting(key, value) for key, value in alone.items() if value is not None]:
        return f"It fits with {' or with '.join(found)}"
    together: dict[str, Any] = {}
    for key, values in remedies.items():
        together[key] = values[-1]
        if key.endswith(".cpu_offload"):
            together.pop(key.replace("cpu_offload", "offload_between_phases"), None)
        if fits(together):
            return "It fits with all of " + ", ".join(_setting(*change) for change in together.items())
    return "No other settings are enough: use more ranks, shorter sequences or a smaller model"


def _remedies(
    config: Config, world_size: int, device_type: str, largest: int, failing: list[str]
) -> Iterator[tuple[str, list[Any]]]:
    """Keys that lower memory, each with values from the mildest to the strongest. Cheap changes come first.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        device_type: ``"cuda"`` or ``"cpu"``.
        largest: token cap with which the policy's update fits.
        failing: names of the phases that do not fit. Keys that do not lower the memory of these phases are left out.
    """
    longest = longest_sequence(config)
    as_the_actor = {"score", "infer reference"} & {*failing}
    for name, role in run_roles(config).items():
        in_failing = {f"update {name}", f"infer {name}"} & {*failing} or (name == "actor" and as_the_actor)
        if role.trains and in_failing:
            caps = [largest] if name == "actor" else [longest]
            yield f"{name}.max_tokens", [cap for cap in caps if longest <= cap < role.config.max_tokens]
            yield f"{name}.activation_checkpointing", ["full"] * (role.config.activation_checkpointing != "full")
            yield f"{name}.sequence_parallel", _wider(role, world_size)
            waits = is_wrapped(role.config, world_size) and not role.config.reduce_every_micro_batch
            yield f"{name}.reduce_every_micro_batch", [True] * waits
            yield f"{name}.shard_size", [-1] * (role.config.shard_size not in (-1, world_size))
    if device_type == "cuda":
        yield from _offloads(config)
    if config.rollout.backend == "hf" and "generate" in failing:
        yield "rollout.batch_size", [2**n for n in reversed(range((config.rollout.batch_size - 1).bit_length()))]


def _wider(role: Role, world_size: int) -> list[int]:
    """Larger values of `sequence_parallel` that divide the numbers of ranks and attention heads."""
    model = build_plain(role.path, role.config, role.head, trains=False)
    common = math.gcd(world_size, model.backbone.config.get_text_config().num_attention_heads)
    return [n for n in range(2 * role.config.sequence_parallel, common + 1) if common % n == 0]


def _offloads(config: Config) -> Iterator[tuple[str, list[Any]]]:
    sections = {"actor": config.actor, "critic": config.critic, "reference": config.reference}
    for name, section in sections.items():
        if section is not None and not (section.cpu_offload or section.offload_between_phases):
            for key in ("offload_between_phases", "cpu_offload"):
                yield f"{name}.{key}", [True]


def _setting(key: str, value: Any) -> str:
    return f"{key}: {json.dumps(value) if isinstance(value, bool) else value}"
