"""From a batch to micro-batches, from these to model calls, and back: free functions around ``model(inputs)``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from rlft_fast.data import Batch, MicroBatchPlan, PackedLayout, join_outputs, pad_sequences, share_prefixes
from rlft_fast.models import (
    ModelInputs,
    check_images,
    has_vision,
    prepare_chunks,
    prepare_images,
    prepare_look_ahead,
    require_positions,
    rotary_positions,
)
from rlft_fast.ops import slice_tokens
from rlft_fast.ops.packing import RowIndex, row_index, segment_expand, segment_sum
from rlft_fast.world import World

_LEAST_STEP = 64  # rows of a tile of a GPU's GEMM
_ON_HOST = ("output_index_A", "row_T")  # places of outputs, which are filled on the host


def check_batch(batch: Batch, backbone: PreTrainedModel, *, padded: bool = False) -> None:
    """Refuses what the model cannot run, before any rank starts: all have the same batch and refuse it together.

    Args:
        batch: the whole batch.
        backbone: of the model.
        padded: whether the model runs padded.

    Raises:
        ValueError: images for a model without a vision tower, or other than the tokens say; a sequence too long for
            the model's positions.
    """
    require_positions(backbone, batch.max_seqlen)
    if has_vision(backbone) and not padded:
        check_images(backbone, batch)
    elif batch.images:
        raise ValueError(
            f"the batch has images, but {type(backbone).__name__} has no vision tower that is supported: "
            "leave the images out"
        )


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
    padded: bool = False,
    in_buckets: bool = False,
) -> ModelInputs:
    """Everything that the forward needs, made on the host, so that nothing later waits for the device.

    The ranks of a `sequence_group` get equally many rows each, in order. Rows are padded to that, and to one at least:
    a rank without a token of its own still runs every collective. Targets and outputs belong to whole sequences, so
    that the cut between two ranks is none between a token and its target.

    Args:
        micro_batch: on the CPU, checked, the same on every rank of the group.
        device: where the model is.
        backbone: of the model that is to be called; a vision-language one gives positions in three dimensions.
        sequence_group: the ranks that share the micro-batch.
        padded: whether the model runs padded; not with a `sequence_group`.
        in_buckets: whether sizes are rounded up, so that few differ (`bucket`), with rows that no token sees; not with
            a `sequence_group`, padded, or with images.
    """
    layout = pad_sequences(micro_batch) if padded else share_prefixes(micro_batch)
    num_rows = len(layout.token_index_U)
    # In buckets one row at least, so that keys beside the rows have one that sees them.
    num_padded = bucket(num_rows + 1) - num_rows if in_buckets else _num_padded(num_rows, sequence_group)
    boundaries_q, boundaries_k, key_index = _pad_segments(layout, num_padded, in_buckets=in_buckets)

    def own_rows(x_T: Tensor) -> Tensor:
        """(*, T) -> (*, U), the rows of this rank; padded rows hold 0."""
        rows = pad(x_T[..., layout.token_index_U], (0, num_padded))
        return slice_tokens(rows.movedim(-1, 0), sequence_group).movedim(0, -1)

    input_ids_U = own_rows(micro_batch.input_ids_T)
    row_T = _own_row(layout, len(input_ids_U), sequence_group)
    active_row = row_T[micro_batch.active_index_T]
    output_index_A = micro_batch.active_index_T[active_row >= 0]
    support_TK, experts_TK = micro_batch.support_TK, micro_batch.routed_experts_TK
    position_ids_T, images, look_ahead = micro_batch.position_ids_T, None, None
    if not padded:
        images = prepare_images(backbone, micro_batch, row_T, len(input_ids_U))
        look_ahead = prepare_look_ahead(backbone, micro_batch, layout.row_T, len(layout.token_index_U) + num_padded)
        position_ids_T = rotary_positions(backbone, micro_batch)
    most_q, most_k = (int(x.diff().max()) for x in (boundaries_q, boundaries_k))
    if in_buckets:
        most_q, most_k = power_of_two(most_q), power_of_two(most_k)
    inputs = ModelInputs(
        input_ids_U=input_ids_U,
        position_ids_U=own_rows(position_ids_T),
        cu_seqlens_q=boundaries_q,
        cu_seqlens_k=boundaries_k,
        max_seqlen_q=most_q,
        max_seqlen_k=most_k,
        key_index=key_index,
        chunks=None if padded else prepare_chunks(backbone, boundaries_q, boundaries_k, key_index),
        active_index_A=active_row[active_row >= 0],
        target_A=micro_batch.target_T[output_index_A],
        output_index_A=output_index_A,
        row_T=row_T,
        support_AK=None if support_TK is None else support_TK[output_index_A].long(),
        routed_experts_UK=None if experts_TK is None else own_rows(experts_TK.T).T.contiguous(),
        images=None if images is None else images.to(device, _move),
        look_ahead=look_ahead,
        sequence_group=sequence_group,
        padded_length=layout.padded_length,
    )
    return _move_fields(inputs, device)


def active_fields(
    micro_batch: Batch, inputs: ModelInputs, names: tuple[str, ...], device: torch.device
) -> dict[str, Tensor]:
    """The named fields, on the device: per-token ones at the positions of the outputs, (A,), per-sequence ones whole.

    "sequence_T" is the number of each output's sequence in the micro-batch.

    Raises:
        ValueError: a field that the loss reads is missing from the batch.
    """
    found: dict[str, Tensor] = {}
    for name in names:
        if name == "sequence_T":
            starts = micro_batch.cu_seqlens.long()
            found[name] = torch.searchsorted(starts, inputs.output_index_A, right=True) - 1
        elif (values := getattr(micro_batch, name)) is None:
            raise ValueError(f"the loss reads {name}, which this batch does not have: compute it before train_step")
        else:
            found[name] = values if name.endswith("_B") else values[inputs.output_index_A]
    return {name: _move(values, device) for name, values in found.items()}


def positional(
    per_token: Callable[[Mapping[str, Tensor]], Tensor], names: Sequence[str], factor: float
) -> Callable[..., Tensor]:
    """A loss of named tensors as the ops call it: with its tensors in the order of these names, times a factor."""

    def loss_fn(*tensors: Tensor | None) -> Tensor:
        losses = per_token({name: x for name, x in zip(names, tensors, strict=True) if x is not None})
        return losses if factor == 1 else factor * losses

    return loss_fn


def prepare_model_outputs(values_A: Tensor, micro_batch: Batch, output_index_A: Tensor) -> Tensor:
    """Outputs back at their places: (T,) or (T, K) on the CPU, 0 elsewhere, also where another rank has the row.

    Waits for the device.

    Args:
        values_A: (A,), or (A, K).
        micro_batch: that they are of.
        output_index_A: (A,) their positions in it.
    """
    values_T = torch.zeros(micro_batch.num_tokens, *values_A.shape[1:], dtype=values_A.dtype)
    values_T[output_index_A] = values_A.cpu()
    return values_T


def prepare_experts(experts_UK: Tensor, row_T: Tensor) -> Tensor:
    """(T, bytes) uint8 on the CPU, what each token's row has; 0 where another rank has the row, or none.

    Bytes, because a gather of int16 is not known to every backend. Waits for the device.

    Args:
        experts_UK: (U, K) integers of the rows.
        row_T: (T,) the row of each token, -1 where there is none.
    """
    experts_TK = experts_UK.cpu()[row_T.clamp(min=0)] * (row_T >= 0)[:, None].to(experts_UK.dtype)
    return experts_TK.contiguous().view(torch.uint8)


def gather_outputs(
    own_T: Tensor, batch: Batch, plan: MicroBatchPlan, world: World, sequence_group: ProcessGroup | None
) -> Tensor:
    """The ranks' outputs together, on the CPU, in the order of the batch instead of the plan's.

    Args:
        own_T: of this rank, the same on all ranks of its sequence group, see `sum_over_rows`.
        batch: the whole batch.
        plan: of this batch.
        world: the ranks.
        sequence_group: the ranks that share this rank's micro-batches.
    """
    share = 1 if sequence_group is None else sequence_group.size()
    sizes = [int(batch.lengths[plan.rank_indices(rank)].sum()) for rank in range(plan.world_size)]
    parts = world.all_gather_ragged(own_T, [size for size in sizes for _ in range(share)])
    return join_outputs([part.cpu() for part in parts[::share]], batch, plan)


def sum_over_rows(own_T: Tensor, sequence_group: ProcessGroup | None) -> Tensor:
    """Outputs of all rows of a sequence group on each of its ranks: each has its own rows' results, and zeros."""
    if sequence_group is not None:
        all_reduce(own_T, group=sequence_group)
    return own_T


