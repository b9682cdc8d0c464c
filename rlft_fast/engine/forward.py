"""From a batch to micro-batches, from these to model calls, and back: free functions around ``model(inputs)``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rlft_fast.data import Batch, MicroBatchPlan, PackedLayout, share_prompts
from rlft_fast.models import (
    ImageInputs,
    ModelInputs,
    check_images,
    has_vision,
    image_positions,
    pixels_and_grids,
    require_fixed_rope,
    rope_positions,
)
from rlft_fast.ops.packing import segment_expand, segment_sum
from rlft_fast.world import all_gather_ragged


def check_batch(batch: Batch, backbone: PreTrainedModel) -> None:
    """Refuses what the model cannot run, before any rank starts: all have the same batch and refuse it together.

    Raises:
        ValueError: images for a model without a vision tower, or other than the tokens say; a sequence too long for
            the model's kind of rotary embedding.
    """
    require_fixed_rope(backbone, batch.max_seqlen)
    if has_vision(backbone):
        check_images(backbone, batch)
    elif batch.multi_modal_inputs is not None:
        raise ValueError(f"the batch has multi_modal_inputs, but {type(backbone).__name__} has no vision tower")


def prepare_micro_batches(batch: Batch, plan: MicroBatchPlan, rank: int) -> list[Batch]:
    """The rank's micro-batches, as many as every other rank has; some may be empty. Each has a ``meta`` of its own.

    Args:
        batch: on the CPU.
        plan: of this batch, see `plan_batch`.
        rank: in the plan's world.
    """
    return [batch.select(indices) for indices in plan.micro_batches(rank)]


def prepare_model_inputs(
    micro_batch: Batch,
    device: torch.device,
    *,
    backbone: PreTrainedModel,
    sequence_group: ProcessGroup | None = None,
) -> ModelInputs:
    """Everything that the packed forward needs, made on the host, so that nothing later waits for the device.

    The ranks of a `sequence_group` get equally many rows each, in order. Rows are padded to that, and to one at least:
    a rank without a token of its own still runs every collective. Targets and outputs belong to whole sequences, so
    that the cut between two ranks is none between a token and its target.

    Args:
        micro_batch: on the CPU, checked, the same on every rank of the group.
        device: where the model is.
        backbone: of the model that is to be called; a vision-language one gives positions in three dimensions.
        sequence_group: the ranks that share the micro-batch.
    """
    layout = share_prompts(micro_batch)
    rows = _Rows(len(layout.token_index_U), sequence_group)
    boundaries_q, boundaries_k, key_index = _pad_segments(layout, rows.num_padded)
    here, active_index = rows.find(layout.row_T[micro_batch.active_index_T])
    output_index = micro_batch.active_index_T[here]
    position_ids, images, support_TK = micro_batch.position_ids_T, None, micro_batch.support_TK
    if has_vision(backbone):
        position_ids, images = _prepare_images(micro_batch, backbone, layout, rows, device)
    return ModelInputs(
        input_ids=_move(rows.own(micro_batch.input_ids_T[layout.token_index_U]), device).unsqueeze(0),
        position_ids=_move(rows.own(position_ids[..., layout.token_index_U]), device).unsqueeze(-2),
        cu_seqlens_q=_move(boundaries_q, device),
        cu_seqlens_k=_move(boundaries_k, device),
        max_seqlen_q=int(boundaries_q.diff().max()),
        max_seqlen_k=int(boundaries_k.diff().max()),
        key_index=None if key_index is None else _move(key_index, device),
        active_index=_move(active_index, device),
        target=_move(micro_batch.target_T[output_index], device),
        output_index=output_index,
        support=None if support_TK is None else _move(support_TK[output_index], device).long(),
        images=images,
        sequence_group=sequence_group,
    )


def active_fields(
    micro_batch: Batch, inputs: ModelInputs, names: tuple[str, ...], device: torch.device
) -> dict[str, Tensor]:
    """The named per-token fields at the positions of the outputs, (A,) each, on the device.

    Raises:
        ValueError: a field that the loss reads is missing from the batch.
    """
    for name in names:
        if getattr(micro_batch, name) is None:
            raise ValueError(f"the loss reads {name}, which this batch does not have: compute it before train_step")
    return {name: _move(getattr(micro_batch, name)[inputs.output_index], device) for name in names}


def positional(per_token: Callable[[Mapping[str, Tensor]], Tensor], names: Sequence[str]) -> Callable[..., Tensor]:
    """A loss of named tensors as the ops call it: with its tensors in the order of these names."""

    def loss_fn(*tensors: Tensor | None) -> Tensor:
        return per_token({name: x for name, x in zip(names, tensors, strict=True) if x is not None})

    return loss_fn


def prepare_model_outputs(values_A: Tensor, micro_batch: Batch, output_index: Tensor) -> Tensor:
    """Outputs back at their places: (T,) float32 on the CPU, 0 elsewhere, also where another rank has the row.

    Waits for the device.

    Args:
        values_A: (A,) float32.
        micro_batch: that they are of.
        output_index: (A,) their positions in it.
    """
    values_T = torch.zeros(micro_batch.num_tokens, dtype=torch.float32)
    values_T[output_index] = values_A.cpu()
    return values_T


def gather_outputs(own_T: Tensor, batch: Batch, plan: MicroBatchPlan, sequence_group: ProcessGroup | None) -> Tensor:
    """The ranks' outputs together, on the CPU, in the order of the batch instead of the plan's."""
    share = 1
    if sequence_group is not None:
        share = sequence_group.size()
        all_reduce(own_T, group=sequence_group)  # each has its own rows' results, and zeros
    sizes = [int(batch.lengths[plan.rank_indices(rank)].sum()) for rank in range(plan.world_size)]
    parts = all_gather_ragged(own_T, [size for size in sizes for _ in range(share)])
    planned_T = torch.cat([part.cpu() for part in parts[::share]])
    restored_T = batch.select(plan.indices).replace(logprob_T=planned_T).select(plan.inverse).logprob_T
    assert restored_T is not None
    return restored_T


def sequence_mean(micro_batch: Batch, inputs: ModelInputs, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from (A,) values at the outputs to the detached mean over each one's sequence, (A,) again.

    The means are over whole sequences, also where the ranks of a sequence group have parts of them.
    """
    boundaries = torch.searchsorted(inputs.output_index, micro_batch.cu_seqlens.long()).int()  # outputs are in order
    length_B = segment_sum(micro_batch.loss_mask_T, micro_batch.cu_seqlens)
    boundaries, length_B = _move(boundaries, device), _move(length_B, device)

    def mean(values_A: Tensor) -> Tensor:
        sum_B = segment_sum(values_A.detach(), boundaries)
        if inputs.sequence_group is not None:
            all_reduce(sum_B, group=inputs.sequence_group)
        return segment_expand(sum_B / length_B, boundaries, num_tokens=len(values_A))

    return mean


