"""What a run needs per rank, before it is paid for: memory by part, the largest token cap, bytes to communicate.

Weights and what belongs to them follow from shapes and the mesh. The rest comes from running one optimizer step on
tensors without data (`rlft_fast.engine.simulation`). Everything follows from ``config.json``; no weights are read.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rlft_fast.config import Config, EngineConfig
from rlft_fast.engine.build import build_model, state_bytes
from rlft_fast.engine.mesh import resolve_shard_size, shard_numel
from rlft_fast.engine.simulation import MemoryTracker, pretended_world, simulate_step
from rlft_fast.engine.wrap import find_units
from rlft_fast.models import PolicyModel
from rlft_fast.ops.loss_memory import scratch_bytes

USABLE = 0.9  # of a device's memory: the rest is the CUDA context, communication buffers, and holes between tensors
_FLOAT = 4  # bytes: moments, masters, and gradients until they are reduced are float32
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1 << 20  # between which the largest cap is looked for


class PlanError(ValueError):
    """A model that cannot be planned, which says nothing about whether it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """One policy that trains, on each rank: bytes when most is needed, and bytes sent per optimizer step.

    Attributes:
        num_parameters: of the whole model.
        replicate_size: copies of the model in the mesh.
        shard_size: ranks that share one copy.
        num_micro_batches: micro-batches of an optimizer step.
        max_tokens: tokens of a micro-batch.
        memory: bytes by part. "gradients that wait" are those of the whole model, not yet reduced, between several
            micro-batches; "activations" what grows with the tokens; "gathered units" the weights and gradients of
            units that are whole at that time, with their buffers; "logits workspace" what the head's loss takes for
            itself, with the float32 sum of its weight's gradient, and 0 where most is needed at another time.
        sent: bytes that each rank sends in a step, where collectives run in rings.
    """

    num_parameters: int
    replicate_size: int
    shard_size: int
    num_micro_batches: int
    max_tokens: int
    memory: dict[str, int]
    sent: int

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


