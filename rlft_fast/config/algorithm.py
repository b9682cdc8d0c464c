"""What is learned from a rollout."""

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlft_fast.config.base import Section

GROUP_ADVANTAGES = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline", "opo", "gpg", "optimal-token")
ADVANTAGES = ("gae", *GROUP_ADVANTAGES, "reinforce++", "remax")
POLICY_LOSSES = (
    "ppo", "dual-clip", "two-sided", "gspo", "gmpo", "cispo", "sapo", "dppo-tv", "reinforce", "clip-cov", "kl-cov",
)  # fmt: skip


class AlgorithmConfig(Section):
    """What is learned from a rollout: see docs/methods.md."""

    advantage: str = "grpo"
    """gae, grpo, dr-grpo, rloo, reinforce++(-baseline), remax, opo, gpg, optimal-token; or module:function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token, of gae and reinforce++."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE: λ."""
    skip_equal_groups: bool = False
    """Leave out prompts whose samples all got the same reward (before what length costs): they only cost time."""
    filter_by: str | None = None
    """Part of the reward that skip_equal_groups compares instead: a name in reward.function, the task's, or model."""
    max_refills: NonNegativeInt = 0
    """With skip_equal_groups: most further rollouts of a step, made until prompts_per_step prompts are left."""
    mask_truncated: bool = False
    """Learn nothing from completions cut off at max_new_tokens; they still count in their group."""
    epochs: PositiveInt = 1
    """Passes over each rollout."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    policy_loss: str = "ppo"
    """ppo, dual-clip, two-sided, gspo, gmpo, cispo, sapo, dppo-tv, reinforce, clip-cov, kl-cov; or module:function."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """How far below 1 the policy ratio is followed; null: as the loss has it (ppo: 0.2)."""
    clip_high: NonNegativeFloat | None = None
    """How far above 1 the policy ratio is followed; null: as the loss has it (ppo: 0.2)."""
    loss_options: dict[str, float] = Field(default={})
    """Other options of the policy loss by name, for example {max_ratio: 3.0} of dual-clip."""
    high_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tokens that the policy learns from: those where it is least certain."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_target: PositiveFloat | None = None
    """Entropy per token that the bonus aims at: its weight moves by entropy_step, and is not applied above it."""
    entropy_step: PositiveFloat = 0.005
    """How much the weight of the bonus changes after each optimizer step, with entropy_target."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the initial model; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased"] = "k3"
    """Estimator of that divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence is penalised."""
    kl_target: PositiveFloat | None = None
    """Divergence per token that kl_coef adapts to; null: kl_coef stays as it is."""
    kl_horizon: PositiveInt = 10000
    """Sequences over which an adaptive kl_coef may grow by a fifth."""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant", "token-sum"] = (
        "token-mean"
    )
    """Mean over all tokens, or over sequences of their mean, sum, or sum over max_new_tokens; or the sum of all."""
    rollout_correction: Literal[
        "none", "token-truncate", "token-mask", "sequence-mask", "sequence-truncate", "bypass"
    ] = "none"
    """What makes up for a sampler whose probabilities differ: importance weights, or (bypass) ratios against it."""
    correction_low: NonNegativeFloat | None = None
    """Lowest importance weight that the masks keep; null: as the correction has it."""
    correction_high: PositiveFloat | None = None
    """Highest importance weight; null: as the correction has it."""

    @field_validator("advantage")
    @classmethod
    def _advantage(cls, value: str) -> str:
        return _name_or_function(value, ADVANTAGES)

    @field_validator("policy_loss")
    @classmethod
    def _policy_loss(cls, value: str) -> str:
        return _name_or_function(value, POLICY_LOSSES)

    @model_validator(mode="after")
    def _coefficients(self) -> Self:
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0: give a kl_coef to start from")
        if self.entropy_target is not None and not self.entropy_coef:
            raise ValueError("entropy_target adapts entropy_coef, which is 0: give an entropy_coef to start from")
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator: k1 in the loss holds nothing back, its gradient is 0 on average: take kl_in: reward, or "
                "another estimator"
            )
        if self.filter_by is not None and not self.skip_equal_groups:
            raise ValueError("filter_by names what skip_equal_groups compares: set that, too")
        if self.max_refills and not self.skip_equal_groups:
            raise ValueError("max_refills replaces the prompts that skip_equal_groups leaves out: set that, too")
        bounds = {self.correction_low, self.correction_high} - {None}
        if self.rollout_correction in ("none", "bypass") and bounds:
            raise ValueError(f"rollout_correction: {self.rollout_correction} has no bounds: leave them out")
        return self


def _name_or_function(value: str, names: tuple[str, ...]) -> str:
    if value not in names and ":" not in value:
        raise ValueError(f"expected one of {', '.join(names)}, or module:function for your own")
    return value
