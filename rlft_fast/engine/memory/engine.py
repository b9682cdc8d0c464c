"""The memory that one engine needs per rank, its largest token cap, and the bytes that it sends per step.

Bytes of weights, gradients and optimizer state follow from shapes and the mesh. All other bytes come from running one
optimizer step on tensors without data (`simulation`). The only input is ``config.json``: no weights are read.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlft_fast.config import EngineConfig, HeadKind
from rlft_fast.engine.forward import power_of_two
from rlft_fast.engine.memory.simulation import MemoryPlanError, Peaks, Workload, build_plain, simulate
from rlft_fast.engine.sharding import (
    find_units,
    float8_layers,
    is_wrapped,
    resolve_shard_size,
    shard_numel,
    state_bytes,
)
from rlft_fast.engine.torch_optim import moment_bytes
from rlft_fast.models import PolicyModel, RLModel
from rlft_fast.ops.logprob import default_tile_mib, forward_bytes, scratch_bytes

__all__ = ["USABLE", "EngineMemory", "MemoryPlanError", "largest_max_tokens", "plan_engine_memory"]

# Share of a device's memory that a plan may use. The CUDA context, communication buffers and holes between tensors take
# the rest.
USABLE = 0.9
_FLOAT = 4  # bytes: moments, masters and unreduced gradients are float32
# Bytes that a float8 product takes for each element of its largest matrix: in float32, scaled, and in float8 in two
# layouts, with scales. Compiled casts take less.
_FLOAT8 = 11
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1 << 20  # the largest token cap is searched in this range


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes that a training model needs on each rank at the peak of a step, and bytes that a rank sends in a step.

    Attributes:
        num_parameters: parameters of the whole model.
        replicate_size: copies of the model in the mesh.
        shard_size: ranks that share one copy.
        num_micro_batches: micro-batches of an optimizer step.
        max_tokens: tokens of a micro-batch, which `sequence_parallel` ranks share.
        memory: bytes on the device at the peak, by part. "gradients that wait" are unreduced gradients of the whole
            model, kept between micro-batches. "activations" is the part that grows with the tokens. "gathered units"
            are whole weights and gradients of units, with their buffers. "logits workspace" is the head's own memory
            in the loss with the float32 sum of its weight's gradient; 0 if the peak is at another time.
        host: bytes in the CPU's memory by part, with ``cpu_offload``, ``optimizer.cpu_offload`` or
            ``activation_checkpointing: offload`` on GPUs. On CPUs `memory` has everything.
        sent_bytes: bytes that each rank sends in a step for weights and gradients by ring collectives.
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
    head: HeadKind = "logprob", num_patches: int = 0, images_per_sequence: int = 1, memory_bytes: int = 1 << 62,
) -> EngineMemory:  # fmt: skip
    """Plans the memory of a training model on the mesh that the engine would make.

    The calling process must not have joined a process group.

    Args:
        path: folder with the model's ``config.json``.
        config: configuration of the engine.
        world_size: number of ranks.
        num_micro_batches: micro-batches of an optimizer step.
        device_type: ``"cuda"`` or ``"cpu"``: the head's loss takes a different workspace on each.
        head: "logprob" for a policy, "value" for a critic.
        num_patches: image patches of a micro-batch, for a model with a vision tower.
        images_per_sequence: images of each sequence with images. The layers of Gemma 3 copy keys and values for each.
        memory_bytes: memory of each rank's device, which decides ``shard_size: auto``.

    Raises:
        ValueError: the shard size or `sequence_parallel` does not divide the ranks, the folder cannot be used, or the
            process has joined a process group.
        MemoryPlanError: the model does not run on tensors without data.
    """
    config = config.for_device(device_type)
    model, work = prepare(path, config, world_size, device_type, head, trains=True, memory_bytes=memory_bytes)
    work = replace(work, num_micro_batches=num_micro_batches, num_patches=num_patches)
    work = replace(work, images_per_sequence=images_per_sequence)
    whole, half = peaks(model, work), peaks(model, replace(work, num_tokens=work.num_tokens // 2))
    scratch = head_scratch_bytes(model, work, device_type)
    peak, growth = whole.anywhere, whole.anywhere - half.anywhere
    if whole.at_operator + scratch > peak:
        peak, growth = whole.at_operator + scratch, whole.at_operator - half.at_operator
    else:
        scratch = 0
    shard_size = int(work.config.shard_size)
    state = state_by_part(model, config, shard_size)
    here, moments = dict.fromkeys(state, 0) if work.offloaded else state, host_moment_bytes(model, config, shard_size)
    memory = {
        "parameters": here["parameters"],
        "gradients": here["gradients"],
        "gradients that wait": waiting_gradient_bytes(model, config, world_size, num_micro_batches),
        "optimizer": here["optimizer"],
        "logits workspace": scratch,
        "activations": 2 * growth,
    }
    host = state if work.offloaded else {"optimizer": moments} if moments else {}
    if inputs := offloaded_input_bytes(model, config):
        host = host | {"activations": inputs}
    rest = peak - sum(memory.values())
    # A negative rest means that some gradients do not exist yet at the peak.
    memory["gradients that wait" if work.offloaded else "gradients"] += min(rest, 0)
    memory["gathered units"] = max(rest, 0) + (copied_bytes(model, config, shard_size) if work.offloaded else 0)
    return EngineMemory(
        num_parameters=local_numel(model.parameters(), 1),
        replicate_size=world_size // shard_size,
        shard_size=shard_size,
        num_micro_batches=num_micro_batches,
        max_tokens=config.max_tokens,
        memory=memory,
        host=host,
        sent_bytes=sent_bytes(model, config, world_size // shard_size, shard_size, num_micro_batches),
    )


def least_bytes(
    path: str, config: EngineConfig, world_size: int, num_micro_batches: int, device_type: str, head: HeadKind,
    memory_bytes: int,
) -> int:  # fmt: skip
    """Bytes that a training model keeps between micro-batches: a bound that takes no simulation.

    Arguments as in `plan_engine_memory`. Where memory decides `reduce_every_micro_batch`, no gradients wait.
    """
    if config.reduce_every_micro_batch == "auto":
        config = config.model_copy(update={"reduce_every_micro_batch": True})
    config = config.for_device(device_type)
    model, work = prepare(path, config, world_size, device_type, head, trains=True, memory_bytes=memory_bytes)
    waiting = waiting_gradient_bytes(model, config, world_size, num_micro_batches)
    if work.offloaded:
        return waiting
    state = state_by_part(model, config, int(work.config.shard_size))
    return state["parameters"] + state["optimizer"] + (waiting or state["gradients"])


def waiting_gradient_bytes(model: RLModel, config: EngineConfig, world_size: int, num_micro_batches: int) -> int:
    """Bytes of the unreduced gradients of the whole model that wait for the step's last micro-batch."""
    waits = is_wrapped(config, world_size) and num_micro_batches > 1 and config.reduce_every_micro_batch is not True
    return _FLOAT * local_numel(trained(model), 1) if waits else 0


