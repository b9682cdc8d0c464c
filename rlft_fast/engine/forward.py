"""From a micro-batch to a model call and back: free functions around ``model(inputs)``."""

import torch
from torch import Tensor

from rlft_fast.data import Batch, share_prompts
from rlft_fast.models import ModelInputs


def prepare_model_inputs(micro_batch: Batch, device: torch.device) -> ModelInputs:
    """Everything that the packed forward needs, made on the host, so that nothing later waits for the device.

    A micro-batch without an active position becomes one token: its rank still runs every collective.
    """
    active_index = micro_batch.active_index_T
    if len(active_index) == 0:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        boundaries = torch.tensor([0, 1], dtype=torch.int32, device=device)
        return ModelInputs(
            input_ids=zero, position_ids=zero, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=1,
            max_seqlen_k=1, key_index=None, active_index=none, target=none,
        )  # fmt: skip
    layout = share_prompts(micro_batch)

    def move(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return ModelInputs(
        input_ids=move(micro_batch.input_ids_T[layout.token_index_U]).unsqueeze(0),
        position_ids=move(micro_batch.position_ids_T[layout.token_index_U]).unsqueeze(0),
        cu_seqlens_q=move(layout.cu_seqlens_q),
        cu_seqlens_k=move(layout.cu_seqlens_k),
        max_seqlen_q=layout.max_seqlen_q,
        max_seqlen_k=layout.max_seqlen_k,
        key_index=None if layout.key_index_K is None else move(layout.key_index_K),
        active_index=move(layout.row_T[active_index]),
        target=move(micro_batch.target_T[active_index]),
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