def plan_engine(
    path: str, config: EngineConfig, world_size: int, num_micro_batches: int = 1, device_type: str = "cuda"
) -> EnginePlan:
    """Plans a policy that trains, on the mesh that the engine would make.

    To be called in a process that has joined no process group.

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        world_size: number of ranks.
        num_micro_batches: micro-batches of an optimizer step.
        device_type: of the ranks, ``"cuda"`` or ``"cpu"``: how much the head's loss takes for itself depends on it.

    Raises:
        ValueError: the shard size does not divide the ranks, the folder cannot be used, or a group was joined.
    """
    model = build_model(path, config, "logprob", trains=True)
    assert isinstance(model, PolicyModel)
    shard_size = resolve_shard_size(config.shard_size, world_size, state_bytes(model, config), 1 << 62)
    whole, half = (
        simulate(path, config, world_size, num_micro_batches, num_tokens)
        for num_tokens in (config.max_tokens, config.max_tokens // 2)
    )
    scratch = loss_scratch_bytes(model, config, config.max_tokens, device_type)
    peak, growth = whole.peak, whole.peak - half.peak
    if whole.peak_at_operator + scratch > peak:
        peak, growth = whole.peak_at_operator + scratch, whole.peak_at_operator - half.peak_at_operator
    else:
        scratch = 0
    wrapped = world_size > 1 or config.compute_dtype != "float32"
    waits = wrapped and num_micro_batches > 1 and not config.reduce_every_micro_batch
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = getattr(torch, config.param_dtype).itemsize
    memory = {
        "parameters": kept * local_numel(model.parameters(), shard_size),
        "gradients": kept * local_numel(trained, shard_size),
        "gradients that wait": _FLOAT * local_numel(trained, 1) if waits else 0,
        "optimizer": (2 * _FLOAT + (_FLOAT if kept < _FLOAT else 0)) * local_numel(trained, shard_size),
        "logits workspace": scratch,
        "activations": 2 * growth,
    }
    rest = peak - sum(memory.values())
    memory["gradients"] += min(rest, 0)  # at the peak those of the first blocks may not be there yet
    memory["gathered units"] = max(rest, 0)
    return EnginePlan(
        num_parameters=local_numel(model.parameters(), 1),
        replicate_size=world_size // shard_size,
        shard_size=shard_size,
        num_micro_batches=num_micro_batches,
        max_tokens=config.max_tokens,
        memory=memory,
        sent=sent_bytes(model, config, world_size // shard_size, shard_size, num_micro_batches),
    )


def most_micro_batches(config: Config, world_size: int) -> int:
    """Of one of the run's optimizer steps on each rank, where every sequence is as long as it may be."""
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt / config.algorithm.mini_batches
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return math.ceil(math.ceil(sequences / world_size) / (config.actor.max_tokens // longest))


def simulate(
    path: str, config: EngineConfig, world_size: int, num_micro_batches: int, num_tokens: int
) -> MemoryTracker:
    """`simulate_step` in a pretended world.

    Raises:
        PlanError: the model has an operator that does not run on tensors without data.
    """
    with pretended_world(world_size):
        try:
            return simulate_step(path, config, num_tokens, num_micro_batches)
        except RuntimeError as error:
            raise PlanError(
                f"the model in {path} cannot be planned, since it does not run without data: {error}"
            ) from error


def loss_scratch_bytes(model: PolicyModel, config: EngineConfig, num_tokens: int, device_type: str) -> int:
    """What `linear_logprob_loss` takes for itself in a micro-batch, beside what `simulate` sees of it."""
    vocab, dim = model.head.weight.shape
    dtype, needs_dweight = getattr(torch, config.compute_dtype), model.head.weight.requires_grad
    return scratch_bytes(num_tokens, dim, vocab, dtype, device_type, config.workspace_mib, needs_dweight)


def largest_max_tokens(
    path: str,
    config: EngineConfig,
    world_size: int,
    num_micro_batches: int,
    memory_bytes: float,
    device_type: str = "cuda",
) -> int:
    """The largest token cap that fits into `USABLE` of a rank's memory; 0 if nothing does.

    What a step needs is the largest of several needs that are each linear in the tokens, but for the loss's scratch,
    so it is convex in them: between two numbers of tokens it lies below the chord, and where that meets the limit, the
    limit is kept.
    """
    limit = USABLE * memory_bytes
    model = build_model(path, config, "logprob", trains=True)
    assert isinstance(model, PolicyModel)
    low, high = _FEWEST_TOKENS, _MOST_TOKENS
    at_low, at_high = (simulate(path, config, world_size, num_micro_batches, n) for n in (low, high))

    def at_most(num_tokens: int) -> float:
        share = (num_tokens - low) / (high - low)
        anywhere = at_low.peak + share * (at_high.peak - at_low.peak)
        in_loss = at_low.peak_at_operator + share * (at_high.peak_at_operator - at_low.peak_at_operator)
        return max(anywhere, in_loss + loss_scratch_bytes(model, config, num_tokens, device_type))

    for _ in range(2):  # the second time from where the needs are those of large micro-batches
        found = low - 1 + bisect_right(range(low, high + 1), limit, key=at_most)
        if found < low:
            return 0
        if found == high:
            return high
        low, at_low = found, simulate(path, config, world_size, num_micro_batches, found)
    return low


def surely_fits(path: str, config: EngineConfig, world_size: int, memory_bytes: float, device_type: str) -> bool:
    """Whether a rough estimate, meant to be too high, fits easily; then a plan, which takes seconds, tells nothing new.

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        world_size: number of ranks.
        memory_bytes: of each rank's device.
        device_type: of the ranks.
    """
    model = build_model(path, config, "logprob", trains=True)
    assert isinstance(model, PolicyModel)
    text = model.pretrained.config.get_text_config()
    per_block = 16 * text.hidden_size + 6 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    activations = config.max_tokens * text.num_hidden_layers * per_block * getattr(torch, config.compute_dtype).itemsize
    whole_gradients = 2 * _FLOAT * local_numel(model.parameters(), 1) if world_size > 1 else 0
    state = state_bytes(model, config)  # if nothing is sharded
    scratch = loss_scratch_bytes(model, config, config.max_tokens, device_type)
    return activations + whole_gradients + state + scratch <= USABLE * memory_bytes


def check_memory(
    path: str,
    config: EngineConfig,
    world_size: int,
    memory_bytes: float,
    num_micro_batches: int = 1,
    device_type: str = "cuda",
) -> EnginePlan:
    """To be called before a run, and before its process group is joined: does the token cap fit?

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        world_size: number of ranks.
        memory_bytes: of each rank's device, see `rlft_fast.engine.mesh.device_memory`.
        num_micro_batches: micro-batches of an optimizer step.
        device_type: of the ranks.

    Returns:
        The plan.

    Raises:
        ValueError: it needs more than `USABLE` of the memory; with the numbers, and the largest cap that fits.
    """
    plan = plan_engine(path, config, world_size, num_micro_batches, device_type)
    if plan.total_bytes <= USABLE * memory_bytes:
        return plan
    largest = largest_max_tokens(path, config, world_size, num_micro_batches, memory_bytes, device_type)
    advice = f"lower max_tokens to {largest}" if largest else "use more ranks, or a larger shard_size"
    if not largest and plan.memory["gradients that wait"]:
        advice += ", or set reduce_every_micro_batch"
    raise ValueError(
        f"max_tokens={config.max_tokens} needs {plan.total_bytes / 2**30:.2f} GiB on each of {world_size} ranks, but "
        f"{USABLE:.0%} of a device's {memory_bytes / 2**30:.2f} GiB are {USABLE * memory_bytes / 2**30:.2f}: {advice}"
    )


def sent_bytes(
    model: nn.Module, config: EngineConfig, replicate_size: int, shard_size: int, num_micro_batches: int
) -> int:
    """What each rank sends in an optimizer step, by rings: (n - 1) / n of a buffer to gather or reduce-scatter it.

    Per micro-batch all weights are gathered once, and again in backward if they were given back. Gradients are reduced
    in float32, once per step or micro-batch, and in a hybrid mesh their shards are all-reduced among the copies once.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = local_numel(model.parameters(), 1)
    again = sum(local_numel(unit.parameters(), 1) for _, unit in find_units(model, config.wrap)[:-1])
    gathers = num_micro_batches * (weights + again * config.reshard_after_forward)
    width = getattr(torch, config.compute_dtype).itemsize
    reductions = num_micro_batches if config.reduce_every_micro_batch else 1
    reduced = reductions * _ring(shard_size) * local_numel(trained, 1)
    added = 2 * _ring(replicate_size) * local_numel(trained, shard_size)
    return round(_ring(shard_size) * width * gathers + _FLOAT * (reduced + added))


def _ring(size: int) -> float:
    return (size - 1) / size


def local_numel(parameters: Iterable[nn.Parameter], shard_size: int) -> int:
    """Elements that the first rank holds."""
    return sum(shard_numel(parameter.shape, shard_size) for parameter in parameters)
