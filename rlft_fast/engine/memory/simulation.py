"""The memory of a pass, found by running the real model code on tensors without data, which computes nothing.

So any architecture is covered. Of equal blocks only a few run. The peak between the same two blocks is recorded for two
models with a few blocks each, and grows by the same bytes with every further block.
"""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from rlft_fast.config import EngineConfig, HeadKind
from rlft_fast.engine.forward import positional
from rlft_fast.engine.memory.repeats import Repeats, find_repeats
from rlft_fast.engine.memory.trace import MANY_ROWS, Note, Trace
from rlft_fast.engine.memory.tracker import MemoryTracker
from rlft_fast.engine.optimizer import build_optimizer, named_parameters
from rlft_fast.engine.sharding import (
    build_model,
    checkpoint_activations,
    decoder_blocks,
    offload_inputs,
    reduce_gradients,
    shard,
)
from rlft_fast.engine.torch_optim import end_parameters
from rlft_fast.models import (
    ImageInputs,
    LookAhead,
    ModelInputs,
    PolicyModel,
    RLModel,
    all_rows_of_own_heads,
    blank_image,
    has_three_positions,
    has_vision,
    materialize,
    require_divisible_heads,
    sees_ahead,
    sinks_of_own_heads,
)
from rlft_fast.ops import gather_heads_scatter_tokens
from rlft_fast.ops.packing import RowIndex, take_rows
from rlft_fast.rl import PolicyLoss, ValueLoss
from rlft_fast.world import World

# transformers reads the boundaries of a vision tower's images, unless the name of the attention contains "flash". A
# fake tensor cannot be read.
WHOLE_SEQUENCE, WHOLE_IMAGE = "rlft_whole_sequence", "rlft_whole_image_as_flash"


_SHORT = (256, 512, 768)  # tokens of a padded model's passes, multiples of the chunks in which layers loop


class MemoryPlanError(ValueError):
    """The model cannot be planned. It may fit all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of rank 0 with one model.

    Attributes:
        path: folder with the model's ``config.json``.
        config: configuration of the engine; its shard size must be a number.
        world_size: number of ranks.
        head: kind of the model's head.
        trains: whether an optimizer step runs; otherwise inference.
        num_tokens: tokens of each micro-batch, before `sequence_parallel` divides them.
        num_micro_batches: micro-batches of the step. More than two need as much memory as two.
        num_patches: image patches of each micro-batch, for models with a vision tower; at least a blank image's.
        images_per_sequence: for models whose image tokens see later ones, see `LookAhead`.
        offloaded: whether weights, gradients and optimizer state are on another device, and do not count.
    """

    path: str
    config: EngineConfig
    world_size: int
    head: HeadKind = "logprob"
    trains: bool = True
    num_tokens: int
    num_micro_batches: int = 1
    num_patches: int = 0
    images_per_sequence: int = 1
    offloaded: bool = False


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bytes of a workload.

    Attributes:
        anywhere: peak at any time.
        at_operator: peak at the end of a call of the head's operator, without the memory that the operator itself takes
            inside, which the simulation does not see; 0 if the model has no such operator.
    """

    anywhere: int
    at_operator: int


def simulate(workload: Workload) -> Peaks:
    """Peak memory of the workload, weights included. The engine's own code builds, shards and runs the model.

    One pass tells of all numbers of tokens, unless a result grows more than its rows do, as a mask of rows by rows. A
    padded model runs one sequence of all tokens, which needs more than several shorter ones.

    Raises:
        ValueError: the folder, the shard size or `sequence_parallel` cannot be used, or the process has joined a group.
        MemoryPlanError: the model has an operator that does not run on tensors without data.
    """
    ranks, few_passes = workload.config.sequence_parallel, min(workload.num_micro_batches, 2)
    work = replace(workload, config=_config_of_pass(workload), num_micro_batches=few_passes)
    if build(workload).padded_because:
        return _peaks(_padded_pass(work))
    try:
        many = _pass(replace(work, num_tokens=ranks * MANY_ROWS))
    except MemoryPlanError:
        return _peaks(_pass(work))
    num_rows = -(-work.num_tokens // ranks)
    return _peaks(_Pass(many.repeats, [trace.at(num_rows) for trace in many.traces]))


def _config_of_pass(workload: Workload) -> EngineConfig:
    """Without what the pass does not read: passes that differ in nothing else are simulated once."""
    unread = {"max_tokens": 1, "offload_between_phases": False, "float8": None}
    config = workload.config.model_copy(update=unread)
    if workload.trains:
        return config
    return config.model_copy(update={"activation_checkpointing": "none", "reduce_every_micro_batch": False})


@dataclass(frozen=True, slots=True)
class _Pass:
    """The traces of a pass: of two models with a few blocks, `repeats.counts`, or of the whole model."""

    repeats: Repeats | None
    traces: list[Trace]


def _peaks(run: _Pass) -> Peaks:
    """The highest peak of all moments. A moment's peak is extrapolated from two models with a few blocks."""
    return Peaks(*(_highest(run, at_operator) for at_operator in (False, True)))


