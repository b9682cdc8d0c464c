"""The memory that a run needs per rank: all models, phase by phase, and the generator.

In a phase the trainer works with one model of each process. The other models of the process wait on the device, or in
the CPU's memory with ``cpu_offload`` or ``offload_between_phases``. A run on CPUs has a single memory, in which
everything stays.

On a Ray cluster, a model may have workers of its own (`rlft_fast.engine.memory.processes`). Processes that share a
device work at the same time, so each of them counts at its peak beside the phases of the others.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rlft_fast.config import Config, EngineConfig, Role, RunConfig, StepPhase, run_roles
from rlft_fast.engine.memory.engine import (
    USABLE,
    EngineMemory,
    head_scratch_bytes,
    host_moment_bytes,
    inference_bytes,
    largest_max_tokens,
    least_bytes,
    local_numel,
    offloaded_input_bytes,
    plan_engine_memory,
    prepare,
    state_by_part,
)
from rlft_fast.engine.memory.generator import GeneratorMemory
from rlft_fast.engine.memory.processes import Process, devices_of, ranks_of
from rlft_fast.engine.memory.simulation import build_plain
from rlft_fast.engine.sharding import state_bytes
from rlft_fast.models import PolicyModel, RLModel

_GENERATOR = "vLLM"
_ORDER = ("generate", "score", "infer", "update", "sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a step.

    Attributes:
        name: for example "update actor".
        memory: bytes on the device by owner: a model of the run, or the generator.
        host_bytes: bytes in the CPU's memory of models that are off the GPU.
    """

    name: str
    memory: dict[str, int]
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    def limit(self, memory_bytes: float) -> float:
        """Bytes of a device that may be used: vLLM's share, which includes its context, and `USABLE` of the rest."""
        generator = self.memory.get(_GENERATOR, 0)
        return generator + USABLE * (memory_bytes - generator)

    def enough_memory(self, memory_bytes: float) -> float:
        """Bytes of a device on which the phase fits, if vLLM's share of the memory is as of ``memory_bytes``."""
        generator = self.memory.get(_GENERATOR, 0)
        return (self.total_bytes - generator) / (USABLE * (1 - generator / memory_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of a run on each rank.

    Attributes:
        engines: the models that train, by name.
        phases: the phases of a step, in order.
        refusal: why the generator could not start; empty if it could.
    """

    engines: dict[str, EngineMemory]
    phases: list[Phase]
    refusal: str = ""

    @property
    def host_bytes(self) -> int:
        """Most bytes in the CPU's memory in any phase."""
        return max(phase.host_bytes for phase in self.phases)

    def worst(self, memory_bytes: float) -> Phase:
        """The phase with the least memory to spare."""
        return max(self.phases, key=lambda phase: phase.total_bytes - phase.limit(memory_bytes))

    def fits(self, memory_bytes: float, host_bytes: float = math.inf) -> bool:
        """Whether every phase fits into the device and into the CPU's memory."""
        worst = self.worst(memory_bytes)
        on_device = not self.refusal and worst.total_bytes <= worst.limit(memory_bytes)
        return on_device and self.host_bytes <= USABLE * host_bytes


def plan_memory(config: RunConfig, world_size: int, memory_bytes: float, device_type: str = "cuda") -> MemoryPlan:
    """Plans the memory of all models of a run. The calling process must not have joined a process group.

    Args:
        config: configuration of the run.
        world_size: number of ranks; on a cluster those of the actor.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: a folder, a shard size or `sequence_parallel` cannot be used, or the process has joined a group.
        MemoryPlanError: a model does not run on tensors without data.
    """
    config = config.for_device(device_type)
    ranks = ranks_of(config, world_size)
    engines = {
        name: plan_engine_memory(
            role.path, role.config, ranks[name], most_micro_batches(config, ranks[name], role.config), device_type,
            head=role.head, memory_bytes=int(memory_bytes),
        )
        for name, role in run_roles(config).items()
        if role.trains
    }  # fmt: skip
    updates = {name: engine.total_bytes for name, engine in engines.items()}
    return _in_phases(config, world_size, memory_bytes, device_type, engines, updates, infers=True)


def bound_memory(
    config: RunConfig, world_size: int, memory_bytes: float, device_type: str, updates: dict[str, int]
) -> MemoryPlan:
    """A plan that takes no simulation: without the bytes of inference, and with given bytes of updates.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        updates: bytes on the device in the update of each model that trains.

    Raises:
        ValueError: as `plan_memory` does.
    """
    return _in_phases(config.for_device(device_type), world_size, memory_bytes, device_type, {}, updates, infers=False)


def _in_phases(
    config: RunConfig, world_size: int, memory_bytes: float, device_type: str, engines: dict[str, EngineMemory],
    updates: dict[str, int], *, infers: bool,
) -> MemoryPlan:  # fmt: skip
    ranks = ranks_of(config, world_size)
    residents = {
        name: _Resident(role, ranks[name], memory_bytes, device_type, infers=infers)
        for name, role in run_roles(config).items()
    }
    generator = _generator(config, residents["actor"].model, world_size, memory_bytes, device_type)

    def phases_of(process: Process) -> list[Phase]:
        own = {name: residents[name] for name in process.models}
        return [_for_each_rank(phase, process) for phase in _phases(own, updates, generator)]

    devices = [[*map(phases_of, device)] for device in devices_of(config, world_size)]
    host_bytes = sum(max(phase.host_bytes for phase in process) for device in devices for process in device)
    phases = [phase for device in devices for phase in _on_one_device(device, memory_bytes, host_bytes)]
    phases.sort(key=lambda phase: _ORDER.index(phase.name.partition(" ")[0]))
    return MemoryPlan(engines=engines, phases=phases, refusal="" if generator is None else generator.refusal())


def _generator(
    config: RunConfig, policy: RLModel, world_size: int, memory_bytes: float, device_type: str
) -> GeneratorMemory | None:
    """None for a run that samples nothing."""
    if not isinstance(config, Config):
        return None
    assert isinstance(policy, PolicyModel)
    return GeneratorMemory(config, policy, world_size, memory_bytes, device_type)


def _for_each_rank(phase: Phase, process: Process) -> Phase:
    """The phase with the bytes of a machine's memory that there are for each rank of the actor."""
    memory = phase.memory
    if process.on_cpu:
        memory = {owner: math.ceil(process.share * size) for owner, size in memory.items()}
    return replace(phase, memory=memory, host_bytes=math.ceil(process.share * phase.host_bytes))


def _on_one_device(processes: list[list[Phase]], memory_bytes: float, host_bytes: int) -> Iterator[Phase]:
    """The phases of processes that share a device, each beside the peaks of the other processes.

    Args:
        processes: the phases of each.
        memory_bytes: of the device.
        host_bytes: peaks of all processes of the machine together, in the CPU's memory.
    """
    peaks = [MemoryPlan(engines={}, phases=phases) for phases in processes]
    for own, phases in enumerate(processes):
        others = [peak for other, peak in enumerate(peaks) if other != own]
        beside = {owner: size for peak in others for owner, size in peak.worst(memory_bytes).memory.items()}
        host_beside = host_bytes - peaks[own].host_bytes
        for phase in phases:
            yield replace(phase, memory=phase.memory | beside, host_bytes=phase.host_bytes + host_beside)


def most_micro_batches(config: RunConfig, world_size: int, engine: EngineConfig | None = None) -> int:
    """Most micro-batches that a rank runs in an optimizer step, if every sequence has the greatest length.

    Args:
        config: configuration of the run.
        world_size: number of ranks. Groups of `sequence_parallel` ranks share a micro-batch.
        engine: configuration of one engine of the run; None: the actor.
    """
    engine = engine or config.actor
    share = math.ceil(config.sequences_per_update / max(world_size // engine.sequence_parallel, 1))
    fits = min(engine.max_tokens // config.longest_taught, engine.micro_batch_size or share)
    return math.ceil(share / fits)


def largest_actor_max_tokens(
    config: RunConfig, plan: MemoryPlan, world_size: int, memory_bytes: float, device_type: str = "cuda"
) -> int:
    """The largest token cap with which the actor's update fits beside the waiting models; 0 if no cap fits."""
    update = next(phase for phase in plan.phases if phase.name == "update actor")
    beside = sum(size for owner, size in update.memory.items() if owner != "actor")
    micro_batches = plan.engines["actor"].num_micro_batches
    return largest_max_tokens(
        config.model, config.actor, world_size, micro_batches, memory_bytes, device_type, beside,
        run_roles(config)["actor"].head,
    )  # fmt: skip


def surely_fits(config: RunConfig, world_size: int, memory_bytes: float, device_type: str, host_bytes: float) -> bool:
    """Whether a rough estimate fits, which is meant to be too high. If it fits, a plan is not worth its seconds.

    The estimate adds up all models whole on each device, with everything that they ever need, and the generator.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.
    """
    config = config.for_device(device_type)
    ranks, roles, total, state = ranks_of(config, world_size), run_roles(config), 0, 0
    for name, role in roles.items():
        kept, taken = _roughly(role, ranks[name], device_type)
        total, state = total + kept + taken, state + kept
    memory, refusal, actor = {"models": total}, "", roles["actor"]
    policy = build_plain(actor.path, actor.config, actor.head, trains=True)
    if (generator := _generator(config, policy, world_size, memory_bytes, device_type)) is not None:
        memory["models"] += generator.bucket_bytes if generator.in_vllm else generator.beside_policy_bytes
        memory[_GENERATOR], refusal = generator.awake_bytes, generator.refusal()
    phase = Phase(name="", memory=memory)
    on_device = not refusal and phase.total_bytes <= phase.limit(memory_bytes)
    return on_device and (device_type == "cpu" or state <= USABLE * host_bytes)


def surely_exceeds(config: RunConfig, world_size: int, memory_bytes: float, device_type: str) -> bool:
    """Whether state and gradients of a model that trains alone exceed the memory. A plan is then not worth its seconds.

    Arguments and errors as in `plan_memory`.
    """
    ranks = ranks_of(config, world_size)
    return any(
        least_bytes(
            role.path, role.config, ranks[name], most_micro_batches(config, ranks[name], role.config), device_type,
            role.head, int(memory_bytes),
        ) > USABLE * memory_bytes
        for name, role in run_roles(config).items()
        if role.trains
    )  # fmt: skip


def _roughly(role: Role, world_size: int, device_type: str) -> tuple[int, int]:
    """Bytes of a model's unsharded state, and bytes of a pass."""
    model, work = prepare(
        role.path, role.config, world_size, device_type, role.head, trains=role.trains, memory_bytes=1 << 62
    )  # fmt: skip
    text = model.backbone.config.get_text_config()
    per_block = 16 * text.hidden_size + 6 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    width = getattr(torch, role.config.compute_dtype).itemsize
    activations = -(-role.config.max_tokens // role.config.sequence_parallel) * text.num_hidden_layers * per_block
    # Gathered weights and gradients, or the copies of a single process in bfloat16.
    per_weight = 8 if world_size > 1 else 4 * (role.config.compute_dtype != "float32")
    whole_units = per_weight * local_numel(model.parameters(), 1)
    scratch = head_scratch_bytes(model, work, device_type)
    state = state_bytes(model, role.config) + host_moment_bytes(model, role.config, 1) * role.trains
    return state, width * activations + whole_units + scratch


# ---- phases ---------------------------------------------------------------------------------------------------------


class _Resident:
    """Bytes that a model of the run keeps, and where it keeps them.

    Args:
        role: the model's role.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        infers: whether the bytes of its inference are simulated, or left out.
    """

    def __init__(self, role: Role, world_size: int, memory_bytes: float, device_type: str, *, infers: bool) -> None:
        self.role = role
        arguments = role.path, role.config, world_size, device_type, role.head
        self.model, work = prepare(*arguments, trains=role.trains, memory_bytes=int(memory_bytes))
        state = state_by_part(self.model, role.config, int(work.config.shard_size))
        self.weights, self.gradients = state["parameters"], state["gradients"]
        self.optimizer = state["optimizer"] if role.trains else 0
        self.host_moments = host_moment_bytes(self.model, role.config, int(work.config.shard_size)) * role.trains
        self.host_inputs = offloaded_input_bytes(self.model, role.config) * role.trains
        self.always_off = work.offloaded
        self.off_between = device_type == "cuda" and role.config.offload_between_phases
        self.inference = inference_bytes(*arguments, int(memory_bytes)) if infers else 0

    @property
    def waiting(self) -> int:
        """Bytes on the device while another model's phase runs."""
        return 0 if self.always_off or self.off_between else self.weights + self.optimizer

    @property
    def inferring(self) -> int:
        """Bytes on the device at the beginning of the model's own inference, which needs no optimizer state."""
        return self.weights if self.off_between else self.waiting

    def host(self, doing: str) -> int:
        """Bytes in the CPU's memory while the model does "wait", "infer" or "update"."""
        inputs = self.host_inputs if doing == "update" else 0
        if self.always_off:
            return self.weights + self.optimizer + (self.gradients if doing == "update" else 0) + inputs
        off = {"wait": self.weights + self.optimizer, "infer": self.optimizer, "update": 0}
        return self.host_moments + (off[doing] if self.off_between else 0) + inputs


def _phases(
    residents: dict[str, _Resident], updates: dict[str, int], generator: GeneratorMemory | None
) -> Iterator[Phase]:
    """The phases of a process in a step, in order. A reward model scores before vLLM sleeps.

    Args:
        residents: the models of the process.
        updates: bytes of a model's update, by name.
        generator: works in the actor's process; None: the run samples nothing.
    """
    generates = generator is not None and "actor" in residents
    awake, asleep = (generator.awake_bytes, generator.asleep_bytes) if generator is not None and generates else (0, 0)

    def phase(name: str, active: str, doing: str, active_bytes: int, vllm: int) -> Phase:
        memory = {owner: x.waiting for owner, x in residents.items()} | ({active: active_bytes} if active else {})
        host = sum(x.host(doing if owner == active else "wait") for owner, x in residents.items())
        in_vllm = generator is not None and generates and generator.in_vllm
        return Phase(name=name, memory=memory | ({_GENERATOR: vllm} if in_vllm else {}), host_bytes=host)

    def working(phase: StepPhase) -> list[str]:
        return [name for name, x in residents.items() if phase in x.role.phases]

    def infers(name: str, vllm: int) -> Phase:
        resident = residents[name]
        what = f"infer {name}"
        if resident.role.head == "score":
            what = "score" if name == "reward" else f"score {name}"
        return phase(what, name, "infer", resident.inferring + resident.inference, vllm)

    for name in working("generate"):
        assert generator is not None
        if generator.in_vllm:
            yield phase("generate", "", "", 0, awake)
        else:
            yield phase("generate", name, "infer", residents[name].inferring + generator.beside_policy_bytes, 0)
    for name in working("score"):
        yield infers(name, awake)
    for name in working("infer"):
        yield infers(name, asleep)
    for name in reversed(working("update")):
        yield phase(f"update {name}", name, "update", updates[name], asleep)
    for name in working("sync"):
        assert generator is not None
        if generator.in_vllm:
            taken = residents[name].inferring + generator.bucket_bytes
            yield phase("sync", name, "infer", taken, generator.loading_bytes)
