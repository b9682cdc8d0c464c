"""The reward of a sample as a weighted sum of parts, each from a function of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlft_fast.rewards.scoring import RewardFunction, compute_rewards

Parts = dict[str, float | None]


class WeightedRewards:
    """Several reward functions with weights.

    Args:
        functions: by name.
        weights: of the same names.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        assert functions.keys() == weights.keys()
        self.functions = dict(functions)
        self.weights = dict(weights)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[Parts]:
        """What each function says of each sample; arguments and errors as in `compute_rewards`."""
        scored = {
            name: compute_rewards(function, prompts, completions, completion_ids, columns)
            for name, function in self.functions.items()
        }
        return [{name: values[i] for name, values in scored.items()} for i in range(len(prompts))]


def weighted_sum(parts: Parts, weights: Mapping[str, float]) -> float | None:
    """Σ weight·part; None, which leaves the sample out, where a part is None."""
    total = 0.0
    for name, value in parts.items():
        if value is None:
            return None
        total += weights[name] * value
    return total


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """How far a completion reaches into the last `buffer` of `max_tokens` tokens, from 0 to 1 (arXiv 2503.14476)."""
    return min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0) if buffer else 0.0
