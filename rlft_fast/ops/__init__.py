"""Kernels for reinforcement fine-tuning, usable from any trainer: they need torch and nothing else."""

from rlft_fast.ops.logprob import (
    LinearLogprob,
    LinearLogprobLoss,
    TopLogprob,
    linear_logprob,
    linear_logprob_loss,
    support_logprob,
    support_logprob_loss,
    top_logprob,
)
from rlft_fast.ops.optim import ClipCoefficient, FusedAdamW, clip_coefficient, clip_grad_norm_, grad_norm
from rlft_fast.ops.packing import (
    MaskedTokens,
    masked_tokens,
    next_token_targets,
    pad,
    position_ids,
    segment_mean,
    segment_sum,
    unpad,
)
from rlft_fast.ops.precision import has_fast_bfloat16
from rlft_fast.ops.ulysses import (
    gather_heads_scatter_tokens,
    gather_tokens,
    gather_tokens_scatter_heads,
    slice_tokens,
)

__all__ = [
    "ClipCoefficient",
    "FusedAdamW",
    "LinearLogprob",
    "LinearLogprobLoss",
    "MaskedTokens",
    "TopLogprob",
    "clip_coefficient",
    "clip_grad_norm_",
    "gather_heads_scatter_tokens",
    "gather_tokens",
    "gather_tokens_scatter_heads",
    "grad_norm",
    "has_fast_bfloat16",
    "linear_logprob",
    "linear_logprob_loss",
    "masked_tokens",
    "next_token_targets",
    "pad",
    "position_ids",
    "segment_mean",
    "segment_sum",
    "slice_tokens",
    "support_logprob",
    "support_logprob_loss",
    "top_logprob",
    "unpad",
]