def _highest(run: _Pass, at_operator: bool) -> int:
    few, *more = (trace.peaks(at_operator=at_operator) for trace in run.traces)
    if run.repeats is None:
        return max(few.values(), default=0)
    return max((run.repeats.infer(few[moment], more[0][moment]) for moment in few), default=0)


def _pass(workload: Workload) -> _Pass:
    return _simulate(workload, model_config(workload.path))


def _padded_pass(workload: Workload) -> _Pass:
    """A pass over a sequence that may be long: its layers may loop over tokens, so only short sequences run.

    Bytes grow with the length and with its square, which three lengths tell.
    """
    if workload.num_tokens <= _SHORT[-1]:
        return _pass(workload)
    runs = [_pass(replace(workload, num_tokens=length)) for length in _SHORT]
    grouped = zip(*(run.traces for run in runs), strict=True)
    return _Pass(runs[0].repeats, [_extrapolated(traces, workload.num_tokens) for traces in grouped])


def _extrapolated(traces: tuple[Trace, ...], length: int) -> Trace:
    notes = []
    for at_operator in (False, True):
        peaks = [trace.peaks(at_operator=at_operator) for trace in traces]
        for moment in peaks[0]:
            parabola = np.polynomial.Polynomial.fit(_SHORT, [peak[moment] for peak in peaks], 2)
            notes.append(Note(moment, at_operator, round(parabola(length))))
    return Trace(tuple(notes))


@lru_cache(maxsize=64)
def _simulate(workload: Workload, _model_config: str) -> _Pass:
    with pretended_world(workload.world_size) as world:
        try:
            model = build(workload)
            repeats = find_repeats(model)
            counts = [0] if repeats is None else repeats.counts
            return _Pass(repeats, [run_blocks(workload, model, world, repeats, count) for count in counts])
        except RuntimeError as error:
            raise MemoryPlanError(
                f"the model in {workload.path} cannot be planned, since it does not run without data: {error}"
            ) from error


