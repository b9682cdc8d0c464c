"""What a pass needs in memory, found by running the real model code under `FakeTensorMode`: nothing is computed.

Any architecture is covered. Of blocks that repeat only a few run: memory is recorded between the same blocks of two
models of a few blocks each, and every such record grows by the same bytes with each further block.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from rlft_fast.config import EngineConfig
from rlft_fast.engine.forward import positional
from rlft_fast.engine.memory.repeats import Repeats, find_repeats
from rlft_fast.engine.memory.tracker import MemoryTracker
from rlft_fast.engine.optimizer import build_optimizer
from rlft_fast.engine.sharding import Head, build_model, reduce_gradients, shard
from rlft_fast.models import (
    ImageInputs,
    ModelInputs,
    PolicyModel,
    RLModel,
    all_rows_of_own_heads,
    has_vision,
    materialize,
)
from rlft_fast.ops import gather_heads_scatter_tokens
from rlft_fast.rl import PolicyLoss, ValueLoss
from rlft_fast.world import sequence_group

# transformers hands a vision tower's boundaries on, instead of reading them, to what has "flash" in its name.
WHOLE_SEQUENCE, WHOLE_IMAGE = "rlft_whole_sequence", "rlft_whole_image_as_flash"


class PlanError(ValueError):
    """A model that cannot be planned, which says nothing about whether it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What rank 0 of so many does with a model.

    Attributes:
        path: folder with the model's ``config.json``.
        config: of the engine; its shard size must be a number.
        world_size: number of ranks.
        head: of the model.
        trains: a step of the optimizer; otherwise inference.
        num_tokens: of each micro-batch, before `sequence_parallel` divides them.
        num_micro_batches: more than two need what two need.
        num_patches: of images in each micro-batch, for models with a vision tower; never less than a blank image's.
        offloaded: weights, gradients and optimizer state do not count: they are on another device.
    """

    path: str
    config: EngineConfig
    world_size: int
    head: Head = "logprob"
    trains: bool = True
    num_tokens: int
    num_micro_batches: int = 1
    num_patches: int = 0
    offloaded: bool = False


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes at most.

    Attributes:
        anywhere: of the whole workload.
        at_operator: when the head's operator ended, which takes memory of its own unseen; 0 without one.
    """

    anywhere: int
    at_operator: int


def simulate(workload: Workload) -> Peaks:
    """Memory of the workload, weights included, by the code that builds, shards and runs the engine's model.

    Raises:
        ValueError: the folder, the shard size or `sequence_parallel` cannot be used, or a group was joined.
        PlanError: the model has an operator that does not run on tensors without data.
    """
    return _simulate(workload, (Path(workload.path) / "config.json").read_text())


@lru_cache(maxsize=256)
def _simulate(workload: Workload, _model_config: str) -> Peaks:
    with pretended_world(workload.world_size):
        try:
            return _with_few_blocks(workload)
        except RuntimeError as error:
            raise PlanError(
                f"the model in {workload.path} cannot be planned, since it does not run without data: {error}"
            ) from error


def _with_few_blocks(workload: Workload) -> Peaks:
    """Each moment's peak is that of a few blocks, and what further ones add; the highest counts."""
    model = build(workload)
    repeats = find_repeats(model)
    if repeats is None:
        tracker = run_blocks(workload, model)
        return Peaks(max(tracker.peaks.values()), max(tracker.peaks_at_operator.values(), default=0))
    few, more = (
        run_blocks(workload, built, repeats, count)
        for built, count in zip((model, build(workload)), repeats.counts, strict=True)
    )
    inferred = [
        max((repeats.infer(least[moment], most[moment]) for moment in least), default=0)
        for least, most in ((few.peaks, more.peaks), (few.peaks_at_operator, more.peaks_at_operator))
    ]
    return Peaks(*inferred)