def inference_bytes(
    path: str, config: EngineConfig, world_size: int, device_type: str, head: HeadKind, memory_bytes: int = 1 << 62
) -> int:
    """Bytes on the device while a model infers, without its weights. Arguments as in `plan_engine_memory`."""
    config = config.for_device(device_type)
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
    """Builds the model without memory, and the workload of one micro-batch on the mesh that the engine would make."""
    model = build_plain(path, config, head, trains)
    shard_size = resolve_shard_size(config.shard_size, world_size, state_bytes(model, config), memory_bytes)
    return model, Workload(
        path=path, config=config.model_copy(update={"shard_size": shard_size}), world_size=world_size, head=head,
        trains=trains, num_tokens=config.max_tokens, offloaded=config.cpu_offload and device_type == "cuda",
    )  # fmt: skip


def state_by_part(model: RLModel, config: EngineConfig, shard_size: int) -> dict[str, int]:
    """Bytes of the first rank's weights, reduced gradients and optimizer state, without `host_moment_bytes`."""
    kept, numel = getattr(torch, config.param_dtype).itemsize, local_numel(trained(model), shard_size)
    moments = 0 if config.optimizer.cpu_offload else _moment_bytes(model, config, shard_size)
    return {
        "parameters": kept * local_numel(model.parameters(), shard_size),
        "gradients": kept * numel,
        "optimizer": moments + (_FLOAT if kept < _FLOAT else 0) * numel,
    }


