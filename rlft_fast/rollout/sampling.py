"""What is sampled, and how tokens are chosen from logits: each with one uniform number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.data import Images
from rlft_fast.models import RowStates
from rlft_fast.rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """G different prompts, padded on the left, of which B completions are sampled together.

    Args:
        ids_GL: (G, L) int64.
        mask_GL: (G, L) int64, 0 at padding.
        counts: completions of each prompt; those of a prompt follow each other.
        limits: most tokens of each completion.
        uniform_BN: (B, N) float64 in [0, 1), one for each token of a completion; None: the most likely token is taken.
        images: of each prompt, None where it has none.
        begun: of each prompt keys and values of its first tokens, or None; emptied once a cache has them.
        num_begun: tokens of a row that need not run, padding included.
        keeps: of each completion, whether its keys and values are asked for.
    """

    ids_GL: Tensor
    mask_GL: Tensor
    counts: list[int]
    limits: list[int]
    uniform_BN: Tensor | None
    images: list[Images | None]
    begun: list[RowStates | None]
    num_begun: int
    keeps: list[bool]


@dataclass
class Sampled:
    """The tokens of one completion that are sampled so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    """(n, K) each, on the CPU, if tokens are drawn among K."""
    states: RowStates | None = None
    """Keys and values of the prompt and of all tokens but the last, if they are asked for."""


class Choice(NamedTuple):
    """One token for each of B completions."""

    token_B: Tensor
    """(B,) int64."""
    logprob_B: Tensor
    """(B,) float32 log-probabilities under the distribution that was sampled from."""
    support_BK: Tensor | None
    """(B, K) int32 ids that each token was drawn among, most likely first, -1 where there are fewer; None: all."""


def uniform_numbers(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """(B, count) float64 in [0, 1). A row depends on its seed alone."""
    rows = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]  # torch's keeps 32 bits of a seed
    return torch.from_numpy(np.stack([row.random(count) for row in rows])).to(device)


def choose(logits_UV: Tensor, row_B: Tensor, uniform_B: Tensor | None, params: SamplingParams) -> Choice:
    """Chooses a token for each of B completions by the logits of its row.

    torch.multinomial would draw one exponential number per row and vocabulary entry: on two CPU cores the draws took a
    quarter of a rollout (128 rows, V = 49152).

    Args:
        logits_UV: (U, V) logits. They are overwritten.
        row_B: (B,) the row of each completion.
        uniform_B: (B,) float64 in [0, 1); not read at temperature 0.
        params: temperature, top-k, min-p and top-p. At temperature 0 the most likely token of the vocabulary is taken.
    """
    z = logits_UV.float()
    if params.temperature not in (0, 1):
        z.div_(params.temperature)
    ids_BK = support_BK = None
    if params.support_size is not None:
        z, ids_BK = (x[row_B] for x in most_likely(z, params.support_size, params.min_p, params.top_p))
        support_BK = ids_BK.where(z > -torch.inf, -1).int()
        row_B = torch.arange(len(row_B), device=row_B.device)
    probability = z.softmax(-1)
    place_B = probability.argmax(-1)[row_B] if uniform_B is None else draw(probability, row_B, uniform_B)
    logprob_B = probability[row_B, place_B].log()
    return Choice(place_B if ids_BK is None else ids_BK[row_B, place_B], logprob_B, support_BK)


def most_likely(z_UV: Tensor, top_k: int, min_p: float, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens that top-k, then min-p, then top-p keep, most likely first.

    Never more than ``top_k`` tokens are kept: of equal logits at the cut, some are dropped. vLLM cuts by min-p before
    top-k, which keeps the same tokens: min-p compares two probabilities of one softmax, whatever is left out of it.

    Args:
        z_UV: logits, after the temperature.
        top_k: most tokens to keep.
        min_p: keep the tokens with at least this share of the most likely token's probability.
        top_p: keep the fewest tokens with at least this probability, relative to the tokens that are left.

    Returns:
        (U, K) logits, -inf for tokens that min-p or top-p has dropped, and (U, K) ids.
    """
    z_UK, ids_UK = z_UV.topk(min(top_k, z_UV.shape[1]))
    if min_p > 0:
        z_UK = z_UK.masked_fill(z_UK - z_UK[:, :1] < math.log(min_p), -torch.inf)
    if top_p == 1:
        return z_UK, ids_UK
    left_UK = z_UK.softmax(-1).flip(-1).cumsum(-1).flip(-1)  # probability of each token and all less likely ones
    is_cut = left_UK <= 1 - top_p
    is_cut[:, 0] = False
    return z_UK.masked_fill(is_cut, -torch.inf), ids_UK


def draw(probability_UV: Tensor, row_B: Tensor, uniform_B: Tensor, width: int = 256) -> Tensor:
    """Draws (B,) tokens, each from its row. A uniform number selects a block of columns, then a token in the block.

    Running sums are float64: a single float32 sum would lose the probabilities of 50,000 unlikely tokens.
    """
    missing = -probability_UV.shape[1] % width
    padded = pad(probability_UV, (0, missing)) if missing else probability_UV  # pad would copy, even by 0 columns
    blocks = padded.view(len(padded), -1, width)
    ends = blocks.sum(-1).double().cumsum(-1)[row_B]
    point = uniform_B.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True)  # right: never a block, or a token, of probability 0
    block = block.clamp(max=ends.shape[1] - 1)  # NaN is beyond all blocks; `Rollout` reports it
    inside = blocks[row_B, block.squeeze(1)].double().cumsum(-1)
    size = inside[:, -1:]
    rest = point - ends.gather(1, block) + size
    token = torch.searchsorted(inside, rest.clamp(min=0), right=True)
    last = (inside < size).sum(-1, keepdim=True)  # bounds a point that rounding puts on the end of the block
    return (block * width + token.minimum(last)).squeeze(1)
