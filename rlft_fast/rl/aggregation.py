"""Token weights that turn a per-token loss into a plain sum over the whole batch."""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_expand, segment_sum

Aggregation = Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant", "token-sum"]


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
    """Weights w_t such that the loss of the batch is Σ_t w_t·l_t, times `loss_scale`.

    - "sequence-mean": w_t = 1/(B'·n_b). Each sequence b has n_b response tokens; the loss is the mean of their losses,
      and then the mean over the B' sequences with response tokens (GRPO, arXiv 2402.03300).
    - all others: w_t = 1/N over all N response tokens (DAPO, arXiv 2503.14476).

    The denominators belong to the whole batch, so the gradient does not depend on how the sequences are later
    split into micro-batches, ordered, or spread over ranks. Weights sum to 1 in every mode, so that sums of weighted
    metrics are means.

    Args:
        loss_mask_T: (T,) bool, True at response tokens. The whole batch, not a micro-batch.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        mode: one of `Aggregation`.

    Returns:
        (T,) fp32, zero outside the mask, summing to 1; all zeros when no token is a response token.

    Raises:
        ValueError: Unknown mode.
        TypeError: `loss_mask_T` is not bool.
    """
    check_aggregation(mode)
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    if mode != "sequence-mean":
        return loss_mask_T.float().div_(length_B.sum().clamp(min=1))
    num_sequences = (length_B > 0).sum()
    weight_B = 1.0 / (length_B * num_sequences).clamp(min=1)
    return segment_expand(weight_B, cu_seqlens, num_tokens=loss_mask_T.shape[0]).mul_(loss_mask_T)


def loss_scale(loss_mask_T: Tensor, cu_seqlens: Tensor, mode: Aggregation, max_response_tokens: int | None) -> float:
    """The factor on the weighted sum of a batch with N response tokens in B' sequences that have some.

    - "token-mean" and "sequence-mean": 1.
    - "sequence-mean-token-sum": N/B', the mean over sequences of their token sums.
    - "constant": N/(B'·max_response_tokens), the same over a constant length (Dr. GRPO, arXiv 2503.20783).
    - "token-sum": N, the plain sum.

    Args:
        loss_mask_T: (T,) bool, True at response tokens. The whole batch, not a micro-batch.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        mode: one of `Aggregation`.
        max_response_tokens: the constant of "constant".

    Raises:
        ValueError: Unknown mode, or its constant is missing.
        TypeError: `loss_mask_T` is not bool.
    """
    check_aggregation(mode, max_response_tokens)
    length_B = response_lengths(loss_mask_T, cu_seqlens)
    num_tokens, num_sequences = int(length_B.sum()), max(int((length_B > 0).sum()), 1)
    if mode == "token-sum":
        return float(num_tokens)
    if mode == "sequence-mean-token-sum":
        return num_tokens / num_sequences
    if mode == "constant":
        assert max_response_tokens is not None
        return num_tokens / (num_sequences * max_response_tokens)
    return 1.0


def check_aggregation(mode: str, max_response_tokens: int | None = 1) -> None:
    """Raises ValueError when `mode` is not an aggregation mode, or its constant is missing."""
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation is {mode!r}, expected one of {', '.join(get_args(Aggregation))}")
    if mode == "constant" and (max_response_tokens is None or max_response_tokens < 1):
        raise ValueError(
            f"aggregation 'constant' divides by max_response_tokens, which is {max_response_tokens}: give the most "
            "tokens of a response"
        )
