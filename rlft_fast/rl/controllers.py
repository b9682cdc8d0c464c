"""Coefficients that change during a run. What they hold is a few numbers, which a checkpoint keeps as JSON."""

from dataclasses import dataclass


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
        """Takes note of the mean divergence per token of `num_sequences` sequences."""
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
        """Takes note of the mean entropy of an optimizer step."""
        self.weight = max(self.weight + (self.step if entropy < self.target else -self.step), 0.0)
        self.coef = self.weight if entropy <= self.target else 0.0