@contextlib.contextmanager
def pretended_world(world_size: int) -> Iterator[None]:
    """This process is rank 0 of so many, whose collectives do nothing.

    Raises:
        ValueError: it is in a process group already.
    """
    if dist.is_initialized():
        raise ValueError("this process has joined a process group, so it cannot pretend another: plan before joining")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_blocks(
    workload: Workload, model: RLModel, repeats: Repeats | None = None, num_repeats: int = 0
) -> MemoryTracker:
    """Runs the workload in the pretended world, with so many of the model's repeated blocks or with all.

    Args:
        workload: what is run.
        model: as `build_model` makes it; it is sharded, and cannot be used again.
        repeats: of the model's blocks.
        num_repeats: how many of them run.
    """
    device, config = torch.device("cpu"), workload.config
    group = sequence_group(config.sequence_parallel)
    if repeats is not None:
        repeats.shorten(model, num_repeats)
    shard(model, config, device)
    operator = "linear_logprob_loss" if workload.trains else "linear_logprob"
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker(f"rlft_fast::{operator}") as tracker:
        materialize(model, device)
        _stand_in(model)
        if repeats is not None:
            _mark_blocks(tracker, repeats, model)
        if not workload.trains:
            if workload.offloaded:
                tracker.leave_out()
            with torch.no_grad():
                _run(model, tracker, workload, group, 0)
            return tracker
        optimizer = build_optimizer(model.parameters(), config.optimizer)
        optimizer.initialize_state()
        if workload.offloaded:
            tracker.leave_out()
            tracker.elsewhere = partial(_gradient_bytes, list(model.parameters()))
        for i in reversed(range(min(workload.num_micro_batches, 2))):
            reduce_gradients(model, i == 0, config.reduce_every_micro_batch)
            _run(model, tracker, workload, group, i)
    return tracker


def build(workload: Workload) -> RLModel:
    """The workload's model, whole and without memory."""
    config = workload.config.model_copy(update={"compile": False})
    return build_model(workload.path, config, workload.head, trains=workload.trains)


