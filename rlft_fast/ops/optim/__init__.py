"""The gradient's norm, clipping, and AdamW."""

from rlft_fast.ops.optim.adamw import FusedAdamW
from rlft_fast.ops.optim.grad_clip import ClipCoefficient, clip_coefficient, clip_grad_norm_, grad_norm

__all__ = ["ClipCoefficient", "FusedAdamW", "clip_coefficient", "clip_grad_norm_", "grad_norm"]