class _Rows:
    """Which of U rows this rank runs: the same number on each of the group's ranks, at least one."""

    def __init__(self, num_rows: int, group: ProcessGroup | None) -> None:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        self.share = max(1, -(-num_rows // size))
        self.first = rank * self.share
        self.num_padded = size * self.share - num_rows

    def own(self, x_U: Tensor) -> Tensor:
        """(*, U) -> (*, share), 0 in rows that are padding."""
        return pad(x_U, (0, self.num_padded))[..., self.first : self.first + self.share]

    def find(self, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) bool, which of these rows are here, and they, counted from this rank's first."""
        here_N = (row_N >= self.first) & (row_N < self.first + self.share)
        return here_N, row_N[here_N] - self.first


def _pad_segments(layout: PackedLayout, num_padded: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Boundaries of segments and keys, and the keys, with the padded rows as a segment of their own."""
    boundaries_q, boundaries_k, key_index = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.key_index_K
    if num_padded == 0:
        return boundaries_q, boundaries_k, key_index
    if key_index is not None:
        key_index = torch.cat([key_index, len(layout.token_index_U) + torch.arange(num_padded)])
    longer_q, longer_k = (torch.cat([x, x[-1:] + num_padded]) for x in (boundaries_q, boundaries_k))
    return longer_q, longer_k, key_index


def _prepare_images(
    micro_batch: Batch, backbone: Any, layout: PackedLayout, rows: _Rows, device: torch.device
) -> tuple[Tensor, ImageInputs]:
    """(3, T) position ids, and the images; every rank of a group runs the tower and takes its own rows' features."""
    position_N, feature_N = image_positions(backbone, micro_batch)
    here_N, row_N = rows.find(layout.row_T[position_N])
    source_index = torch.arange(rows.share)
    source_index[row_N] = rows.share + feature_N[here_N]
    pixel_values, grids = pixels_and_grids(backbone, micro_batch)
    images = ImageInputs(
        pixel_values=_move(pixel_values, device), image_grid_thw=_move(grids, device),
        source_index=_move(source_index, device),
    )  # fmt: skip
    return rope_positions(backbone, micro_batch), images


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait for it: a copy from memory that is not pinned would begin behind all its work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