def _gradient_bytes(parameters: list[nn.Parameter]) -> int:
    """Of gradients that have been reduced."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(getattr(gradient, "_local_tensor", gradient).nbytes for gradient in gradients)


# ---- the pass -------------------------------------------------------------------------------------------------------


def _run(
    model: RLModel, tracker: MemoryTracker, workload: Workload, group: dist.ProcessGroup | None, micro_batch: int
) -> None:
    """Forward, and backward if it trains, of a micro-batch in which every token has an output."""
    tracker.mark((micro_batch, "embedding"))
    inputs = _inputs(model, workload, group)
    num_rows = len(inputs.input_ids_U)
    options: dict[str, Any] = {"return_entropy": True} if isinstance(model, PolicyModel) else {}
    loss = PolicyLoss() if isinstance(model, PolicyModel) else ValueLoss()
    fields = {name: torch.zeros(num_rows) for name in loss.fields} if workload.trains else {}
    if not workload.trains:
        model(inputs, **options)
    elif isinstance(model, PolicyModel):
        loss_fn = positional(loss.per_token, ("logprob_T", "entropy_T", *fields))
        total, *_ = model(inputs, **options, loss_fn=loss_fn, per_token=(*fields.values(),))
        total.backward()
    else:
        loss.per_token({"new_value_T": model(inputs)} | fields).sum().backward()
    tracker.mark((micro_batch, "end"))


def _inputs(model: RLModel, workload: Workload, group: dist.ProcessGroup | None) -> ModelInputs:
    num_rows = -(-workload.num_tokens // workload.config.sequence_parallel)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    boundaries = torch.zeros(2, dtype=torch.int32)
    position_ids, images = ids, None
    if has_vision(model.backbone):
        position_ids, images = ids.expand(3, -1), _images(model.backbone, num_rows, workload.num_patches)
    return ModelInputs(
        input_ids_U=ids, position_ids_U=position_ids, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries,
        max_seqlen_q=workload.num_tokens, max_seqlen_k=workload.num_tokens, key_index_M=None, active_index_A=ids,
        target_A=ids, output_index_A=ids, images=images, sequence_group=group,
    )  # fmt: skip


def _images(backbone: Any, num_rows: int, num_patches: int) -> ImageInputs:
    vision = backbone.config.vision_config
    blank, channels = vision.spatial_merge_size**2, vision.in_channels * vision.temporal_patch_size
    num_patches = max(-(-num_patches // blank), 1) * blank
    return ImageInputs(
        pixel_values=torch.zeros(num_patches, channels * vision.patch_size**2),
        image_grid_thw=torch.zeros(1, 3, dtype=torch.int64),
        source_index_U=torch.zeros(num_rows, dtype=torch.int64),
    )


def _mark_blocks(tracker: MemoryTracker, repeats: Repeats, model: RLModel) -> None:
    """Moments have the same names in models of different numbers of blocks."""
    blocks = repeats.blocks(model)
    for i, block in enumerate(blocks):
        position = repeats.position(i, len(blocks))
        block.register_forward_pre_hook(partial(_mark_forward, tracker, position))
        block.register_forward_hook(partial(_mark_backward, tracker, position, i == len(blocks) - 1))


def _mark_forward(tracker: MemoryTracker, position: int | None, *_: Any) -> None:
    tracker.mark((tracker.moment[0], "forward", position))


def _mark_backward(
    tracker: MemoryTracker, position: int | None, is_last: bool, _block: nn.Module, _arguments: Any, outputs: Any
) -> None:
    micro_batch = tracker.moment[0]
    hidden = tree_leaves(outputs)[0]
    if hidden.requires_grad:
        hidden.register_hook(lambda _: tracker.mark((micro_batch, "backward", position)))
    if is_last:
        tracker.mark((micro_batch, "head"))


# ---- what stands for operators whose boundaries are data ------------------------------------------------------------


def _stand_in(model: RLModel) -> None:
    """Has the model attend by functions that need as much memory, and read nothing."""
    backbone: Any = model.backbone
    if not has_vision(backbone):
        model.pretrained.set_attn_implementation(WHOLE_SEQUENCE)
        return
    names = {"": WHOLE_SEQUENCE, "text_config": WHOLE_SEQUENCE, "vision_config": "sdpa"}
    model.pretrained.set_attn_implementation(names)
    backbone.visual.config._attn_implementation_internal = WHOLE_IMAGE
    backbone.get_image_features = partial(_image_features, backbone.visual)


def _image_features(tower: Any, pixel_values: Tensor, _grids: Tensor) -> SimpleNamespace:
    """The tower on one image of all patches, with what it would read from the grids."""
    num_patches, merge = pixel_values.shape[0], tower.spatial_merge_size
    boundaries = torch.zeros(2, dtype=torch.int32)
    outputs = tower(
        pixel_values.type(tower.dtype), grid_thw=None, max_seqlen=num_patches, cu_seqlens=boundaries,
        position_ids=torch.zeros(num_patches, 2, dtype=torch.int64), max_window_seqlen=num_patches,
        window_index=torch.zeros(num_patches // merge**2, dtype=torch.int64), cu_window_seqlens=boundaries,
    )  # fmt: skip
    return SimpleNamespace(pooler_output=(outputs.pooler_output,))


def whole_sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, sequence_group: dist.ProcessGroup | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stands for packed attention, whose boundaries a fake tensor does not have; it needs as much memory."""
    if sequence_group is not None:
        query, key, value = all_rows_of_own_heads(query, key, value, sequence_group)
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    output = torch.cat([output], dim=2).transpose(1, 2)
    if sequence_group is not None:
        output = gather_heads_scatter_tokens(output[0], sequence_group).unsqueeze(0)
    return output, None


def whole_image_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stands for a vision tower's attention to each image or window."""
    output = scaled_dot_product_attention(query, key, value, scale=scaling)
    return torch.cat([output.transpose(1, 2).contiguous()], dim=1), None


AttentionInterface.register(WHOLE_SEQUENCE, whole_sequence_attention)
AttentionInterface.register(WHOLE_IMAGE, whole_image_attention)
