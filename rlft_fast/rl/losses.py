"""Per-token losses. Each token carries its weight in the whole batch, so a batch's loss is the sum of its tokens'."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.errors import StepError, brief
from rlft_fast.foreign import ForeignCode
from rlft_fast.plugins import find_function, function_name, parameter_names
from rlft_fast.rl._checks import check_shapes
from rlft_fast.rl.aggregation import Aggregation, check_aggregation
from rlft_fast.rl.distillation import top_k_divergence
from rlft_fast.rl.kl import KLEstimator, check_kl_estimator, kl_estimate, policy_ratio
from rlft_fast.rl.methods import needs_of
from rlft_fast.rl.policy_losses import POLICY_LOSSES, PolicyLossFunction, SequenceMean

_FIELDS = ("advantage_T", "loss_weight_T")


class PolicyLossError(StepError, ValueError):
    """A policy loss of one's own raised."""

    part = "policy loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss by name or a function of your own, with entropy bonus and KL penalty.

    The loss of a token is

        l = loss(log π, …) - entropy_coef·H + kl_coef·KL(π ‖ π_ref) + teacher_coef·KL(π_teacher ‖ π)

    times its weight from `loss_weights`; see `rlft_fast.rl.policy_losses` for the losses and what a function of your
    own looks like. Log-ratios are clamped at ±20 before exp. Tokens of weight 0 contribute exactly 0 to the loss and to
    the gradient, whatever stands in their fields, NaN included.

    Attributes:
        loss: a name of `POLICY_LOSSES`, or a function; always a function once constructed.
        clip_low: How far below 1 the ratio is followed, in [0, 1]; None: as the loss has it.
        clip_high: How far above 1 the ratio is followed, inf leaves it unbounded; None: as the loss has it.
        options: other options of the loss by name.
        entropy_coef: Weight of the entropy bonus.
        kl_coef: Weight of the penalty on the divergence from the reference policy.
        kl_estimator: see `kl_estimate`; k1 has no useful gradient here.
        teacher_coef: Weight of `top_k_divergence` from a teacher.
        teacher_tail: Whether the divergence has the term of the ids that the teacher does not name.
        aggregation: Mode for `loss_weights`, read where `loss_weight_T` is filled in, and for `loss_scale`.
        max_response_tokens: the constant of aggregation "constant".
        on_policy: The policy has made no step since the rollout, so log π_old is its own log-probability, detached, and
            the batch needs no old_logprob_T.
        every_token: Tokens that add nothing to the loss run, too, so that the metrics are over all tokens.

    Raises:
        ValueError: An option is out of range or unknown, or the loss does not return one number per token, or changes
            the process, which nothing puts back in a loss that runs for every micro-batch.
        PolicyLossError: A loss of your own raised; also in `per_token` and `metrics`.
    """

    loss: str | PolicyLossFunction = "ppo"
    clip_low: float | None = None
    clip_high: float | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    teacher_coef: float = 0.0
    teacher_tail: bool = True
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None
    on_policy: bool = False
    every_token: bool = False

    def __post_init__(self) -> None:
        if self.clip_low is not None and not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}, expected a number in [0, 1]: ratios lie above 1 - clip_low")
        for name in ("clip_high", "entropy_coef", "kl_coef", "teacher_coef"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise ValueError(f"{name} is {value}, expected a number >= 0")
        check_kl_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.max_response_tokens)
        if isinstance(self.loss, str):
            object.__setattr__(self, "loss", find_function("policy loss", POLICY_LOSSES, self.loss))
        self._try_out()

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` take after the model's outputs, in order."""
        old = () if self.on_policy else ("old_logprob_T",)
        fields = (*old, *_FIELDS, *(("ref_logprob_T",) if self.kl_coef else ()))
        fields += ("teacher_logprob_T", "teacher_logprob_TK") if self.teacher_coef else ()
        known = (*fields, "logprob_T", "entropy_T", "old_logprob_T")
        return (*fields, *(name for name in self._tensors if name not in known))

    @property
    def ids_field(self) -> str | None:
        """The field with the ids whose log-probabilities `per_token` and `metrics` read as ids_logprob_TK."""
        return "teacher_ids_TK" if self.teacher_coef else None

    @property
    def needs_advantage(self) -> bool:
        """Whether tokens without an advantage add nothing, neither to the loss nor to the gradient, and do not run."""
        reads_all = self.entropy_coef or self.kl_coef or self.teacher_coef or self.every_token
        return needs_of(self._function).advantage and not reads_all

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss looks at whole sequences: `per_token` and `metrics` are then given `sequence_mean`."""
        return "sequence_mean" in parameter_names(self._function)

    def per_token(self, fields: Mapping[str, Tensor], *, sequence_mean: SequenceMean | None = None) -> Tensor:
        """Weighted loss of each token; its sum over all micro-batches and ranks is the loss of the batch.

        Args:
            fields: (T,) tensors by name: logprob_T, the log-probability of the sampled tokens under the policy, with
                gradient; entropy_T, the entropy of the policy, where the loss reads it; and the fields that `fields`
                names, among them old_logprob_T, the log-probability that the ratio is taken against, and loss_weight_T
                from `loss_weights` of the whole batch. Other names are ignored.
            sequence_mean: (T,) to (T,), the detached mean over each token's sequence; where `needs_sequences`.

        Returns:
            (T,) weighted loss.

        Raises:
            ValueError: A needed tensor is missing, or shapes differ.
        """
        tensors = self._active(fields)
        loss_T = self._policy_loss(tensors, sequence_mean)
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * tensors["entropy_T"]
        if self.kl_coef:
            loss_T = loss_T + self.kl_coef * self._ref_kl(tensors)
        if self.teacher_coef:
            loss_T = loss_T + self.teacher_coef * self._divergence(tensors)
        return tensors["loss_weight_T"] * loss_T

    @torch.no_grad()
    def metrics(self, fields: Mapping[str, Tensor], *, sequence_mean: SequenceMean | None = None) -> dict[str, Tensor]:
        """Weighted sums over these tokens: added over micro-batches and ranks they are the figures of the batch.

        Keys: policy_loss (without entropy and KL terms); clip_share, the share of tokens with an advantage and without
        a gradient (for a loss that declares its clipped tokens, `needs`, the share of these tokens), and its parts
        clip_share_low (A < 0) and clip_share_high (A > 0); approx_kl, the k3 estimate of KL(π_old ‖ π); entropy when
        given; ref_kl when `kl_coef` is not 0; of a teacher teacher_divergence, and teacher_kl, the k1 estimate of
        KL(π ‖ π_teacher). Keys that end in "_max" (ratio_max; 0 without active tokens) are reduced by max instead.

        Args:
            fields: As in `per_token`; entropy_T may always be there.
            sequence_mean: As in `per_token`.

        Returns:
            0-d tensors on the device of the inputs, without a host sync.

        Raises:
            ValueError: A needed tensor is missing, or shapes differ.
        """
        tensors = self._active(fields)
        loss_T, gradient_T = self._loss_and_gradient(tensors, sequence_mean)
        old_logprob_T, advantage_T = tensors["old_logprob_T"], tensors["advantage_T"]
        is_clipped_T = gradient_T == 0
        if (clipped := needs_of(self._function).clipped) is not None:
            given = {name: tensors[name] for name in parameter_names(clipped) if name.endswith("_T")}
            is_clipped_T = clipped(**given, **self._options)
        low_T, high_T = (is_clipped_T & (sign * advantage_T > 0) for sign in (-1.0, 1.0))
        per_token = {
            "policy_loss": loss_T,
            "clip_share": low_T | high_T,
            "clip_share_low": low_T,
            "clip_share_high": high_T,
            "approx_kl": kl_estimate(old_logprob_T, tensors["logprob_T"], "k3"),
        }
        if "entropy_T" in tensors:
            per_token["entropy"] = tensors["entropy_T"]
        if self.kl_coef:
            per_token["ref_kl"] = self._ref_kl(tensors)
        if self.teacher_coef:
            per_token["teacher_divergence"] = self._divergence(tensors)
            per_token["teacher_kl"] = tensors["logprob_T"] - tensors["teacher_logprob_T"]
        weight_T = tensors["loss_weight_T"]
        sums = {name: (weight_T * value_T).sum() for name, value_T in per_token.items()}
        ratio_T = torch.where(weight_T != 0, policy_ratio(tensors["logprob_T"], old_logprob_T), 0.0)
        # The padding is the value of the maximum where a micro-batch has no token at all.
        return sums | {"ratio_max": pad(ratio_T, (0, 1)).amax()}

    @property
    def _function(self) -> PolicyLossFunction:
        assert not isinstance(self.loss, str)
        return self.loss

    @property
    def _is_built_in(self) -> bool:
        return self._function in POLICY_LOSSES.values()

    @property
    def _tensors(self) -> tuple[str, ...]:
        """The per-token tensors that the loss reads."""
        return tuple(name for name in parameter_names(self._function) if name.endswith("_T"))

    @property
    def _options(self) -> dict[str, float]:
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return {name: value for name, value in bounds.items() if value is not None} | dict(self.options)

    def _active(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the loss reads, zeroed where the weight is 0."""
        reads_entropy = "entropy_T" in fields or self.entropy_coef or "entropy_T" in self._tensors
        names = ("logprob_T", *(("entropy_T",) if reads_entropy else ()), *self.fields)
        names += ("ids_logprob_TK",) if self.teacher_coef else ()
        tensors = _active(fields, names)
        return tensors | ({"old_logprob_T": tensors["logprob_T"].detach()} if self.on_policy else {})

    def _policy_loss(self, tensors: Mapping[str, Tensor], sequence_mean: SequenceMean | None) -> Tensor:
        whole = {"sequence_mean": sequence_mean} if self.needs_sequences else {}
        arguments = {name: tensors[name] for name in self._tensors}
        try:
            return self._function(**arguments, **whole, **self._options)
        except Exception as error:
            if self._is_built_in:
                raise
            name = function_name(self._function)
            raise PolicyLossError(f"policy loss {name} raised {type(error).__name__}: {brief(error)}") from error

    def _loss_and_gradient(
        self, tensors: Mapping[str, Tensor], sequence_mean: SequenceMean | None
    ) -> tuple[Tensor, Tensor]:
        """The policy loss of each token and its derivative in the token's log-probability."""
        with torch.enable_grad():
            logprob_T = tensors["logprob_T"].detach().requires_grad_()
            loss_T = self._policy_loss({**tensors, "logprob_T": logprob_T}, sequence_mean)
            if not isinstance(loss_T, Tensor):
                name, got = function_name(self._function), type(loss_T).__name__
                raise ValueError(f"policy loss {name} returned {got}, expected one number per token")
            (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
        return loss_T.detach(), gradient_T

    def _ref_kl(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return kl_estimate(tensors["logprob_T"], tensors["ref_logprob_T"], self.kl_estimator, tensors["old_logprob_T"])

    def _divergence(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return top_k_divergence(tensors["ids_logprob_TK"], tensors["teacher_logprob_TK"], add_tail=self.teacher_tail)

    def _try_out(self) -> None:
        """Runs the loss on one token, so that a mistake in it shows before the first rollout."""
        name = function_name(self._function)
        possible = [p for p in parameter_names(self._function) if not p.endswith("_T") and p != "sequence_mean"]
        if unknown := [option for option in self._options if option not in possible]:
            raise ValueError(f"policy loss {name} has no option {unknown[0]!r}: it has {', '.join(possible) or 'none'}")
        tensors = dict.fromkeys(("logprob_T", "entropy_T", "old_logprob_T", *self.fields), torch.zeros(1))
        foreign = ForeignCode(f"policy loss {name}", tells=False)
        with contextlib.nullcontext() if self._is_built_in else foreign:
            loss_T, _ = self._loss_and_gradient(tensors, lambda x: x.detach())
        if foreign.changed:
            raise ValueError(
                f"policy loss {name} changes the process of the run: {', '.join(foreign.changed)}. It runs for every "
                "micro-batch, where nothing puts this back: take it out of the loss"
            )
        if loss_T.shape != (1,):
            raise ValueError(f"policy loss {name} returned shape {tuple(loss_T.shape)} for one token, expected (1,)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Squared error of the critic, clipped around the values of the rollout (PPO, arXiv 1707.06347).

        l = ½·max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²)

    times its weight from `loss_weights`: the critic, like the policy, is normalised over the whole batch. Tokens of
    weight 0 contribute exactly 0 to the loss and to the gradient.

    Attributes:
        clip: How far the value may move from the old one; inf turns clipping off.
        aggregation: Mode for `loss_weights`, read where `loss_weight_T` is filled in, and for `loss_scale`.
        max_response_tokens: the constant of aggregation "constant".

    Raises:
        ValueError: An option is out of range or unknown.
    """

    clip: float = 0.2
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.clip > 0.0:
            raise ValueError(f"clip is {self.clip}, expected a number > 0, or inf for no clipping")
        check_aggregation(self.aggregation, self.max_response_tokens)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` take after the new values, in order."""
        return ("value_T", "return_T", "loss_weight_T")

    @property
    def needs_sequences(self) -> bool:
        return False

    def per_token(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Weighted loss of each token.

        Args:
            fields: (T,) tensors by name: new_value_T, the values of the critic, with gradient; value_T, the values at
                the time of the rollout; return_T; and loss_weight_T from `loss_weights` of the whole batch.

        Returns:
            (T,) weighted loss.

        Raises:
            ValueError: A tensor is missing, or shapes differ.
        """
        tensors = _active(fields, ("new_value_T", *self.fields))
        return tensors["loss_weight_T"] * torch.maximum(*self._losses(tensors))

    @torch.no_grad()
    def metrics(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over these tokens: added over micro-batches and ranks they are the figures of the batch.

        Keys: value_loss; value_clip_share, the share of tokens whose clipped error is the larger one; and the moments
        that `explained_variance` needs: return_mean, return_square_mean, value_error_mean, value_error_square_mean.

        Args:
            fields: As in `per_token`.

        Returns:
            0-d tensors on the device of the inputs, without a host sync.

        Raises:
            ValueError: A tensor is missing, or shapes differ.
        """
        tensors = _active(fields, ("new_value_T", *self.fields))
        unclipped_T, clipped_T = self._losses(tensors)
        return_T, error_T = tensors["return_T"], tensors["return_T"] - tensors["new_value_T"]
        per_token = {
            "value_loss": torch.maximum(unclipped_T, clipped_T),
            "value_clip_share": clipped_T > unclipped_T,
            "return_mean": return_T,
            "return_square_mean": return_T.square(),
            "value_error_mean": error_T,
            "value_error_square_mean": error_T.square(),
        }
        return {name: (tensors["loss_weight_T"] * value_T).sum() for name, value_T in per_token.items()}

    def _losses(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the value as it is, and of the value held near the old one."""
        new_value_T, value_T, return_T = (tensors[name] for name in ("new_value_T", "value_T", "return_T"))
        clipped_value_T = new_value_T.clamp(value_T - self.clip, value_T + self.clip)
        return 0.5 * (new_value_T - return_T).square(), 0.5 * (clipped_value_T - return_T).square()


def explained_variance(metrics: Mapping[str, Tensor]) -> Tensor:
    """Share of the variance of the returns that the critic explains: 1 - Var(R - V) / Var(R).

    Args:
        metrics: The fully reduced metrics of `ValueLoss`.

    Returns:
        0-d tensor: 1 is a perfect critic, 0 one no better than a constant; NaN where the returns do not vary by more
        than the rounding of their float32 moments.
    """
    return_variance = metrics["return_square_mean"] - metrics["return_mean"].square()
    error_variance = metrics["value_error_square_mean"] - metrics["value_error_mean"].square()
    varies = return_variance > 1e-6 * metrics["return_square_mean"]
    return torch.where(varies, 1.0 - error_variance / return_variance, torch.nan)


def _active(fields: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """The named tensors, zeroed where the weight is 0: multiplying by the weight would keep NaN · 0 = NaN.

    Raises:
        ValueError: A tensor is missing or has another shape than the weights.
    """
    if missing := [name for name in (*names, "loss_weight_T") if fields.get(name) is None]:
        raise ValueError(f"the loss reads {missing[0]}, which is not among its fields: {', '.join(fields) or 'none'}")
    weight_T = fields["loss_weight_T"]
    tensors = {name: fields[name] for name in names if name != "loss_weight_T"}
    check_shapes(weight_T, **{name: x[..., 0] if name.endswith("_TK") else x for name, x in tensors.items()})
    active_T = weight_T != 0
    is_active = {name: active_T.unsqueeze(-1) if name.endswith("_TK") else active_T for name in tensors}
    zeroed = {name: torch.where(is_active[name], x, 0.0) for name, x in tensors.items()}
    return zeroed | {"loss_weight_T": weight_T}
