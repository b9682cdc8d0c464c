"""Gradient clipping: gradients scaled in place, or a factor that FusedAdamW applies while it steps.

coefficient = min(1, max_norm / (norm + 1e-6))                        Pascanu et al. 2013, arXiv:1211.5063
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.ops.optim.checks import is_number_in
from rlft_fast.ops.optim.memory_order import is_dense
from rlft_fast.ops.optim.norm import by_device_and_dtype, global_norm, gradients_of


class ClipCoefficient(NamedTuple):
    """What `FusedAdamW` needs to clip while it steps. Both are 0-d float32 on the norm's device."""

    coefficient: Tensor
    """Factor for every gradient, in (0, 1]; 1 where the norm is not finite."""
    found_inf: Tensor
    """1 where the norm is not finite (the step should be skipped), else 0."""


def clip_coefficient(norm: Tensor, max_norm: float | None) -> ClipCoefficient:
    """min(1, max_norm / (norm + 1e-6)) and a flag for a norm that is not finite, without a host sync.

    Args:
        norm: 0-d, from `grad_norm`. One that float32 cannot hold is not finite.
        max_norm: largest norm allowed. None, 0 and inf measure only: the coefficient is 1.

    Returns:
        `ClipCoefficient` of two 0-d float32 tensors on the norm's device.

    Raises:
        ValueError: norm is not a 0-d tensor, or max_norm is negative or nan.
    """
    if not isinstance(norm, Tensor) or norm.numel() != 1:
        got = f"has shape {tuple(norm.shape)}" if isinstance(norm, Tensor) else f"is {norm!r}"
        raise ValueError(f"norm {got}, expected a 0-d tensor: take it from grad_norm.")
    return _coefficient(norm.float(), _limit(max_norm))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients in place so that their global norm is at most `max_norm`.

    Drop-in for `torch.nn.utils.clip_grad_norm_` but for these differences. DTensors of different meshes may be mixed.
    Gradients stay as they are where the norm is not finite (there they would all become nan). max_norm = 0 measures
    without scaling (there it zeroes the gradients); a negative one is an error (there it flips their signs), as are
    complex gradients and norm_type <= 0. A parameter listed twice counts once. The norm is a plain tensor, the same
    on every rank (there the norm of DTensors is a DTensor, with a `full_tensor()`). Norm and coefficient are float32,
    and float64 where a gradient is (there they have the gradients' dtype). A float64 norm is finite wherever it is in
    float64's range (there it is inf where the sum of |g|^p is not).

    Args:
        parameters: a tensor or an iterable of tensors (a generator is consumed once), of which `.grad` is scaled.
        max_norm: largest norm allowed. None, 0 and inf measure only.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise where the norm is not finite. Waits for the device.
        foreach: ignored, all gradients of a device and dtype always go in one pass. There for the signature's sake.

    Returns:
        The norm before clipping, 0-d float32 or float64, see `grad_norm`.

    Raises:
        ValueError: as `grad_norm` and `clip_coefficient`.
        RuntimeError: error_if_nonfinite and the norm is not finite.
    """
    limit = _limit(max_norm)
    gradients = gradients_of(parameters)
    norm = global_norm(gradients, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the gradient norm is {norm.item()}: skip this step, or pass error_if_nonfinite=False.")
    if limit is not None:
        _scale_([g.local for g in gradients if g.local is not None], _coefficient(norm, limit).coefficient)
        # The kernels do not mark the gradients as changed; a graph that saved the old values must raise an error.
        torch.autograd.graph.increment_version([g.grad for g in gradients if g.grad is not None])
    return norm


def _limit(max_norm: float | None) -> float | None:
    """max_norm, or None where it only measures."""
    if max_norm is not None and not (is_number_in(max_norm, math.inf) or max_norm == math.inf):
        raise ValueError(f"max_norm is {max_norm}, expected a positive number, or None, 0 or inf to measure only.")
    return None if max_norm in (None, 0, math.inf) else max_norm


def _coefficient(norm: Tensor, limit: float | None) -> ClipCoefficient:
    # One kernel where isfinite takes four; a norm is never negative, and nan is not less.
    bad = (norm < math.inf).logical_not_()
    if limit is None:
        return ClipCoefficient(torch.ones_like(norm), bad.float())
    coefficient = (norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0).masked_fill_(bad, 1.0)
    return ClipCoefficient(coefficient, bad.float())


def _scale_(tensors: list[Tensor], coefficient: Tensor) -> None:
    dense, others = [], []  # the kernel's coefficient is float32
    for tensor in tensors:
        (dense if is_dense(tensor) and tensor.dtype != torch.float64 else others).append(tensor)
    for group in by_device_and_dtype(dense).values():
        torch.ops.rlft_fast.multi_tensor_scale_(group, coefficient.to(group[0].device, torch.float32))
    for tensor in others:
        tensor.mul_(coefficient.to(tensor.device))


@torch.library.register_fake("rlft_fast::multi_tensor_scale_")
def _(tensors, coefficient):
    return None