def host_moment_bytes(model: RLModel, config: EngineConfig, shard_size: int) -> int:
    """Bytes of the first rank's moments that ``optimizer.cpu_offload`` keeps in the CPU's memory.

    A step copies them to the device a bucket at a time. Activations need more of the device, and are freed by then.
    """
    return _moment_bytes(model, config, shard_size) if config.optimizer.cpu_offload else 0


def offloaded_input_bytes(model: RLModel, config: EngineConfig) -> int:
    """Bytes of a micro-batch's block inputs in the CPU's memory, with ``activation_checkpointing: offload``.

    Torch allocates pinned memory in powers of two.
    """
    if config.activation_checkpointing != "offload":
        return 0
    text = model.backbone.config.get_text_config()
    rows = -(-config.max_tokens // config.sequence_parallel)
    num_bytes = rows * text.hidden_size * getattr(torch, config.compute_dtype).itemsize
    return text.num_hidden_layers * power_of_two(num_bytes)


def _moment_bytes(model: RLModel, config: EngineConfig, shard_size: int) -> int:
    def shape(parameter: nn.Parameter) -> Sequence[int]:
        first, *others = parameter.shape
        return (-(-first // shard_size), *others)

    return moment_bytes(model, config.optimizer, shape)


def copied_bytes(model: RLModel, config: EngineConfig, shard_size: int) -> int:
    """Bytes of the largest unit's shards, which lie uncast on the device while they are copied from the CPU."""
    units = [unit for _, unit in find_units(model, config.wrap)]
    largest = max((local_numel(unit.parameters(), shard_size) for unit in units), default=0)
    return getattr(torch, config.param_dtype).itemsize * largest


def trained(model: RLModel) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def head_scratch_bytes(model: RLModel, work: Workload, device_type: str) -> int:
    """Bytes that a policy's head takes inside its operator, where `simulate` does not see them; 0 for other heads."""
    if not isinstance(model, PolicyModel):
        return 0
    vocab, dim = model.head.weight.shape
    rank = 0 if model.head.lora_B is None else model.head.lora_B.shape[1]
    config, workspace_mib = work.config, work.config.workspace_mib
    num_rows = -(-work.num_tokens // config.sequence_parallel)
    dtype = getattr(torch, config.compute_dtype)
    if not work.trains:
        if workspace_mib is None:
            workspace_mib = default_tile_mib(device_type, takes_whole_rows=False)
        if device_type == "cpu":
            return forward_bytes(num_rows, dim + rank, vocab, dtype, workspace_mib)
    trained_columns = 0 if not work.trains else dim if model.head.weight.requires_grad else rank
    scratch = scratch_bytes(num_rows, dim + rank, vocab, dtype, device_type, workspace_mib, trained_columns)
    # On a GPU the operator's caller copies the weight, with an adapter beside it. `simulate` runs as on a CPU.
    is_copied = rank and device_type == "cuda"
    return scratch + (vocab * (dim + rank) * dtype.itemsize if is_copied else 0)


def largest_max_tokens(
    path: str,
    config: EngineConfig,
    world_size: int,
    num_micro_batches: int,
    memory_bytes: float,
    device_type: str = "cuda",
    other_bytes: float = 0,
    head: HeadKind = "logprob",
) -> int:
    """The largest token cap with which an update of a model fits into `USABLE` of a rank's memory; 0 if no cap fits.

    The peak of a step is the largest of several peaks. Each is linear in the tokens, apart from the loss's scratch, so
    the peak of the step is convex in the tokens. Between two numbers of tokens it lies below the chord. A number of
    tokens at which the chord meets the limit therefore keeps the limit.

    Args:
        path: folder with the model's ``config.json``.
        config: configuration of the engine.
        world_size: number of ranks.
        num_micro_batches: micro-batches of an optimizer step.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        other_bytes: bytes that other models hold on the device meanwhile.
        head: of the model.
    """
    config = config.for_device(device_type)
    model, work = prepare(path, config, world_size, device_type, head, trains=True, memory_bytes=int(memory_bytes))
    work = replace(work, num_micro_batches=num_micro_batches)
    copied = copied_bytes(model, config, int(work.config.shard_size)) if work.offloaded else 0
    limit = USABLE * memory_bytes - other_bytes - copied
    low, high = min(config.max_tokens, _MOST_TOKENS // 2), _MOST_TOKENS
    if needed_bytes(model, work, device_type) > limit:
        low = _FEWEST_TOKENS
    at_low = peaks(model, replace(work, num_tokens=low))
    if at_low.anywhere > limit:
        return 0
    at_high = peaks(model, replace(work, num_tokens=high))

    def at_most(num_tokens: int) -> float:
        share = (num_tokens - low) / (high - low)
        anywhere = at_low.anywhere + share * (at_high.anywhere - at_low.anywhere)
        in_loss = at_low.at_operator + share * (at_high.at_operator - at_low.at_operator)
        return max(anywhere, in_loss + head_scratch_bytes(model, replace(work, num_tokens=num_tokens), device_type))

    for last in (False, True):  # the second chord starts at the first answer, so it lies closer to the peak
        found = low - 1 + bisect_right(range(low, high + 1), limit, key=at_most)
        if last or not low <= found < high:
            break
        low, at_low = found, peaks(model, replace(work, num_tokens=found))
    return found if found >= low else 0


def needed_bytes(model: RLModel, work: Workload, device_type: str) -> int:
    """Peak bytes of the workload, with the bytes that the head takes inside its operator."""
    found = peaks(model, work)
    return max(found.anywhere, found.at_operator + head_scratch_bytes(model, work, device_type))


def peaks(model: RLModel, work: Workload) -> Peaks:
    """What `simulate` says of the workload, with the bytes of a float8 product as if one ran at every peak."""
    found = simulate(work)
    return replace(found, anywhere=found.anywhere + float8_bytes(model, work))


def float8_bytes(model: RLModel, work: Workload) -> int:
    """Bytes that the casts of the largest product of a layer take, forward or backward, at most."""
    if work.config.float8 is None:
        return 0
    rows = -(-work.num_tokens // work.config.sequence_parallel)
    sizes = ((layer.in_features, layer.out_features) for _, layer in float8_layers(model))
    return _FLOAT8 * max((max(n * k, rows * n, rows * k) for k, n in sizes), default=0)


def sent_bytes(
    model: RLModel, config: EngineConfig, replicate_size: int, shard_size: int, num_micro_batches: int
) -> int:
    """Bytes that each rank sends in an optimizer step. A ring over n ranks sends (n - 1) / n of a buffer.

    Per micro-batch all weights are gathered once, and again in backward if they were freed after forward. Gradients are
    reduced in float32, once per step or per micro-batch. In a hybrid mesh the shards are then all-reduced among the
    copies once per step.
    """
    weights = local_numel(model.parameters(), 1)
    again = sum(local_numel(unit.parameters(), 1) for _, unit in find_units(model, config.wrap)[:-1])
    gathers = num_micro_batches * (weights + again * config.reshard_after_forward)
    width = getattr(torch, config.compute_dtype).itemsize
    reductions = num_micro_batches if config.reduce_every_micro_batch is True else 1
    reduced = reductions * _ring(shard_size) * local_numel(trained(model), 1)
    added = 2 * _ring(replicate_size) * local_numel(trained(model), shard_size)
    return round(_ring(shard_size) * width * gathers + _FLOAT * (reduced + added))


def _ring(size: int) -> float:
    return (size - 1) / size


def local_numel(parameters: Iterable[nn.Parameter], shard_size: int) -> int:
    """Elements of the parameters that the first rank holds."""
    return sum(shard_numel(parameter.shape, shard_size) for parameter in parameters)
