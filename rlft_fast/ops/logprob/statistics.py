"""Statistics of rows: the sums over tiles of the logits, and over the shards of a vocabulary.

Shapes: T packed tokens, R rows of one chunk, D hidden, V vocabulary, N ranks of a sharded vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Rows(NamedTuple):
    """Some rows of the problem, gathered: all that a chunk needs besides the projection."""

    hidden_RD: Tensor
    target_R: Tensor
    inv_temperature: Tensor  # (R,) or (1,)
    threshold: Tensor | None = None  # (R,); None: every logit counts


class Stats(NamedTuple):
    """Per row; the log-normaliser is ``maximum + log_sum``, kept apart because rounding their sum costs digits of p."""

    logprob: Tensor
    entropy: Tensor | None
    sum_prob_squared: Tensor | None
    top1: Tensor
    mean_logits: Tensor | None
    maximum: Tensor
    log_sum: Tensor


class Sums(NamedTuple):
    """Per row, over the vocabulary seen so far; None for a sum that no statistic needs.

    Where no shards are merged and no ``top1`` is asked for, ``maximum`` may be another number about as large as the
    log-normaliser, with an excess that refers to it (`fused_stats` of Triton).
    """

    maximum: Tensor
    excess: Tensor  # sum of exp(x - maximum), less the 1 of the maximum, beside which the others would lose digits
    shift: Tensor | None  # sum of exp(x - maximum) (x - maximum)
    squares: Tensor | None  # sum of exp(x - maximum)^2
    target_logit: Tensor  # nan until the target has been seen: a target outside the vocabulary must not look valid
    logits: Tensor | None = None  # sum of x, float64

    @staticmethod
    def of_nothing(
        rows: Rows, return_entropy: bool = False, return_sum_prob_squared: bool = False,
        return_mean_logits: bool = False,
    ) -> Sums:  # fmt: skip
        maximum, excess, shift, squares, target_logit = rows.hidden_RD.new_zeros(
            5, rows.target_R.shape[0], dtype=torch.float32
        )
        return Sums(
            maximum.fill_(-torch.inf), excess.fill_(-1), shift if return_entropy else None,
            squares if return_sum_prob_squared else None, target_logit.fill_(torch.nan),
            torch.zeros_like(maximum, dtype=torch.float64) if return_mean_logits else None,
        )  # fmt: skip

    def at(self, top: Tensor) -> tuple[Sums, Tensor]:
        """The same sums with ``top``, no less than the maximum, in its place, and whether the maximum is the top.

        Sums of several sets of columns can then be added, and the number of tops less 1 be added to their excess.
        """
        down = (self.maximum - top).nan_to_num(nan=0.0, neginf=-torch.finfo(torch.float32).max)  # no 0 * -inf
        factor, is_top = down.exp(), (down == 0).float()
        sums = Sums(
            top, self.excess * factor + factor * (1 - is_top),
            None if self.shift is None else (self.shift + down * (1 + self.excess)) * factor,
            None if self.squares is None else self.squares * factor.square(), self.target_logit, self.logits,
        )  # fmt: skip
        return sums, is_top

    def finish(self, group: str, vocab: int) -> Stats:
        """The statistics of ``vocab`` columns, also over the shards of the ranks of ``group``, if there is one."""
        sums, num_logits = _merge_shards(group, self, vocab) if group else (self, vocab)
        maximum, excess, shift, squares, target_logit, logits = sums
        sum_exp, log_sum = 1 + excess, excess.log1p()
        return Stats(
            logprob=(target_logit - maximum) - log_sum,
            entropy=None if shift is None else log_sum - shift / sum_exp,
            sum_prob_squared=None if squares is None else squares / sum_exp.square(),
            top1=target_logit == maximum,
            mean_logits=None if logits is None else (logits / num_logits).float(),
            maximum=maximum,
            log_sum=log_sum,
        )


def per_token_results(
    hidden: Tensor, entropy: bool, sum_prob_squared: bool = False, top1: bool = False, mean_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(T,) logprob, and the other statistics, (T,) or empty. All are zeros; ignored rows keep them."""

    def zeros(asked: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_zeros(hidden.shape[0] if asked else 0, dtype=dtype)

    return zeros(True), zeros(entropy), zeros(sum_prob_squared), zeros(top1, torch.bool), zeros(mean_logits)


# ---- a threshold on the logits ---------------------------------------------------------------------------------------

Transform = tuple[Tensor | None, Tensor, float, float]  # (bias, 1 / temperature, softcap, scale) of a kernel
# The slope, where soft-capping gives each logit its own, and which logits are kept.
THRESHOLD_BYTES_PER_LOGIT = 5


def keep_above_(z_RC: Tensor, rows: Rows, start: int, transform: Transform) -> tuple[Transform, Tensor]:
    """Replaces raw logits by the logits that the softmax sees, and logits below their row's threshold by -inf.

    A softmax over the logits that reach the threshold is what a sampler with top-k, top-p or min-p draws from. A row's
    target is kept in any case: it was sampled, so it was in the support, and the trainer's logits differ from the
    sampler's in their last bits.

    Args:
        z_RC: raw logits of a tile.
        rows: with their thresholds.
        start: vocabulary id of the tile's first column.
        transform: from raw logits to the softmax's.

    Returns:
        The transform that is left for the kernel, which is the identity, and d new / d raw, (R, 1) or (R, C).
    """
    assert rows.threshold is not None
    slope = _transform_(z_RC, transform)
    local_R1 = (rows.target_R - start).unsqueeze(1)
    in_tile = (local_R1 >= 0) & (local_R1 < z_RC.shape[1])
    column_R1 = local_R1.where(in_tile, 0)
    target_logit = z_RC.gather(1, column_R1)
    z_RC.masked_fill_(
        z_RC < rows.threshold.unsqueeze(1), -torch.inf
    )  # nan is not below, so it stays and spoils its row
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
    # Uncomputed rows may contain any value. Their upstream gradient is 0, and 0 * nan must not reach dweight.
    return slope.nan_to_num_(0.0, 0.0, 0.0)


# ---- a vocabulary sharded over processes -----------------------------------------------------------------------------


def _merge_shards(group: str, own: Sums, vocab: int) -> tuple[Sums, Tensor | int]:
    """Sums over all vocabulary shards, and of how many logits. Only the shard of the target knows its logit."""
    top = own.maximum.clone()
    all_reduce(top, group, dist.ReduceOp.MAX)
    parts, is_top = own.at(top)
    sums = {
        "target_logit": own.target_logit.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
        "seen": own.target_logit.isnan().logical_not().float(),
        "excess": parts.excess,
        "tops": is_top,
    }
    if parts.shift is not None:
        sums["shift"] = parts.shift
    if parts.squares is not None:
        sums["squares"] = parts.squares
    if parts.logits is not None:
        sums["logits"] = parts.logits.float()
        sums["vocab"] = torch.full_like(parts.excess, vocab)
    total = torch.stack(list(sums.values()))
    all_reduce(total, group)
    merged = dict(zip(sums, total, strict=True))
    merged_sums = Sums(
        top, merged["excess"] + (merged["tops"] - 1), merged.get("shift"), merged.get("squares"),
        merged["target_logit"].masked_fill(merged["seen"] == 0, torch.nan), merged.get("logits"),
    )  # fmt: skip
    return merged_sums, merged.get("vocab", vocab)


def all_reduce(tensor: Tensor, group: str, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduces in place over the ranks of the group of that name."""
    # An op's schema carries strings: the name stands for the group, as in torch's own functional collectives.
    dist.all_reduce(tensor, operation, group=cast(Any, dist.distributed_c10d)._resolve_process_group(group))


def rebase_targets(target: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Targets counted from this rank's first vocabulary id, and (N, 3) every rank's V, D and T; one collective."""
    own = torch.tensor([*weight.shape, target.shape[0]]).to(target.device, non_blocking=True)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    shapes = torch.stack(sizes)
    return target - shapes[: group.rank(), 0].sum(), shapes
