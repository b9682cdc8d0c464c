"""Requests to a generator, its completions, and the methods of every generator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data import Images
from rlft_fast.engine import WeightStream


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Args:
        n: completions per prompt, see `make_requests`.
        max_new_tokens: most tokens of a completion, see `make_requests`.
        temperature: 0 is greedy.
        top_k: sample among this many most likely tokens; None: among all tokens.
        min_p: of the `top_k` tokens keep those with at least this share of the most likely token's probability. Needs
            a `top_k`.
        top_p: of the tokens left keep the fewest whose probabilities, relative to the tokens left, add up to this.
            Needs a `top_k`.
        stop: texts that end a completion, as an end token does. The tokens of the text are kept. A text may also be
            the name of a special token.
        structured: ``regex``, ``json_schema`` or ``grammar`` that the text of a completion obeys, see `RolloutConfig`.

    Raises:
        ValueError: a `min_p` or `top_p` without a `top_k`, or one of them out of range.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    structured: Mapping[Literal["regex", "json_schema", "grammar"], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: expected at least 0 and at most 1")
        for name, value, cuts in (("min_p", self.min_p, self.min_p > 0), ("top_p", self.top_p, self.top_p < 1)):
            if cuts and self.top_k is None:
                raise ValueError(f"{name} is {value} without a top_k: bound the number of tokens, for example by 100")

    @property
    def support_size(self) -> int | None:
        """Most tokens that a token is sampled among; None: the whole vocabulary, as in a greedy choice."""
        return self.top_k if self.temperature > 0 else None


def with_ties(top_k: int) -> int:
    """Most ids of a support if the sampler also keeps all tokens as likely as the last of ``top_k``.

    vLLM keeps them (0.32, without Triton). bfloat16 logits are 2^-8 apart, so a few per cent of ``top_k`` are equal.
    """
    return top_k + top_k // 4 + 8


class RequestError(ValueError):
    """A generator refuses a request, before it samples."""


class Span(NamedTuple):
    """Consecutive tokens of a completion that the same weights sampled."""

    num_tokens: int
    weight_version: int


class Completion(NamedTuple):
    """One sampled answer. The tokens are the sampler's own and never come from tokenizing text."""

    token_ids: list[int]
    """Sampled tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was sampled from: over `support`, if given."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop text was sampled; length: cut off at ``max_new_tokens``."""
    spans: tuple[Span, ...] = ()
    """Versions of the weights, in the order of the tokens. The spans cover all tokens; empty: version 0 for all."""
    support: Tensor | None = None
    """(tokens, K) int32 ids that each token was sampled among, padded by -1; None: the whole vocabulary."""
    mask: list[bool] | None = None
    """For each token whether the policy sampled it, or an environment wrote it; None: the policy sampled all."""


Seeds = Sequence[Sequence[int]]
"""For each prompt one seed per sample, in [0, 2^63)."""


def draw_seeds(num_prompts: int, num_samples: int) -> Seeds:
    """Seeds from torch's random state."""
    return torch.randint(2**62, (num_prompts, num_samples)).tolist()


def sample_seeds(seed: int, step: int, rows: Sequence[int], num_samples: int) -> Seeds:
    """Seeds that depend on nothing but (seed, step, row, number of the sample), wherever the sample is drawn.

    Args:
        seed: of the run.
        step: counts from 0.
        rows: numbers of the prompts, counted through all prompts of the step.
        num_samples: samples per prompt.
    """

    return [[seed_of(seed, step, row, number) for number in range(num_samples)] for row in rows]


def seed_of(*numbers: int) -> int:
    """A seed in [0, 2^63) that depends on these numbers, each at least 0, and on nothing else."""
    (word,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(word) >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to be sampled.

    Args:
        row: number of the prompt. Requests of one row go to one server, which then has the prompt's prefix.
        token_ids: to be continued.
        seed: decides every draw, in [0, 2^63).
        max_new_tokens: most tokens of the completion.
        images: that the image tokens stand for.
        episode: number of the episode that the completion is a turn of. A later request of the episode may begin with
            these tokens and the completion, so that a generator may keep what it has computed. None: none does.
    """

    row: int
    token_ids: Sequence[int]
    seed: int
    max_new_tokens: int
    images: Images | None = None
    episode: int | None = None

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Keys of the images' parts, which tell requests apart whose token ids are equal."""
        return () if self.images is None else self.images.keys


def make_requests(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Seeds, images: Sequence[Images | None] = ()
) -> list[Request]:
    """``params.n`` requests for each prompt, one behind the other; `Request.row` counts the prompts.

    Args:
        prompts: token ids.
        params: how many completions of how many tokens.
        seeds: of each completion.
        images: of each prompt, None where it has none; empty: no prompt has.

    Raises:
        ValueError: there are more or fewer seeds than completions.
    """
    if [*map(len, seeds)] != [params.n] * len(prompts):
        raise ValueError(f"expected {params.n} seeds for each of {len(prompts)} prompts, got {[*map(len, seeds)]}")
    return [
        Request(row=row, token_ids=prompt, seed=seed, max_new_tokens=params.max_new_tokens, images=shown)
        for row, (prompt, own, shown) in enumerate(zip(prompts, seeds, images or [None] * len(prompts), strict=True))
        for seed in own
    ]


Answers = list["Completion | RequestError"]
"""For each request its completion, or the error that refuses it."""


def without_refusals(answers: Answers) -> list[Completion]:
    """The completions. Raises the first RequestError among the answers."""
    for answer in answers:
        if isinstance(answer, RequestError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Completion)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledModel:
    """The model that a generator samples from, without its weights.

    Args:
        path: folder of its configuration.
        dtype: dtype of its weights, in which a generator takes them over and computes.
        device: device of the process that trains it.
        vocab_size: number of tokens that it has logits for.
        eos_token_ids: tokens that end a completion.
        adapter: entries of PEFT's ``adapter_config.json``, where a generator takes the weights of the folder once and
            the policy's adapters at each sync; None: it takes all weights, with the adapters merged.
        rope_limit: most tokens that vLLM may be started for. Started for more, it rotates all tokens as beyond this
            length, and training does not. None: any.
    """

    path: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    eos_token_ids: list[int]
    adapter: Mapping[str, Any] | None = None
    rope_limit: int | None = None


class Generator(Protocol):
    """Answers requests of this process alone. No method waits for another rank; `Rollout` coordinates the ranks.

    Which requests share a batch depends on the requests, never on time.

    Attributes:
        name: in messages.
    """

    name: str

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Takes over the weights of a version; afterwards the generator is awake.

        Args:
            weights: names, dtypes, shapes, and pieces to be read once. The caller reads the rest. None: the generator
                samples from the policy itself.
            version: goes into the completions.
        """
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request. A request that the generator cannot take is refused alone.

        Args:
            requests: those of equal prompts, one behind the other, share a prefill.
            params: how to sample; each request has its own limit of tokens.

        Raises:
            RequestError: the generator cannot take any request.
        """
        ...

    def checksums(self) -> dict[str, str]:
        """The checksum of each weight as the generator received it."""
        ...

    def sleep(self) -> None:
        """Frees device memory until the next `load`."""
        ...

    def close(self) -> None:
        """Ends the generator for good."""
        ...