def sequence_mean(micro_batch: Batch, inputs: ModelInputs, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from (A,) values at the outputs to the detached mean over each one's sequence, (A,) again.

    The means are over whole sequences, also where the ranks of a sequence group have parts of them.
    """
    boundaries = torch.searchsorted(inputs.output_index_A, micro_batch.cu_seqlens.long()).int()  # outputs are in order
    length_B = segment_sum(micro_batch.active_T, micro_batch.cu_seqlens)
    boundaries, length_B = _move(boundaries, device), _move(length_B, device)

    def mean(values_A: Tensor) -> Tensor:
        sum_B = segment_sum(values_A.detach(), boundaries)
        if inputs.sequence_group is not None:
            all_reduce(sum_B, group=inputs.sequence_group)
        return segment_expand(sum_B / length_B, boundaries, num_tokens=len(values_A))

    return mean


def _num_padded(num_rows: int, group: ProcessGroup | None) -> int:
    """Rows to add, so that each rank of the group has equally many, and at least one."""
    size = 1 if group is None else group.size()
    return size * max(1, -(-num_rows // size)) - num_rows


def _own_row(layout: PackedLayout, num_rows: int, group: ProcessGroup | None) -> Tensor:
    """(T,) int64, which of this rank's rows computes each token; -1 where another rank does, or none."""
    row_T = layout.row_T - (0 if group is None else group.rank() * num_rows)
    return row_T.where((row_T >= 0) & (row_T < num_rows), -1)


def _pad_segments(layout: PackedLayout, num_padded: int, *, in_buckets: bool) -> tuple[Tensor, Tensor, RowIndex | None]:
    """Boundaries of segments and keys, and the keys, with the padded rows as a segment of their own.

    In buckets, the first padded row is several keys of this segment, and empty segments follow.
    """
    boundaries_q, boundaries_k, num_rows = layout.cu_seqlens_q, layout.cu_seqlens_k, len(layout.token_index_U)
    index_M, num_keys = layout.key_index_M, num_padded
    if in_buckets and index_M is not None:
        num_keys = bucket(len(index_M) + num_padded) - len(index_M)
    if num_padded > 0:
        boundaries_q = torch.cat([boundaries_q, boundaries_q[-1:] + num_padded])
        boundaries_k = torch.cat([boundaries_k, boundaries_k[-1:] + num_keys])
    if in_buckets:
        num_empty = power_of_two(len(boundaries_q) - 1) - (len(boundaries_q) - 1)
        boundaries_q, boundaries_k = (torch.cat([x, x[-1:].expand(num_empty)]) for x in (boundaries_q, boundaries_k))
    if index_M is None:
        return boundaries_q, boundaries_k, None
    padded_M = num_rows + (torch.arange(num_keys) - (num_keys - num_padded)).clamp(min=0)
    return boundaries_q, boundaries_k, row_index(torch.cat([index_M, padded_M]), num_rows + num_padded)


def bucket(size: int) -> int:
    """The size rounded up to a multiple of 64, and of 1/32 of the largest power of two that is no larger.

    Sizes from 2048 on grow by less than 1/32, and the sizes between two powers of two fall into 32 buckets.
    """
    step = max(_LEAST_STEP, 1 << max(size.bit_length() - 6, 0))
    return -(-size // step) * step


def power_of_two(size: int) -> int:
    """The size, at least 1, rounded up to a power of two."""
    return 1 << (size - 1).bit_length()


def _move_fields(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """The same with its tensors on the device, but for the places of the outputs."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name not in _ON_HOST}
    return replace(inputs, **tree_map_only(Tensor, lambda x: _move(x, device), values))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait for it: a copy from memory that is not pinned would begin behind all its work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
