"""Refuses a run that does not fit into memory, before the run starts, and names settings with which it fits."""

import json
import math
from collections.abc import Container
from typing import Any, NamedTuple

from rlft_fast.config import Config, RunConfig
from rlft_fast.engine.memory.decisions import changed, decided_by_memory, decisions, only
from rlft_fast.engine.memory.engine import USABLE, MemoryPlanError
from rlft_fast.engine.memory.run import (
    MemoryPlan,
    Phase,
    largest_actor_max_tokens,
    plan_memory,
    surely_exceeds,
    surely_fits,
)
from rlft_fast.engine.memory.search import Proposal, Search

_GIB = 2**30
_OF_ROUNDED_MOMENTS = " (moments in {} are rounded at random: the run's numbers change, and learn as well)"
_SAMPLE_BYTES = 256  # at least: the texts and ids of an answer as Python objects, and its seed, row and reward


class DoesNotFitError(ValueError):
    """A run needs more memory than there is."""


class Choice(NamedTuple):
    """What memory decides of a run."""

    values: dict[str, Any]
    """By dotted key, in place of each "auto" that memory decides."""
    config: RunConfig
    """The configuration with these values, for its device."""
    plan: MemoryPlan | None
    """Its plan; None if a rough estimate fits easily."""


def choose(config: RunConfig, world_size: int, memory_bytes: float, device_type: str, host_bytes: float) -> Choice:
    """Decides each "auto" of activation checkpointing, of the reduction of gradients, and of vLLM's ranks by memory.

    The values are the fastest with which the run fits. Where the run fits anyway, or with no values, they are those of
    a run without a limit: blocks are not recomputed, gradients are reduced once per step, and vLLM has a rank for each
    copy. Gradients in bfloat16 are always reduced once, because they would be added up in bfloat16.

    Arguments and errors as in `check_run`, but for `DoesNotFitError`.
    """
    unlimited = decided_by_memory(config)
    plain = changed(config, unlimited).for_device(device_type)
    if surely_fits(plain, world_size, memory_bytes, device_type, host_bytes):
        return Choice(unlimited, plain, None)
    plan = plan_memory(plain, world_size, memory_bytes, device_type)
    if unlimited and not plan.fits(memory_bytes, host_bytes):
        found = propose(plain, plan, world_size, memory_bytes, device_type, host_bytes, among=unlimited)
        if found.fits:
            return Choice(unlimited | found.changes, changed(plain, found.changes), found.plan)
    return Choice(unlimited, plain, plan)


def check_run(config: RunConfig, world_size: int, memory_bytes: float, device_type: str, host_bytes: float) -> Choice:
    """Checks that a run fits into memory. Called before the run, and before the process joins a process group.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device, from `rlft_fast.engine.sharding.device_memory`.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.

    Returns:
        What memory decides, and the plan.

    Raises:
        DoesNotFitError: the run needs more than `USABLE` of the memory. The message has the numbers, and changes of
            the configuration with which the run fits.
        MemoryPlanError: a model cannot be planned.
        ValueError: a folder, a shard size or `sequence_parallel` cannot be used.
    """
    choice = choose(config, world_size, memory_bytes, device_type, host_bytes)
    config, plan = choice.config, choice.plan
    if plan is None or plan.fits(memory_bytes, host_bytes):
        return choice
    if plan.refusal:
        raise DoesNotFitError(plan.refusal)
    reason = _reason(plan, world_size, memory_bytes, host_bytes)
    raise DoesNotFitError(f"{reason}. {advice(config, plan, world_size, memory_bytes, device_type, host_bytes)}")


def fitting_changes(
    config: RunConfig, world_size: int, memory_bytes: float, device_type: str, host_bytes: float
) -> dict[str, Any]:
    """The fastest changes of the configuration with which a run fits; none if it fits as `choose` has it.

    Arguments as in `check_run`.

    Raises:
        DoesNotFitError: no settings are enough. The message names the missing GPUs or memory.
        MemoryPlanError: a model cannot be planned.
        ValueError: a folder, a shard size or `sequence_parallel` cannot be used.
    """
    choice = choose(config, world_size, memory_bytes, device_type, host_bytes)
    if choice.plan is None or choice.plan.fits(memory_bytes, host_bytes):
        return {}
    proposal = propose(choice.config, choice.plan, world_size, memory_bytes, device_type, host_bytes)
    if not proposal.fits:
        raise DoesNotFitError(_missing(proposal, memory_bytes, host_bytes))
    return proposal.changes


def check_samples(config: RunConfig, host_bytes: float) -> None:
    """Checks that the answers of a step, and those to one held-out prompt, fit into memory, however short they are.

    Args:
        config: configuration of the run.
        host_bytes: CPU memory for each rank. Every rank holds all answers.

    Raises:
        DoesNotFitError: they do not fit.
    """
    if not isinstance(config, Config):
        return
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
    config: RunConfig,
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
        narrow = dict.fromkeys(x for key, x in proposal.changes.items() if key.endswith("moment_dtype"))
        rounded = _OF_ROUNDED_MOMENTS.format(" and ".join(narrow)) if narrow else ""
        return f"It fits with {as_options(proposal.changes)}{rounded}"
    return _missing(proposal, memory_bytes, host_bytes)


def as_options(changes: dict[str, Any]) -> str:
    """Values by dotted key as they can be pasted behind a command."""
    return " ".join(f"--{key} {json.dumps(x) if isinstance(x, bool) else x}" for key, x in changes.items())


def propose(
    config: RunConfig, plan: MemoryPlan, world_size: int, memory_bytes: float, device_type: str, host_bytes: float, *,
    among: Container[str] | None = None,
) -> Proposal:  # fmt: skip
    """The fastest changes of the configuration with which a run fits.

    Arguments as in `advice`, and ``among``: the dotted keys that may change; None: all that lower memory.
    """
    config = config.for_device(device_type)

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

    largest = 0 if among is not None else largest_actor_max_tokens(config, plan, world_size, memory_bytes, device_type)
    failing = [phase.name for phase in plan.phases if phase.total_bytes > phase.limit(memory_bytes)]
    refused = bool(plan.refusal)
    choices = [*decisions(config, world_size, memory_bytes, device_type, largest, failing, refused=refused)]
    if among is not None:
        choices = [only(decision, among) for decision in choices]
    search = Search(config, plan, world_size, memory_bytes, device_type, host_bytes)
    combinations = search.combinations(choices)
    found = search.fastest(combinations, planned)
    if found is None and among is None:
        found = search.least(combinations, planned)
    return found or Proposal(fits=False, changes={}, plan=plan)


def _missing(proposal: Proposal, memory_bytes: float, host_bytes: float) -> str:
    """Names what no settings make up for."""
    plan, ranks = proposal.plan, proposal.enough_ranks
    if plan.refusal:
        return f"No other settings are enough: {plan.refusal}"
    worst = plan.worst(memory_bytes)
    if worst.total_bytes <= worst.limit(memory_bytes):
        more = f"about {ranks} ranks, or " if ranks else ""
        return (
            f"No other settings are enough: what is off the devices takes {plan.host_bytes / 1e9:.1f} GB of the CPU's "
            f"memory for each rank, and {USABLE * host_bytes / 1e9:.1f} may be used: use {more}more memory"
        )
    needed = f"devices of at least {math.ceil(worst.enough_memory(memory_bytes) / 1e8) / 10:.1f} GB"
    more = f"about {ranks} ranks, {needed}" if ranks else f"{needed} (more ranks are not enough)"
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
