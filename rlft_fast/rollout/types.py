"""Requests to a rollout, its completions, and the methods that every rollout has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Args:
        n: completions per prompt.
        max_new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        top_k: sample among this many most likely tokens; None: among all tokens.
        top_p: of the `top_k` tokens keep the fewest whose probabilities, relative to the `top_k`, add up to this.
            Needs a `top_k`.
        stop: texts that end a completion, as an end token does. The tokens of the text are kept. A text may also be
            the name of a special token.

    Raises:
        ValueError: a `top_p` without a `top_k`, or one of them out of range.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected more than 0 and at most 1")
        if self.top_p < 1 and self.top_k is None:
            raise ValueError(f"top_p is {self.top_p} without a top_k: bound the number of tokens, for example by 100")

    @property
    def support_size(self) -> int | None:
        """Most tokens that a token is sampled among; None: the whole vocabulary, as in a greedy choice."""
        return self.top_k if self.temperature > 0 else None


def with_ties(top_k: int) -> int:
    """Most ids of a support if the sampler also keeps all tokens as likely as the last of ``top_k``.

    vLLM keeps them (0.32, without Triton). bfloat16 logits are 2^-8 apart, so a few per cent of ``top_k`` are equal.
    """
    return top_k + top_k // 4 + 8


class Completion(NamedTuple):
    """One sampled answer. The tokens are the sampler's own and never come from tokenizing text."""

    token_ids: list[int]
    """Sampled tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was sampled from: over `support`, if given."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop text was sampled; length: cut off at ``max_new_tokens``."""
    weight_version: int = 0
    """Version of the weights that sampled the answer."""
    support: Tensor | None = None
    """(tokens, K) int32 ids that each token was sampled among, padded by -1; None: the whole vocabulary."""


class Rollout(Protocol):
    """Samples from the policy as it was at the last `sync`. All ranks must call every method together.

    Attributes:
        weight_version: version of the weights to sample from; every `sync` adds 1.
    """

    weight_version: int

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Samples ``params.n`` completions of each of this rank's prompts. Torch's random state decides the draws.

        Args:
            prompts: token ids.
            params: how to sample.
        """
        ...

    def sync(self) -> None:
        """Takes over the policy's present weights."""
        ...

    def sleep(self) -> None:
        """Frees device memory for the training until the next `sync`."""
        ...

    def close(self) -> None:
        """Ends the generator for good."""
        ...
