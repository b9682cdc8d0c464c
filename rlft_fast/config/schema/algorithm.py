"""How the policy learns from a rollout."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from rlft_fast.config.base import Section, rule
from rlft_fast.config.paths import FunctionName, known_or_function

GROUP_ADVANTAGES = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline", "opo", "gpg", "optimal-token")
ADVANTAGES = ("gae", *GROUP_ADVANTAGES, "reinforce++", "remax", "none")
POLICY_LOSSES = (
    "ppo", "dual-clip", "two-sided", "gspo", "gmpo", "cispo", "sapo", "dppo-tv", "reinforce", "clip-cov", "kl-cov",
)  # fmt: skip


class AlgorithmConfig(Section):
    """How the policy learns from a rollout. docs/methods.md describes the methods."""

    advantage: Annotated[FunctionName, known_or_function(*ADVANTAGES)] = Field(
        default="grpo", description=f"Advantage estimator: {', '.join(ADVANTAGES)}, or module:function for your own."
    )
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token. Read by gae and reinforce++."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation. Read by gae."""
    skip_equal_groups: bool = False
    """Leave out a prompt if all its samples have the same reward (before length penalties): it would teach nothing."""
    filter_by: FunctionName | None = None
    """Part of the reward, as samples.jsonl names it, that skip_equal_groups and curriculum compare; null: reward."""
    max_refills: NonNegativeInt = 0
    """With skip_equal_groups: most extra rollouts per step, sampled until prompts_per_step prompts are left."""
    first_samples: int | None = Field(default=None, ge=2)
    """With skip_equal_groups: sample so many completions of a prompt first, the others if rewards differ; null: all."""
    curriculum: float = Field(default=0.0, ge=0, lt=1)
    """Share of prompts to draw again from earlier prompts, by the variance of their rewards; 0: the data in order."""
    mask_truncated: bool = False
    """Learn nothing from completions cut off at max_new_tokens. Their rewards still count in their group."""
    epochs: Annotated[PositiveInt, Field(le=10_000)] = 1
    """Passes over each rollout."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    routing_replay: bool = False
    """Update with the experts that routers chose when log π_old was computed, for a mixture of experts.

    The batch holds a byte for each token, layer and chosen expert, or two with more than 256 experts in a layer."""
    policy_loss: Annotated[FunctionName, known_or_function(*POLICY_LOSSES)] = Field(
        default="ppo", description=f"Policy loss: {', '.join(POLICY_LOSSES)}, or module:function for your own."
    )
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """How far below 1 the policy ratio may move before it is clipped; null: the default of the loss (ppo: 0.2)."""
    clip_high: NonNegativeFloat | None = None
    """How far above 1 the policy ratio may move before it is clipped; null: the default of the loss (ppo: 0.2)."""
    loss_options: dict[str, float] = Field(default={})
    """Other options of the policy loss by name, for example {max_ratio: 3.0} for dual-clip."""
    high_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """The policy learns from this share of the tokens: the tokens with the highest entropy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_target: PositiveFloat | None = None
    """Target entropy per token. The bonus is applied below it, and entropy_step moves its weight; null: no target."""
    entropy_step: PositiveFloat = 0.005
    """With entropy_target: change of the bonus's weight after each optimizer step."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the initial model; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased"] = "k3"
    """Estimator of the KL divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence is penalised."""
    kl_target: PositiveFloat | None = None
    """Target KL divergence per token, to which kl_coef adapts; null: kl_coef stays constant."""
    kl_horizon: PositiveInt = 10000
    """With kl_target: kl_coef grows by at most a fifth over so many sequences."""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant", "token-sum"] = (
        "token-mean"
    )
    """How token losses become one loss; constant: the mean over sequences of token sum / max_new_tokens."""
    rollout_correction: Literal[
        "none", "token-truncate", "token-mask", "sequence-mask", "sequence-truncate", "bypass"
    ] = "none"
    """Correction if the sampler's probabilities differ from training: importance weights, or ratios to it (bypass).
    With rollout.max_staleness the default is token-truncate."""
    correction_low: NonNegativeFloat | None = None
    """Lowest importance weight that a mask keeps; null: the default of the correction."""
    correction_high: PositiveFloat | None = None
    """Highest importance weight; null: the default of the correction."""

    @rule
    def _coefficients(self) -> Iterator[str]:
        if self.kl_target is not None and not self.kl_coef:
            yield "kl_target adapts kl_coef, which is 0: give a kl_coef to start from"
        if self.entropy_target is not None and not self.entropy_coef:
            yield "entropy_target adapts entropy_coef, which is 0: give an entropy_coef to start from"
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "kl_estimator: k1 in the loss has no effect, because its gradient is 0 on average: set kl_in: reward, "
                "or another estimator"
            )
        if self.kl_coef and self.kl_in == "reward" and self.advantage == "none":
            yield "kl_in: reward has no effect with advantage: none, which learns from no reward: set kl_in: loss"
        if self.filter_by is not None and not (self.skip_equal_groups or self.curriculum):
            yield "filter_by names what skip_equal_groups and curriculum compare: set one of them, too"
        if self.max_refills and not self.skip_equal_groups:
            yield "max_refills replaces the prompts that skip_equal_groups leaves out: set skip_equal_groups, too"
        if self.first_samples is not None and not self.skip_equal_groups:
            yield "first_samples leaves out samples of prompts that skip_equal_groups leaves out: set it, too"
        if self.policy_loss == "reinforce":
            yield from self._without_a_ratio()
        bounds = {self.correction_low, self.correction_high} - {None}
        if self.rollout_correction in ("none", "bypass") and bounds:
            yield (
                f"rollout_correction: {self.rollout_correction} has no bounds: leave out "
                "correction_low and correction_high"
            )

    def _without_a_ratio(self) -> Iterator[str]:
        """Messages about what needs a policy loss that weighs tokens of another policy."""
        instead = "take a loss with a ratio, such as ppo or cispo"
        if self.epochs > 1:
            yield (
                f"epochs is {self.epochs}, but policy_loss: reinforce has no ratio, and learns from tokens of an "
                f"earlier policy as if they were its own: set epochs: 1, or {instead}"
            )
        if self.rollout_correction == "bypass":
            yield (
                "rollout_correction: bypass has no effect with policy_loss: reinforce, which has no ratio: set "
                f"token-truncate, or {instead}"
            )
