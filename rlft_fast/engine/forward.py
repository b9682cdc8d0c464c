"""From a micro-batch to a model call and back: free functions around ``model(inputs)``."""

import torch
from torch import Tensor

from rlft_fast.data import Batch
from rlft_fast.models import ModelInputs


def prepare_model_inputs(micro_batch: Batch, device: torch.device) -> ModelInputs:
    """Everything that the packed forward needs, made on the host, so that nothing later waits for the device.

    An empty micro-batch becomes one token without an active position: its rank still runs every collective.
    """
    if micro_batch.num_sequences == 0:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        boundaries = torch.tensor([0, 1], dtype=torch.int32, device=device)
        return ModelInputs(
            input_ids=zero, position_ids=zero, cu_seqlens=boundaries, max_seqlen=1, active_index=none, target=none
        )
    active_index = micro_batch.active_index_T
    target = micro_batch.target_T[active_index]
    on_device = micro_batch.to(device)
    return ModelInputs(
        input_ids=on_device.input_ids_T.unsqueeze(0),
        position_ids=on_device.position_ids_T.unsqueeze(0),
        cu_seqlens=on_device.cu_seqlens,
        max_seqlen=micro_batch.max_seqlen,
        active_index=active_index.to(device, non_blocking=True),
        target=target.to(device, non_blocking=True),
    )


def active_fields(micro_batch: Batch, names: tuple[str, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The named per-token fields at the active positions, (A,) each, on the device.

    Raises:
        ValueError: a field that the loss reads is missing from the batch.
    """
    index = micro_batch.active_index_T
    for name in names:
        if getattr(micro_batch, name) is None:
            raise ValueError(f"the loss reads {name}, which this batch does not have: compute it before train_step")
    return tuple(getattr(micro_batch, name)[index].to(device, non_blocking=True) for name in names)


def prepare_model_outputs(values_A: Tensor, micro_batch: Batch) -> Tensor:
    """Outputs of the active positions back at their places: (T,) float32 on the CPU, 0 elsewhere."""
    values_T = torch.zeros(micro_batch.num_tokens, dtype=torch.float32)
    values_T[micro_batch.active_index_T] = values_A.float().cpu()
    return values_T
