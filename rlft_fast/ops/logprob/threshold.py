"""A softmax over the logits that reach a row's threshold: what a sampler with top-k, top-p or min-p draws from.

Shapes: R rows, C columns of one tile of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlft_fast.ops.logprob.tiles import Rows

Transform = tuple[Tensor | None, Tensor, float, float]  # (bias, 1 / temperature, softcap, scale) of a kernel
THRESHOLD_BYTES_PER_LOGIT = (
    5  # the slope, where soft-capping gives each logit one of its own, and which logits are kept
)


def keep_above_(z_RC: Tensor, rows: Rows, start: int, transform: Transform) -> tuple[Transform, Tensor]:
    """Replaces raw logits by those that the softmax sees, and by -inf those below their row's threshold.

    A row's target is kept in any case: it was sampled, so it was in the support, and a trainer's logits are not the
    sampler's to the last bit.

    Args:
        z_RC: raw logits of a tile.
        rows: with their thresholds.
        start: vocabulary id of the tile's first column.
        transform: from raw logits to the softmax's.

    Returns:
        What remains to be done to the logits, which is nothing, and their derivative (R, 1) or (R, C): gradients of the
        new logits times it are those of the raw ones.
    """
    assert rows.threshold is not None
    slope = _transform_(z_RC, transform)
    local_R1 = (rows.target_R - start).unsqueeze(1)
    in_tile = (local_R1 >= 0) & (local_R1 < z_RC.shape[1])
    column_R1 = local_R1.where(in_tile, 0)
    target_logit = z_RC.gather(1, column_R1)
    z_RC.masked_fill_(z_RC < rows.threshold.unsqueeze(1), -torch.inf)  # nan is not below: it stays, and spoils its row
    z_RC.scatter_(1, column_R1, target_logit.where(in_tile, z_RC.gather(1, column_R1)))
    return (None, slope.new_ones(1), 0.0, 1.0), slope


def _transform_(z: Tensor, transform: Transform) -> Tensor:
    bias, inv_temperature, softcap, scale = transform
    inv_temperature = inv_temperature.unsqueeze(1)  # (R, 1) or (1, 1)
    if bias is not None:
        z.add_(bias)
    if not softcap:
        z.mul_(scale * inv_temperature)
        return scale * inv_temperature
    z.mul_(scale / softcap).tanh_()
    slope = z.square().neg_().add_(1.0).mul_(scale * inv_temperature)
    z.mul_(softcap * inv_temperature)
    # Rows that nobody computed may hold anything, and gradients of 0, which have to stay 0.
    return slope.nan_to_num_(0.0, 0.0, 0.0)
