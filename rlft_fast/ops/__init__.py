"""Kernels for reinforcement fine-tuning, usable from any trainer: they need torch and nothing else."""

from rlft_fast.ops.adamw import FusedAdamW
from rlft_fast.ops.grad_clip import ClipCoefficient, clip_coefficient, clip_grad_norm_, grad_norm
from rlft_fast.ops.linear_logprob import linear_logprob, linear_logprob_loss
from rlft_fast.ops.packing import next_token_targets, pad, position_ids, segment_mean, segment_sum, unpad
from rlft_fast.ops.reference import LinearLogprob, LinearLogprobLoss

__all__ = [
    "ClipCoefficient",
    "FusedAdamW",
    "LinearLogprob",
    "LinearLogprobLoss",
    "clip_coefficient",
    "clip_grad_norm_",
    "grad_norm",
    "linear_logprob",
    "linear_logprob_loss",
    "next_token_targets",
    "pad",
    "position_ids",
    "segment_mean",
    "segment_sum",
    "unpad",
]
