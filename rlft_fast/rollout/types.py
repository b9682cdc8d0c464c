"""What every rollout takes and returns."""

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
        top_k: most tokens to choose among, the most likely ones; None: all.
        top_p: of these the fewest whose probabilities, of 1 in all, add up to this. Needs a `top_k`.
        stop: texts that end a completion, as an end token does; the tokens that make up the text are kept. One may be a
            special token by name.

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
        """Most tokens that one is sampled among; None: all of them. A greedy choice is the same among all."""
        return self.top_k if self.temperature > 0 else None


def with_ties(top_k: int) -> int:
    """Most ids that a support has where a sampler keeps all tokens as likely as the last one of ``top_k``.

    vLLM does (0.32, without Triton). bfloat16 logits are 2^-8 apart and often equal, a few per cent of ``top_k``.
    """
    return top_k + top_k // 4 + 8


class Completion(NamedTuple):
    """One sampled answer. Its tokens are the sampler's own; they are never made again from text."""

    token_ids: list[int]
    """Sampled tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each under the distribution it was sampled from: over `support`, where there is one."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop text was sampled; length: cut off at ``max_new_tokens``."""
    weight_version: int = 0
    """Of the weights that it was sampled from."""
    support: Tensor | None = None
    """(tokens, K) int32 ids that each token was sampled among, -1 fills up; None: the whole vocabulary."""


class Rollout(Protocol):
    """Samples from the policy as it was at the last `sync`. Every method is to be called by all ranks together.

    Attributes:
        weight_version: of the weights that it samples from; every `sync` adds 1.
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
