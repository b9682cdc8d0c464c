"""The gradient's norm, clipping, and AdamW."""

from rlft_fast.ops.optim.adamw import FusedAdamW
from rlft_fast.ops.optim.clip import ClipCoefficient, clip_coefficient, clip_grad_norm_
from rlft_fast.ops.optim.norm import grad_norm

__all__ = ["ClipCoefficient", "FusedAdamW", "clip_coefficient", "clip_grad_norm_", "grad_norm"]
