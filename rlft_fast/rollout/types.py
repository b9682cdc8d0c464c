"""What every rollout takes and returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Args:
        n: completions per prompt.
        max_new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        stop: texts that end a completion, as an end token does; the tokens that make up the text are kept.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


class Completion(NamedTuple):
    """One sampled answer. Its tokens are the sampler's own; they are never made again from text."""

    token_ids: list[int]
    """Sampled tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each under the distribution it was sampled from."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop text was sampled; length: cut off at ``max_new_tokens``."""


class Rollout(Protocol):
    """Samples from the policy as it was at the last `sync`. Every method is to be called by all ranks together.

    Attributes:
        weight_version: number of syncs.
    """

    weight_version: int

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Samples ``params.n`` completions of each of this rank's prompts, which are token ids.

        The draws follow from torch's random state.
        """
        ...

    def sync(self) -> None:
        """Takes over the policy's weights as they are now."""
        ...

    def sleep(self) -> None:
        """Gives its device memory to the training; the next `sync` takes it back."""
        ...

    def close(self) -> None:
        """Ends it for good."""
        ...
