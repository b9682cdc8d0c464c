"""What an engine needs per rank, before it is paid for: memory by part, the largest token cap, bytes to communicate.

Weights and what belongs to them follow from shapes and the mesh. The rest comes from running one optimizer step on
tensors without data (`simulation`). Everything follows from ``config.json``; no weights are read.
`rlft_fast.engine.memory.run` puts the engines of a run together.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlft_fast.config import EngineConfig
from rlft_fast.engine.memory.simulation import MemoryPlanError, Workload, simulate
from rlft_fast.engine.sharding import HeadKind, build_model, find_units, resolve_shard_size, shard_numel, state_bytes
from rlft_fast.models import PolicyModel, RLModel
from rlft_fast.ops.logprob import scratch_bytes

__all__ = ["USABLE", "EngineMemory", "MemoryPlanError", "largest_max_tokens", "plan_engine_memory"]

USABLE = 0.9  # of a device's memory: the rest is the CUDA context, communication buffers, and holes between tensors
_FLOAT = 4  # bytes: moments, masters, and gradients until they are reduced are float32
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1 << 20  # between which the largest cap is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """One model that trains, on each rank: bytes when most is needed, and bytes sent per optimizer step.

    Attributes:
        num_parameters: of the whole model.
        replicate_size: copies of the model in the mesh.
        shard_size: ranks that share one copy.
        num_micro_batches: micro-batches of an optimizer step.
        max_tokens: tokens of a micro-batch, which `sequence_parallel` ranks share.
        memory: bytes on the device by part. "gradients that wait" are those of the whole model, not yet reduced,
            between several micro-batches; "activations" what grows with the tokens; "gathered units" the weights and
            gradients of units that are whole at that time, with their buffers; "logits workspace" what the head's loss
            takes for itself, with the float32 sum of its weight's gradient, and 0 where most is needed at another time.
        host: bytes in the CPU's memory by part, with ``cpu_offload`` on GPUs. On CPUs they are in `memory`.
        sent_bytes: bytes that each rank sends in a step for weights and gradients, where collectives run in rings.
    """

    num_parameters: int
    replicate_size: int
    shard_size: int
    num_micro_batches: int
    max_tokens: int
    memory: dict[str, int]
    host: dict[str, int]
    sent_bytes: int

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return sum(self.memory.values())


def plan_engine_memory(
    path: str, config: EngineConfig, world_size: int, num_micro_batches: int = 1, device_type: str = "cuda", *,
    head: HeadKind = "logprob", num_patches: int = 0, memory_bytes: int = 1 << 62,
) -> EngineMemory:  # fmt: skip
    """Plans a model that trains, on the mesh that the engine would make.

    To be called in a process that has joined no process group.

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        world_size: number of ranks.
        num_micro_batches: micro-batches of an optimizer step.
        device_type: of the ranks, ``"cuda"`` or ``"cpu"``: how much the head's loss takes for itself depends on it.
        head: "logprob" for a policy, "value" for a critic.
        num_patches: of the images of a micro-batch, for a model with a vision tower.
        memory_bytes: of each rank's device, by which ``shard_size: auto`` is decided.

    Raises:
        ValueError: the shard size or `sequence_parallel` does not divide the ranks, the folder cannot be used, or a
            group was joined.
        MemoryPlanError: the model does not run on tensors without data.
    """
    model, work = prepare(path, config, world_size, device_type, head, trains=True, memory_bytes=memory_bytes)
    work = replace(work, num_micro_batches=num_micro_batches, num_patches=num_patches)
    whole, half = simulate(work), simulate(replace(work, num_tokens=work.num_tokens // 2))
    scratch = head_scratch_bytes(model, work, device_type)
    peak, growth = whole.anywhere, whole.anywhere - half.anywhere
    if whole.at_operator + scratch > peak:
        peak, growth = whole.at_operator + scratch, whole.at_operator - half.at_operator
    else:
        scratch = 0
    shard_size = int(work.config.shard_size)
    state = state_by_part(model, config, shard_size)
    waits = is_wrapped(config, world_size) and num_micro_batches > 1 and not config.reduce_every_micro_batch
    here = dict.fromkeys(state, 0) if work.offloaded else state
    memory = {
        "parameters": here["parameters"],
        "gradients": here["gradients"],
        "gradients that wait": _FLOAT * local_numel(trained(model), 1) if waits else 0,
        "optimizer": here["optimizer"],
        "logits workspace": scratch,
        "activations": 2 * growth,
    }
    rest = peak - sum(memory.values())
    memory["gradients that wait" if work.offloaded else "gradients"] += min(rest, 0)  # not all are there at the peak
    memory["gathered units"] = max(rest, 0) + (copied_bytes(model, config, shard_size) if work.offloaded else 0)
    return EngineMemory(
        num_parameters=local_numel(model.parameters(), 1),
        replicate_size=world_size // shard_size,
        shard_size=shard_size,
        num_micro_batches=num_micro_batches,
        max_tokens=config.max_tokens,
        memory=memory,
        host=state if work.offloaded else {},
        sent_bytes=sent_bytes(model, config, world_size // shard_size, shard_size, num_micro_batches),
    )


def inference_bytes(
    path: str, config: EngineConfig, world_size: int, device_type: str, head: HeadKind, memory_bytes: int = 1 << 62
) -> int:
    """What a model takes on the device while it infers, beside its weights. Arguments as in `plan_engine_memory`."""
    model, work = prepare(path, config, world_size, device_type, head, trains=False, memory_bytes=memory_bytes)
    needed = needed_bytes(model, work, device_type)
    weights = state_by_part(model, config, int(work.config.shard_size))["parameters"]
    copied = copied_bytes(model, config, int(work.config.shard_size)) if work.offloaded else 0
    return needed - (0 if work.offloaded else weights) + copied


def prepare(
    path: str,
    config: EngineConfig,
    world_size: int,
    device_type: str,
    head: HeadKind,
    *,
    trains: bool,
    memory_bytes: int,
) -> tuple[RLModel, Workload]:
    """The model without memory, and the workload of one micro-batch on the mesh that the engine would make."""
    model = build_model(path, config, head, trains=trains)
    shard_size = resolve_shard_size(config.shard_size, world_size, state_bytes(model, config), memory_bytes)
    return model, Workload(
        path=path, config=config.model_copy(update={"shard_size": shard_size}), world_size=world_size, head=head,
        trains=trains, num_tokens=config.max_tokens, offloaded=config.cpu_offload and device_type == "cuda",
    )  # fmt: skip


def state_by_part(model: RLModel, config: EngineConfig, shard_size: int) -> dict[str, int]:
    """Bytes of the first rank's weights, reduced gradients and optimizer state."""
    kept, numel = getattr(torch, config.param_dtype).itemsize, local_numel(trained(model), shard_size)
    return {
        "parameters": kept * local_numel(model.parameters(), shard_size),
        "gradients": kept * numel,
        "optimizer": (2 * _FLOAT + (_FLOAT if kept < _FLOAT else 0)) * numel,
    }


