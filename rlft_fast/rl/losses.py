"""Per-token losses. Each token carries its weight in the whole batch, so a batch's loss is the sum of its tokens'."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.aggregation import Aggregation, check_aggregation
from rlft_fast.rl.kl import MAX_LOG_RATIO, KLEstimator, check_kl_estimator, kl_estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """PPO's clipped loss with separate bounds, entropy bonus and KL penalty.

    With r = π/π_old and advantage A, the loss of a token is

        l = -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) - entropy_coef·H + kl_coef·KL(π ‖ π_ref)

    (PPO, arXiv 1707.06347; clip-higher, DAPO, arXiv 2503.14476; KL in the loss, GRPO, arXiv 2402.03300), times its
    weight from `loss_weights`. The log-ratio is clamped at ±20 before exp. Tokens of weight 0 contribute exactly 0 to
    the loss and to the gradient, whatever stands in their fields, NaN included.

    Attributes:
        clip_low: How far below 1 the ratio is followed, in [0, 1].
        clip_high: How far above 1 the ratio is followed; inf leaves it unbounded.
        entropy_coef: Weight of the entropy bonus.
        kl_coef: Weight of the penalty on the divergence from the reference policy.
        kl_estimator: "k1", "k2" or "k3", see `kl_estimate`; k1 has no useful gradient here.
        aggregation: Mode for `loss_weights`, which whoever fills in `loss_weight_T` reads.

    Raises:
        ValueError: An option is out of range or unknown.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}, expected a number in [0, 1]: ratios lie above 1 - clip_low")
        for name in ("clip_high", "entropy_coef", "kl_coef"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number >= 0")
        check_kl_estimator(self.kl_estimator)
        check_aggregation(self.aggregation)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` take after the model's outputs, in order."""
        fields = ("old_logprob_T", "advantage_T", "loss_weight_T")
        return (*fields, "ref_logprob_T") if self.kl_coef else fields

    def per_token(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor | None,
        old_logprob_T: Tensor,
        advantage_T: Tensor,
        loss_weight_T: Tensor,
        ref_logprob_T: Tensor | None = None,
    ) -> Tensor:
        """Weighted loss of each token; its sum over all micro-batches and ranks is the loss of the batch.

        Args:
            logprob_T: (T,) log-probability of the sampled tokens under the policy, with gradient.
            entropy_T: (T,) entropy of the policy; may be None when `entropy_coef` is 0.
            old_logprob_T: (T,) log-probability under the policy that the ratio is taken against.
            advantage_T: (T,) advantages.
            loss_weight_T: (T,) weights from `loss_weights` of the whole batch.
            ref_logprob_T: (T,) log-probability under the reference; needed when `kl_coef` is not 0.

        Returns:
            (T,) weighted loss.

        Raises:
            ValueError: A needed tensor is None, or shapes differ.
        """
        logprob_T, old_logprob_T, advantage_T = _zero_inactive(
            loss_weight_T, logprob_T=logprob_T, old_logprob_T=old_logprob_T, advantage_T=advantage_T
        )
        loss_T = self._clipped(_ratio(logprob_T, old_logprob_T), advantage_T)
        if self.entropy_coef:
            (entropy_T,) = _zero_inactive(loss_weight_T, entropy_T=entropy_T)
            loss_T = loss_T - self.entropy_coef * entropy_T
        if self.kl_coef:
            (ref_logprob_T,) = _zero_inactive(loss_weight_T, ref_logprob_T=ref_logprob_T)
            loss_T = loss_T + self.kl_coef * kl_estimate(logprob_T, ref_logprob_T, self.kl_estimator)
        return loss_weight_T * loss_T

    @torch.no_grad()
    def metrics(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor | None,
        old_logprob_T: Tensor,
        advantage_T: Tensor,
        loss_weight_T: Tensor,
        ref_logprob_T: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Weighted sums over these tokens: added over micro-batches and ranks they are the figures of the batch.

        Keys: policy_loss (without entropy and KL terms); clip_share, the share of tokens whose gradient the clip
        removes, and its parts clip_share_low (A < 0) and clip_share_high (A > 0); approx_kl, the k3 estimate of
        KL(π_old ‖ π); entropy when given; ref_kl when `kl_coef` is not 0. Keys that end in "_max" (ratio_max; 0 without
        active tokens) are reduced by max instead.

        Args:
            logprob_T: As in `per_token`, like all the others.
            entropy_T: (T,) or None.
            old_logprob_T: (T,).
            advantage_T: (T,).
            loss_weight_T: (T,).
            ref_logprob_T: (T,) or None.

        Returns:
            0-d tensors on the device of the inputs, without a host sync.

        Raises:
            ValueError: A needed tensor is None, or shapes differ.
        """
        logprob_T, old_logprob_T, advantage_T = _zero_inactive(
            loss_weight_T, logprob_T=logprob_T, old_logprob_T=old_logprob_T, advantage_T=advantage_T
        )
        ratio_T = _ratio(logprob_T, old_logprob_T)
        low_T = (advantage_T < 0) & (ratio_T < 1.0 - self.clip_low)
        high_T = (advantage_T > 0) & (ratio_T > 1.0 + self.clip_high)
        per_token = {
            "policy_loss": self._clipped(ratio_T, advantage_T),
            "clip_share": low_T | high_T,
            "clip_share_low": low_T,
            "clip_share_high": high_T,
            "approx_kl": kl_estimate(old_logprob_T, logprob_T, "k3"),
        }
        if entropy_T is not None:
            (per_token["entropy"],) = _zero_inactive(loss_weight_T, entropy_T=entropy_T)
        if self.kl_coef:
            (ref_logprob_T,) = _zero_inactive(loss_weight_T, ref_logprob_T=ref_logprob_T)
            per_token["ref_kl"] = kl_estimate(logprob_T, ref_logprob_T, self.kl_estimator)
        sums = {name: (loss_weight_T * value_T).sum() for name, value_T in per_token.items()}
        # The padding is the value of the maximum where a micro-batch has no token at all.
        return sums | {"ratio_max": pad(torch.where(loss_weight_T != 0, ratio_T, 0.0), (0, 1)).amax()}

    def _clipped(self, ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
        clipped_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Squared error of the critic, clipped around the values of the rollout (PPO, arXiv 1707.06347).

        l = ½·max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²)

    times its weight from `loss_weights`: the critic, like the policy, is normalised over the whole batch. Tokens of
    weight 0 contribute exactly 0 to the loss and to the gradient.

    Attributes:
        clip: How far the value may move from the old one; inf turns clipping off.
        aggregation: Mode for `loss_weights`, which whoever fills in `loss_weight_T` reads.

    Raises:
        ValueError: An option is out of range or unknown.
    """

    clip: float = 0.2
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        if not self.clip > 0.0:
            raise ValueError(f"clip is {self.clip}, expected a number > 0, or inf for no clipping")
        check_aggregation(self.aggregation)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` take after the new values, in order."""
        return ("value_T", "return_T", "loss_weight_T")

    def per_token(self, new_value_T: Tensor, old_value_T: Tensor, return_T: Tensor, loss_weight_T: Tensor) -> Tensor:
        """Weighted loss of each token.

        Args:
            new_value_T: (T,) values from the critic, with gradient.
            old_value_T: (T,) values at the time of the rollout.
            return_T: (T,) returns.
            loss_weight_T: (T,) weights from `loss_weights` of the whole batch.

        Returns:
            (T,) weighted loss.

        Raises:
            ValueError: Shapes differ.
        """
        new_value_T, old_value_T, return_T = _zero_inactive(
            loss_weight_T, new_value_T=new_value_T, old_value_T=old_value_T, return_T=return_T
        )
        return loss_weight_T * torch.maximum(*self._losses(new_value_T, old_value_T, return_T))

    @torch.no_grad()
    def metrics(
        self, new_value_T: Tensor, old_value_T: Tensor, return_T: Tensor, loss_weight_T: Tensor
    ) -> dict[str, Tensor]:
        """Weighted sums over these tokens: added over micro-batches and ranks they are the figures of the batch.

        Keys: value_loss; value_clip_share, the share of tokens whose clipped error is the larger one; and the moments
        that `explained_variance` needs: return_mean, return_square_mean, value_error_mean, value_error_square_mean.

        Args:
            new_value_T: As in `per_token`, like all the others.
            old_value_T: (T,).
            return_T: (T,).
            loss_weight_T: (T,).

        Returns:
            0-d tensors on the device of the inputs, without a host sync.

        Raises:
            ValueError: Shapes differ.
        """
        new_value_T, old_value_T, return_T = _zero_inactive(
            loss_weight_T, new_value_T=new_value_T, old_value_T=old_value_T, return_T=return_T
        )
        unclipped_T, clipped_T = self._losses(new_value_T, old_value_T, return_T)
        error_T = return_T - new_value_T
        per_token = {
            "value_loss": torch.maximum(unclipped_T, clipped_T),
            "value_clip_share": clipped_T > unclipped_T,
            "return_mean": return_T,
            "return_square_mean": return_T.square(),
            "value_error_mean": error_T,
            "value_error_square_mean": error_T.square(),
        }
        return {name: (loss_weight_T * value_T).sum() for name, value_T in per_token.items()}

    def _losses(self, new_value_T: Tensor, old_value_T: Tensor, return_T: Tensor) -> tuple[Tensor, Tensor]:
        clipped_value_T = new_value_T.clamp(old_value_T - self.clip, old_value_T + self.clip)
        return 0.5 * (new_value_T - return_T).square(), 0.5 * (clipped_value_T - return_T).square()


def explained_variance(metrics: Mapping[str, Tensor]) -> Tensor:
    """Share of the variance of the returns that the critic explains: 1 - Var(R - V) / Var(R).

    Args:
        metrics: The fully reduced metrics of `ValueLoss`.

    Returns:
        0-d tensor: 1 is a perfect critic, 0 one no better than a constant; NaN where the returns do not vary.
    """
    return_variance = metrics["return_square_mean"] - metrics["return_mean"].square()
    error_variance = metrics["value_error_square_mean"] - metrics["value_error_mean"].square()
    return torch.where(return_variance > 0, 1.0 - error_variance / return_variance, torch.nan)


def _ratio(logprob_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    """π/π_old, exactly 1 where the two are the same number."""
    return (logprob_T - old_logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _zero_inactive(loss_weight_T: Tensor, **tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Zeroes entries of weight 0: multiplying by the weight would keep NaN · 0 = NaN, in backward as well."""
    check_shapes(loss_weight_T, **tensors)
    active_T = loss_weight_T != 0
    return tuple(torch.where(active_T, tensor, 0.0) for tensor in tensors.values() if tensor is not None)
