"""The distance between the sampler's and the trainer's probabilities, and importance weights that correct for it.

With w = π_old/μ of each token, μ the sampler's probability, an importance weight of the token or its sequence is
bounded from above ("truncate") or dropped where it is out of bounds ("mask"). The log-ratio is clamped at ±20.
"""

import inspect
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlft_fast.ops.packing import segment_expand, segment_sum
from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.aggregation import response_lengths
from rlft_fast.rl.kl import MAX_LOG_RATIO, bounded_exp

# Float64 copies of a chunk stay in the caches; copies of a whole rollout would be its largest tensors. NumPy works in
# one thread, so sums do not depend on the number of threads. Torch's exp of a chunk waits for all threads of MKL, which
# takes longer than its work where other processes use the cores.
_CHUNK_TOKENS = 16_384

CorrectionFunction = Callable[..., Tensor]


def token_truncate(log_ratio_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, high: float = 2.0) -> Tensor:
    """min(w, high) (truncated importance sampling, TIS)."""
    return bounded_exp(log_ratio_T).clamp(max=high)


def token_mask(
    log_ratio_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """w where it is in [low, high], else 0 (IcePop)."""
    ratio_T = bounded_exp(log_ratio_T)
    return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def sequence_mask(
    log_ratio_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, low: float = 0.999, high: float = 1.002
) -> Tensor:
    """w in sequences whose geometric mean of w is in [low, high], else 0.

    The geometric mean, not the product, which leaves any bounds as sequences become longer.
    """
    mean_T = _sequence_sum(log_ratio_T, loss_mask_T, cu_seqlens, mean=True)
    geometric_T = bounded_exp(mean_T)
    return torch.where((geometric_T >= low) & (geometric_T <= high), bounded_exp(log_ratio_T), 0.0)


def sequence_truncate(log_ratio_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, high: float = 2.0) -> Tensor:
    """min(product of w over the sequence, high), the same at each of its tokens."""
    return bounded_exp(_sequence_sum(log_ratio_T, loss_mask_T, cu_seqlens, mean=False)).clamp(max=high)


CORRECTIONS: dict[str, CorrectionFunction] = {
    "token-truncate": token_truncate,
    "token-mask": token_mask,
    "sequence-mask": sequence_mask,
    "sequence-truncate": sequence_truncate,
}


def check_correction(name: str, **bounds: float) -> None:
    """Refuses an unknown correction, a bound that the correction does not have, and a low bound above the high one.

    Args:
        name: one of `CORRECTIONS`.
        **bounds: `low` and `high`; a bound left out is the correction's default.

    Raises:
        ValueError: see above.
    """
    if name not in CORRECTIONS:
        raise ValueError(f"rollout correction is {name!r}, expected one of {', '.join(CORRECTIONS)}")
    parameters = inspect.signature(CORRECTIONS[name]).parameters.values()
    own: dict[str, float] = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    if unknown := [bound for bound in bounds if bound not in own]:
        raise ValueError(f"rollout correction {name} has no bound {unknown[0]!r}: it has {', '.join(own)}")
    low, high = ((own | bounds).get(bound) for bound in ("low", "high"))
    if low is not None and high is not None and not low < high:
        raise ValueError(f"rollout correction {name} keeps weights from {low} to {high}: low must be below high")


@torch.no_grad()
def correction_weights(
    name: str,
    old_logprob_T: Tensor,
    rollout_logprob_T: Tensor | None,
    loss_mask_T: Tensor,
    cu_seqlens: Tensor,
    **bounds: float,
) -> Tensor:
    """Weights for the policy loss of each token.

    Args:
        name: one of `CORRECTIONS`.
        old_logprob_T: (T,) log-probability of the sampled tokens under the policy.
        rollout_logprob_T: (T,) the same as the sampler reported it.
        loss_mask_T: (T,) bool, True at response tokens.
        cu_seqlens: (B + 1,) int32 sequence boundaries.
        **bounds: `low` and `high`; a bound left out is the correction's default.

    Returns:
        (T,) weights >= 0, zero outside the mask.

    Raises:
        ValueError: see `check_correction`; or shapes differ, or the sampler reported no log-probabilities.
    """
    check_correction(name, **bounds)
    if rollout_logprob_T is None:
        raise ValueError(
            f"rollout correction {name} compares with the sampler's log-probabilities, which this rollout did not "
            "report: take a rollout that does, or no correction"
        )
    check_shapes(loss_mask_T, old_logprob_T=old_logprob_T, rollout_logprob_T=rollout_logprob_T)
    log_ratio_T = (old_logprob_T - rollout_logprob_T).where(loss_mask_T, 0.0)
    return CORRECTIONS[name](log_ratio_T, loss_mask_T, cu_seqlens, **bounds).where(loss_mask_T, 0.0)


@torch.no_grad()
def mismatch_metrics(logprob_T: Tensor, rollout_logprob_T: Tensor, loss_mask_T: Tensor) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the policy's, over the response tokens.

    Keys: mismatch_mean and mismatch_max of |log π - log μ|; estimates mismatch_k1 and mismatch_k3 of KL(μ ‖ π);
    effective_sample_share, (Σ w)² / (N·Σ w²) with w = π/μ: 1 where the two agree.

    Args:
        logprob_T: (T,) log-probability of the sampled tokens under the policy that sampled them.
        rollout_logprob_T: (T,) the same as the sampler reported it.
        loss_mask_T: (T,) bool, True at response tokens.

    Returns:
        The metrics, summed in float64; {} where there is no response token.

    Raises:
        ValueError: Shapes differ.
    """
    check_shapes(loss_mask_T, logprob_T=logprob_T, rollout_logprob_T=rollout_logprob_T)
    if not (count := int(loss_mask_T.count_nonzero())):
        return {}
    columns = (x_T.cpu().split(_CHUNK_TOKENS) for x_T in (logprob_T, rollout_logprob_T, loss_mask_T))
    sums, largest = np.zeros(5), 0.0
    for logprob, rollout_logprob, mask in zip(*columns, strict=True):
        log_ratio = (logprob.double() - rollout_logprob).numpy()[mask.numpy()]
        distance, clamped = np.abs(log_ratio), log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        less_one = np.expm1(clamped)
        k3 = less_one - np.minimum(log_ratio, MAX_LOG_RATIO)
        weight = np.add(less_one, 1.0, out=less_one)
        sums += distance.sum(), -log_ratio.sum(), k3.sum(), weight.sum(), np.square(weight).sum()
        largest = np.maximum(largest, distance.max(initial=0.0))  # NaN stays
    distance_sum, k1_sum, k3_sum, weight_sum, square_sum = sums.tolist()
    return {
        "mismatch_mean": distance_sum / count,
        "mismatch_max": float(largest),
        "mismatch_k1": k1_sum / count,
        "mismatch_k3": k3_sum / count,
        "effective_sample_share": weight_sum**2 / (count * square_sum),
    }


def _sequence_sum(log_ratio_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, *, mean: bool) -> Tensor:
    """Each sequence's sum, or mean over its response tokens, at each of its positions."""
    sum_B = segment_sum(log_ratio_T, cu_seqlens)
    if mean:
        sum_B = sum_B / response_lengths(loss_mask_T, cu_seqlens).clamp(min=1)
    return segment_expand(sum_B, cu_seqlens, num_tokens=len(log_ratio_T))