@contextlib.contextmanager
def pretended_world(world_size: int) -> Iterator[World]:
    """Inside, this process is rank 0 of a world on CPUs, whose collectives do nothing.

    Raises:
        ValueError: the process has joined a process group already.
    """
    if dist.is_initialized():
        raise ValueError("this process has joined a process group, so it cannot pretend another: plan before joining")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield World(size=world_size, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def run_blocks(
    workload: Workload, model: RLModel, world: World, repeats: Repeats | None = None, num_repeats: int = 0
) -> Trace:
    """Runs the workload with some or all of the model's equal blocks.

    Args:
        workload: the work to run.
        model: from `build`. A copy of it is sharded and run.
        world: from `pretended_world`.
        repeats: the model's equal blocks; None: run all blocks.
        num_repeats: number of repeats to run.
    """
    config = workload.config
    group = world.sequence_group(config.sequence_parallel)
    model = deepcopy(model) if repeats is None else repeats.shortened(model, num_repeats)
    mode, blocks = config.activation_checkpointing, decoder_blocks(model, config.wrap)
    if workload.trains and mode in ("selective", "full", "offload"):
        checkpoint_activations(blocks, mode)
    if workload.trains and mode == "offload":
        offload_inputs(blocks, torch.device("meta"))  # whose bytes the tracker does not count
    shard(model, config, world)
    operator = "linear_logprob_loss" if workload.trains else "linear_logprob"
    with MemoryTracker(f"rlft_fast::{operator}") as tracker:
        materialize(model, world.device)
        _stand_in(model)
        if repeats is not None:
            _mark_blocks(tracker, repeats, model)
        if not workload.trains:
            tracker.begin_pass(workload.offloaded)
            with torch.no_grad():
                _run(model, tracker, workload, group, 0)
            return Trace(tuple(tracker.notes))
        ungrouped = config.optimizer.model_copy(update={"groups": {}})  # a shortened model lacks names
        optimizer = build_optimizer(named_parameters(model), ungrouped, end_parameters(model))
        optimizer.initialize_state()
        if config.optimizer.cpu_offload:
            for state in optimizer.state.values():
                for key in state.keys() - {"step", "master"}:
                    del state[key]
        tracker.begin_pass(workload.offloaded)
        if workload.offloaded:
            tracker.elsewhere = partial(_gradient_bytes, list(model.parameters()))
        for i in reversed(range(min(workload.num_micro_batches, 2))):
            reduce_gradients(model, i == 0, config.reduce_every_micro_batch is True)
            _run(model, tracker, workload, group, i)
    return Trace(tuple(tracker.notes))


def build(workload: Workload) -> RLModel:
    """The workload's model, unsharded and without memory, as from `build_plain`."""
    return build_plain(workload.path, workload.config, workload.head, workload.trains)


def build_plain(path: str, config: EngineConfig, head: HeadKind, trains: bool) -> RLModel:
    """A model without memory and without checkpointing, to measure. Callers share it, so they never change it.

    Raises:
        ValueError: as `build_model` does.
    """
    kept = {name: getattr(config, name) for name in ("param_dtype", "workspace_mib", "wrap", "lora", "freeze")}
    plain = EngineConfig(compute_dtype="bfloat16", compile=False, **kept)
    model = _build_plain(path, plain, head, trains, model_config(path))
    require_divisible_heads(model.backbone, config.sequence_parallel, model.padded_because)
    return model


@lru_cache(maxsize=16)
def _build_plain(path: str, config: EngineConfig, head: HeadKind, trains: bool, _model_config: str) -> RLModel:
    return build_model(path, config, head, trains=trains)


def model_config(path: str) -> str:
    """The text of config.json, which tells one model from another; empty if there is none."""
    file = Path(path) / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _gradient_bytes(parameters: list[nn.Parameter]) -> int:
    """Bytes of the reduced gradients."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(getattr(gradient, "_local_tensor", gradient).nbytes for gradient in gradients)


# ---- the pass -------------------------------------------------------------------------------------------------------


def _run(
    model: RLModel, tracker: MemoryTracker, workload: Workload, group: dist.ProcessGroup | None, micro_batch: int
) -> None:
    """Forward, and backward if the model trains, of a micro-batch in which every token has an output."""
    tracker.mark((micro_batch, "embedding"))
    inputs = _inputs(model, workload, group)
    num_rows = len(inputs.input_ids_U)
    options: dict[str, Any] = {"return_entropy": True} if isinstance(model, PolicyModel) else {}
    loss = PolicyLoss() if isinstance(model, PolicyModel) else ValueLoss()
    fields = {name: torch.zeros(num_rows) for name in loss.fields} if workload.trains else {}
    if not workload.trains:
        model(inputs, **options)
    elif isinstance(model, PolicyModel):
        loss_fn = positional(loss.per_token, ("logprob_T", "entropy_T", *fields), 1.0)
        total, *_ = model(inputs, **options, loss_fn=loss_fn, per_token=(*fields.values(),))
        total.backward()
    else:
        loss.per_token({"new_value_T": model(inputs)} | fields).sum().backward()
    tracker.mark((micro_batch, "end"))


def _inputs(model: RLModel, workload: Workload, group: dist.ProcessGroup | None) -> ModelInputs:
    num_rows = -(-workload.num_tokens // workload.config.sequence_parallel)
    is_padded = bool(model.padded_because)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    boundaries = torch.zeros(2, dtype=torch.int32)
    position_ids, images, look_ahead = ids, None, None
    if has_vision(model.backbone) and not is_padded:
        position_ids = ids.expand(3, -1) if has_three_positions(model.backbone) else ids
        images = _images(model.backbone, num_rows, workload.num_patches)
        look_ahead = _look_ahead(model.backbone, num_rows, workload)
    return ModelInputs(
        input_ids_U=ids, position_ids_U=position_ids, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries,
        max_seqlen_q=workload.num_tokens, max_seqlen_k=workload.num_tokens, key_index=None, active_index_A=ids,
        target_A=ids, output_index_A=ids, images=images, look_ahead=look_ahead, sequence_group=group,
        padded_length=num_rows if is_padded else None,
    )  # fmt: skip


def _images(backbone: Any, num_rows: int, num_patches: int) -> ImageInputs:
    blank = blank_image(backbone)
    repeats = max(-(-num_patches // len(blank["pixel_values"])), 1)
    tower = {name: torch.cat([x] * repeats) for name, x in blank.items()}
    return ImageInputs(tower=tower, source_index_U=torch.zeros(num_rows, dtype=torch.int64))


def _look_ahead(backbone: Any, num_rows: int, workload: Workload) -> LookAhead | None:
    """Images that are spread evenly over sequences, each of which has as many."""
    num_images = sees_ahead(backbone) and workload.num_patches
    if not num_images:
        return None
    num_all, size = num_rows * workload.config.sequence_parallel, backbone.config.mm_tokens_per_image
    places = torch.zeros((workload.images_per_sequence + 1) * num_all // 2, dtype=torch.int64)
    index = RowIndex(places, torch.zeros_like(places), torch.zeros(num_all + 1, dtype=torch.int32))
    boundaries = torch.zeros(num_images + 1, dtype=torch.int32)
    return LookAhead(torch.zeros(num_images * size, dtype=torch.int64), index, boundaries, boundaries, size, num_all)


def _mark_blocks(tracker: MemoryTracker, repeats: Repeats, model: RLModel) -> None:
    """Has blocks mark moments, with names that are the same in models with different numbers of blocks."""
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


# ---- stand-ins for operators that read boundaries from tensors ------------------------------------------------------


def _stand_in(model: RLModel) -> None:
    """Replaces packed attention by functions that need as much memory but read no tensor."""
    if model.padded_because:
        return
    backbone: Any = model.backbone
    if not has_vision(backbone):
        model.pretrained.set_attn_implementation(WHOLE_SEQUENCE)
        return
    names = {"": WHOLE_SEQUENCE, "text_config": WHOLE_SEQUENCE, "vision_config": "sdpa"}
    model.pretrained.set_attn_implementation(names)
    if has_three_positions(backbone):
        backbone.visual.config._attn_implementation_internal = WHOLE_IMAGE
        backbone.get_image_features = partial(_qwen_features, backbone.visual)
    elif backbone.config.model_type in _IMAGE_FEATURES:
        backbone.get_image_features = partial(_IMAGE_FEATURES[backbone.config.model_type], backbone)


def _qwen_features(tower: Any, pixel_values: Tensor, **_grids: Tensor) -> SimpleNamespace:
    """Runs the vision tower on one image of all patches, and passes the values that it would read from the grids."""
    num_patches, merge = pixel_values.shape[0], tower.spatial_merge_size
    boundaries = torch.zeros(2, dtype=torch.int32)
    outputs = tower(
        pixel_values.type(tower.dtype), grid_thw=None, max_seqlen=num_patches, cu_seqlens=boundaries,
        position_ids=torch.zeros(num_patches, 2, dtype=torch.int64), max_window_seqlen=num_patches,
        window_index=torch.zeros(num_patches // merge**2, dtype=torch.int64), cu_window_seqlens=boundaries,
        interp_indices=torch.zeros(num_patches, 4, dtype=torch.int64), interp_weights=torch.zeros(num_patches, 4),
    )  # fmt: skip
    return SimpleNamespace(pooler_output=(outputs.pooler_output,))


def _idefics_features(backbone: Any, pixel_values: Tensor) -> SimpleNamespace:
    """Runs the vision tower on pictures of one size, without the search for pictures that are padding."""
    tower = backbone.vision_model
    pictures = torch.cat([pixel_values.type(tower.dtype).flatten(0, 1)])
    patches = tower.embeddings.patch_embedding(pictures).flatten(2).transpose(1, 2)
    positions = torch.zeros(patches.shape[:2], dtype=torch.int64)
    hidden = patches + tower.embeddings.position_embedding(positions)
    hidden = tower.post_layernorm(tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state)
    return SimpleNamespace(pooler_output=backbone.connector(hidden))


def _mistral_features(backbone: Any, pixel_values: Tensor, image_sizes: Tensor) -> SimpleNamespace:
    """Runs the vision tower on pictures without padding. The mask between pictures is as large as transformers'."""
    tower, layers = backbone.vision_tower, backbone.config.vision_feature_layer
    patches = tower.patch_conv(pixel_values.type(tower.dtype)).flatten(2).transpose(1, 2)
    hidden = tower.ln_pre(patches.flatten(0, 1)[None])
    num_patches = hidden.shape[1]
    positions = torch.zeros(num_patches, 2, dtype=torch.int64)
    hidden = tower.transformer(
        hidden, attention_mask=hidden.new_zeros(1, 1, num_patches, num_patches), position_ids=positions,
        position_embeddings=tower.patch_positional_embedding(hidden, positions),
    ).last_hidden_state  # fmt: skip
    chosen = torch.cat([hidden] * (1 if isinstance(layers, int) else len(layers)), dim=-1)
    sizes = [pixel_values.shape[-2:]] * len(pixel_values)
    return SimpleNamespace(pooler_output=(backbone.multi_modal_projector(chosen[0], sizes),))


_IMAGE_FEATURES = {"idefics3": _idefics_features, "smolvlm": _idefics_features, "mistral3": _mistral_features}
"""By ``model_type``. The towers of other models, such as LLaVA's, read no tensor."""


def whole_sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, sequence_group: dist.ProcessGroup | None = None, s_aux: Tensor | None = None,
    look_ahead: LookAhead | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stands for packed attention and needs as much memory. It reads no boundaries, which a fake tensor lacks."""
    if sequence_group is not None:
        query, key, value = all_rows_of_own_heads(query, key, value, sequence_group)
        s_aux = None if s_aux is None else sinks_of_own_heads(s_aux, sequence_group)
    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernels of packed attention take values as wide as queries
        value = pad(value, (0, query.shape[-1] - width))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    if s_aux is not None:
        output = output * s_aux.to(output.dtype).view(1, -1, 1, 1)
    output = torch.cat([output[..., :width]], dim=2).transpose(1, 2)
    if look_ahead is not None:
        index, rows = look_ahead.key_index, look_ahead.row_N
        keys, values = (take_rows(x[0].transpose(0, 1), index).transpose(0, 1)[None] for x in (key, value))
        again = scaled_dot_product_attention(
            query.index_select(2, rows), keys, values, scale=scaling, enable_gqa=True
        )  # fmt: skip
        output = output.index_copy(1, rows, torch.cat([again], dim=2).transpose(1, 2))
    if sequence_group is not None:
        output = gather_heads_scatter_tokens(output[0], sequence_group).unsqueeze(0)
    return output, None


def whole_image_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stands for the attention of a vision tower within each image or window."""
    output = scaled_dot_product_attention(query, key, value, scale=scaling)
    return torch.cat([output.transpose(1, 2).contiguous()], dim=1), None


AttentionInterface.register(WHOLE_SEQUENCE, whole_sequence_attention)
AttentionInterface.register(WHOLE_IMAGE, whole_image_attention)
