"""Token weights that turn a per-token loss into a plain sum over the whole batch."""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_expand, segment_sum

Aggregation = Literal["token-mean", "sequence-mean"]


def response_lengths(loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Counts the response tokens of each sequence.

    Args:
        loss_mask_T: (T,) bool, True where the next token was sampled by the policy.
        cu_seqlens: (B + 1,) int32 sequence boundaries.

    Returns:
        (B,) int64.

    Raises:
        TypeError: `loss_mask_T` is not bool.
    """
    if loss_mask_T.dtype != torch.bool:
        raise TypeError(f"loss_mask_T has dtype {loss_mask_T.dtype}, expected torch.bool: convert it with .bool()")
    return segment_sum(loss_mask_T, cu_seqlens).long()


def loss_weights(loss_mask_T: Tensor, cu_seqlens: Tensor, mode: Aggregation) -> Tensor:
    """Weights w_t such that the loss of the batch is the plain sum Σ_t w_t·l_t.

    - "token-mean": w_t = 1/N over all N response tokens (DAPO, arXiv 2503.14476).
    - "sequence-mean": w_t = 1/(S·n_b), the mean over the S sequences that have response tokens of each sequence's
      token mean (GRPO, arXiv 2402.03300).

    The denominators are those of the whole batch, so the gradient does not depend on how the sequences are later
    split into micro-batches, ordered, or spread over ranks.

    Args:
        loss_mask_T: (T,) bool, True at response tokens. The whole batch, not a micro-batch.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        mode: "token-mean" or "sequence-mean".

    Returns:
        (T,) fp32, zero outside the mask, summing to 1; all zeros when no token is a response token.

    Raises:
        ValueError: Unknown mode.
        TypeError: `loss_mask_T` is not bool.
    """
    check_aggregation(mode)
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    if mode == "token-mean":
        return loss_mask_T.float() / length_B.sum().clamp(min=1)
    num_sequences = (length_B > 0).sum()
    weight_B = 1.0 / (length_B * num_sequences).clamp(min=1)
    return segment_expand(weight_B, cu_seqlens, num_tokens=loss_mask_T.shape[0]) * loss_mask_T


def check_aggregation(mode: str) -> None:
    """Raises ValueError when `mode` is not an aggregation mode."""
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation is {mode!r}, expected one of {', '.join(get_args(Aggregation))}")
