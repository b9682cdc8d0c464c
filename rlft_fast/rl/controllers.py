"""Coefficients that change during a run. What they hold is a few numbers, which a checkpoint keeps as JSON."""

import math
from dataclasses import dataclass

from torch import Tensor

_SMALLEST_STD = 1e-10
"""Of the mean: below, the standard deviation is the rounding of float64 sums over up to 10^12 equal rewards."""


@dataclass
class AdaptiveKL:
    """Moves the weight of the KL penalty until the divergence is at its target (arXiv 1909.08593).

        e = clip(KL/target - 1, -0.2, 0.2),    coef ← coef·(1 + e·min(n/horizon, 1))

    Attributes:
        coef: weight of the penalty.
        target: mean divergence per token, in nats.
        horizon: sequences over which the weight may grow by a fifth.
    """

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, num_sequences: int) -> None:
        """Takes note of the mean divergence per token of `num_sequences` sequences.

        NaN, of a step that is left out, changes nothing: no later step could be learned with such a weight.
        """
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * min(num_sequences / self.horizon, 1.0)  # beyond 5 horizons it would be negative


@dataclass
class AdaptiveEntropy:
    """Moves the weight of the entropy bonus by a fixed step until the entropy is at its target (arXiv 2505.22312).

    Attributes:
        coef: weight of the bonus at the moment: 0 while the entropy is above the target.
        target: mean entropy per token, in nats.
        step: by which the weight moves after each optimizer step.
        weight: of the bonus when it applies.
    """

    coef: float
    target: float
    step: float
    weight: float = 0.0

    def __post_init__(self) -> None:
        self.weight = self.weight or self.coef

    def update(self, entropy: float) -> None:
        """Takes note of the mean entropy of an optimizer step; NaN, of a step that is left out, changes nothing."""
        if math.isnan(entropy):
            return
        self.weight = max(self.weight + (self.step if entropy < self.target else -self.step), 0.0)
        self.coef = self.weight if entropy <= self.target else 0.0


@dataclass
class RunningReward:
    """Mean and standard deviation of all rewards of a run so far, as TRL's PPO and OpenRLHF keep them.

    Batches are joined as in Chan, Golub & LeVeque (1983), in float64.

    Attributes:
        count: rewards so far.
        mean: of the rewards.
        squares: sum of the squares of their differences from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, reward_B: Tensor) -> None:
        """Takes note of (B,) finite rewards."""
        if not len(reward_B):
            return
        reward_B = reward_B.double()
        total, mean = self.count + len(reward_B), reward_B.mean().item()
        gap = mean - self.mean
        self.squares += (reward_B - mean).square().sum().item() + gap**2 * self.count * len(reward_B) / total
        self.mean += gap * len(reward_B) / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation of the rewards so far; 0 where they are equal."""
        std = (self.squares / max(self.count, 1)) ** 0.5
        return std if std > _SMALLEST_STD * abs(self.mean) else 0.0
