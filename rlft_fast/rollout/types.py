"""What every rollout takes and returns."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Args:
        n: completions per prompt.
        max_new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0


class Completion(NamedTuple):
    """One sampled answer. Its tokens are the sampler's own; they are never made again from text."""

    token_ids: list[int]
    """Sampled tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each under the distribution it was sampled from."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token was sampled; length: cut off at ``max_new_tokens``."""
