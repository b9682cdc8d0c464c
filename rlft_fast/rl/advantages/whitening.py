"""Shifting and scaling to mean 0 and standard deviation 1."""

import torch
from torch import Tensor

from rlft_fast.rl._checks import check_shapes


@torch.no_grad()
def whiten(values_T: Tensor, mask_T: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Shifts and scales the active values to mean 0 and sample standard deviation 1: (v - mean) / (std + eps).

    Args:
        values_T: (T,) values, for example advantages.
        mask_T: (T,) bool, the values that count.
        eps: Added to the standard deviation.

    Returns:
        (T,) in the dtype of `values_T`, zero outside the mask; all zeros where fewer than two values are active or
        all active values are equal, because there is no scale to speak of.

    Raises:
        ValueError: Shapes differ.
        TypeError: `mask_T` is not bool.
    """
    check_shapes(values_T, mask_T=mask_T)
    if mask_T.dtype != torch.bool:
        raise TypeError(f"mask_T has dtype {mask_T.dtype}, expected torch.bool: convert it with .bool()")
    white_T = torch.zeros_like(values_T)
    active = values_T[mask_T].double()
    if len(active) < 2:
        return white_T
    # Relative to the first value, equal values are exactly 0 and stay 0 (no rounding noise divided by eps).
    active -= active[0].clone()
    scale = active.std() + eps
    white_T[mask_T] = active.sub_(active.mean()).div_(scale).to(values_T.dtype)
    return white_T