def copied_bytes(model: RLModel, config: EngineConfig, shard_size: int) -> int:
    """Shards that are on their way from the CPU to the device: those of the largest unit, before they are cast."""
    units = [unit for _, unit in find_units(model, config.wrap)]
    largest = max((local_numel(unit.parameters(), shard_size) for unit in units), default=0)
    return getattr(torch, config.param_dtype).itemsize * largest


def is_wrapped(config: EngineConfig, world_size: int) -> bool:
    """Whether FSDP holds the model, see `rlft_fast.engine.sharding.build.shard`."""
    return world_size > 1 or config.compute_dtype != "float32" or config.cpu_offload


def trained(model: RLModel) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def head_scratch_bytes(model: RLModel, work: Workload, device_type: str) -> int:
    """What a policy's head takes for itself in a micro-batch, beside what `simulate` sees of it; 0 of other heads."""
    if not isinstance(model, PolicyModel):
        return 0
    vocab, dim = model.head.weight.shape
    config, workspace_mib = work.config, work.config.workspace_mib
    if not work.trains and workspace_mib is None:
        workspace_mib = 256 if device_type == "cuda" else 64  # of `linear_logprob`
    num_rows = -(-work.num_tokens // config.sequence_parallel)
    needs_dweight = work.trains and model.head.weight.requires_grad
    dtype = getattr(torch, config.compute_dtype)
    return scratch_bytes(num_rows, dim, vocab, dtype, device_type, workspace_mib, needs_dweight)


def largest_max_tokens(
    path: str,
    config: EngineConfig,
    world_size: int,
    num_micro_batches: int,
    memory_bytes: float,
    device_type: str = "cuda",
    other_bytes: float = 0,
) -> int:
    """The largest token cap of a policy that fits into `USABLE` of a rank's memory; 0 if nothing does.

    What a step needs is the largest of several needs that are each linear in the tokens, but for the loss's scratch,
    so it is convex in them: between two numbers of tokens it lies below the chord, and where that meets the limit, the
    limit is kept.

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        world_size: number of ranks.
        num_micro_batches: micro-batches of an optimizer step.
        memory_bytes: of each rank's device.
        device_type: of the ranks.
        other_bytes: bytes that others hold on the device meanwhile.
    """
    model, work = prepare(path, config, world_size, device_type, "logprob", trains=True, memory_bytes=int(memory_bytes))
    work = replace(work, num_micro_batches=num_micro_batches)
    copied = copied_bytes(model, config, int(work.config.shard_size)) if work.offloaded else 0
    limit = USABLE * memory_bytes - other_bytes - copied
    low, high = min(config.max_tokens, _MOST_TOKENS // 2), _MOST_TOKENS
    if needed_bytes(model, work, device_type) > limit:
        low = _FEWEST_TOKENS
    at_low = simulate(replace(work, num_tokens=low))
    if at_low.anywhere > limit:
        return 0
    at_high = simulate(replace(work, num_tokens=high))

    def at_most(num_tokens: int) -> float:
        share = (num_tokens - low) / (high - low)
        anywhere = at_low.anywhere + share * (at_high.anywhere - at_low.anywhere)
        in_loss = at_low.at_operator + share * (at_high.at_operator - at_low.at_operator)
        return max(anywhere, in_loss + head_scratch_bytes(model, replace(work, num_tokens=num_tokens), device_type))

    for last in (False, True):  # the second time from where the needs are those of large micro-batches
        found = low - 1 + bisect_right(range(low, high + 1), limit, key=at_most)
        if last or not low <= found < high:
            break
        low, at_low = found, simulate(replace(work, num_tokens=found))
    return found if found >= low else 0


def needed_bytes(model: RLModel, work: Workload, device_type: str) -> int:
    """With what the head takes for itself."""
    peaks = simulate(work)
    return max(peaks.anywhere, peaks.at_operator + head_scratch_bytes(model, work, device_type))


def sent_bytes(
    model: RLModel, config: EngineConfig, replicate_size: int, shard_size: int, num_micro_batches: int
) -> int:
    """What each rank sends in an optimizer step, by rings: (n - 1) / n of a buffer to gather or reduce-scatter it.

    Per micro-batch all weights are gathered once, and again in backward if they were given back. Gradients are reduced
    in float32, once per step or micro-batch, and in a hybrid mesh their shards are all-reduced among the copies once.
    """
    weights = local_numel(model.parameters(), 1)
    again = sum(local_numel(unit.parameters(), 1) for _, unit in find_units(model, config.wrap)[:-1])
    gathers = num_micro_batches * (weights + again * config.reshard_after_forward)
    width = getattr(torch, config.compute_dtype).itemsize
    reductions = num_micro_batches if config.reduce_every_micro_batch else 1
    reduced = reductions * _ring(shard_size) * local_numel(trained(model), 1)
    added = 2 * _ring(replicate_size) * local_numel(trained(model), shard_size)
    return round(_ring(shard_size) * width * gathers + _FLOAT * (reduced + added))


def _ring(size: int) -> float:
    return (size - 1) / size


def local_numel(parameters: Iterable[nn.Parameter], shard_size: int) -> int:
    """Elements that the first rank holds."""
    return sum(shard_numel(parameter.shape, shard_size) for parameter in parameters)
