"""The reward of a sample is a weighted sum of parts. Each part comes from one reward function."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlft_fast.rewards.scoring import RewardFunction, Text, compute_rewards

Parts = dict[str, float | None]


class WeightedRewards:
    """Several reward functions with weights.

    Args:
        functions: reward functions by name.
        weights: weight of each function, under the same names.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        assert functions.keys() == weights.keys()
        self.functions = dict(functions)
        self.weights = dict(weights)

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[Parts]:
        """Rewards of B samples by function name. Arguments and errors are as in `compute_rewards`."""
        scored = {
            name: compute_rewards(function, prompts, completions, completion_ids, columns)
            for name, function in self.functions.items()
        }
        return [{name: values[i] for name, values in scored.items()} for i in range(len(prompts))]


def weighted_sum(parts: Parts, weights: Mapping[str, float]) -> float | None:
    """Σ weight·part over the parts that are not None, as in TRL. The sum is None, which leaves the sample out, if no
    part is there, and NaN, which does the same, if a part is `FAILED`.
    """
    total: float | None = None
    for name, value in parts.items():
        if value is not None:
            total = (total or 0.0) + weights[name] * value
    return total


def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer_tokens: int) -> float:
    """Soft penalty of a long completion (arXiv 2503.14476), from 0 to 1.

    clamp((num_tokens - (max_new_tokens - buffer_tokens)) / buffer_tokens, 0, 1); 0 if `buffer_tokens` is 0.
    """
    if not buffer_tokens:
        return 0.0
    return min(max(num_tokens - (max_new_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)
