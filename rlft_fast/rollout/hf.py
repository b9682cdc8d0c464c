"""Samples by transformers' ``generate`` with the policy itself. There is no second copy of the weights to load."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlft_fast.engine import WeightStream
from rlft_fast.models import PolicyModel, padded_attention
from rlft_fast.rollout.ends import end_token_ids, split_stop
from rlft_fast.rollout.types import Completion, SamplingParams, Seeds, Span

_PAD_TOKEN_ID = 0  # any id with an embedding will do; the tokenizer's own padding token may have no embedding


class HFGenerator:
    """Samples from a policy on its own device. Sharded weights must be gathered around `generate`.

    Samples of one prompt share its prefill: the prompt runs once and its key-value cache is repeated. Prompts are
    padded on the left; nowhere else are sequences padded.

    Args:
        model: the policy.
        tokenizer: names an end token, and decodes completions to find stop texts.
        batch_size: number of completions generated at once.
    """

    name = "transformers"

    def __init__(self, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.weight_version = 0
        self.eos_token_ids = end_token_ids(model.model, tokenizer)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Seeds
    ) -> list[list[Completion]]:
        """Samples ``params.n`` completions of each prompt, see `Generator.generate`."""
        prompts_at_once = max(self.batch_size // params.n, 1)
        completions: list[list[Completion]] = []
        with _generation_mode(self.model):
            for start in range(0, len(prompts), prompts_at_once):
                part = slice(start, start + prompts_at_once)
                flat = self._generate(prompts[part], params, [*chain.from_iterable(seeds[part])])
                completions += [flat[i : i + params.n] for i in range(0, len(flat), params.n)]
        return completions

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Takes the version alone: the weights are the policy's own."""
        self.weight_version = version

    def checksums(self) -> dict[str, str]:
        """Nothing: no weights were received."""
        return {}

    def sleep(self) -> None:
        """Does nothing: no memory is held between calls."""

    def close(self) -> None:
        """Does nothing: nothing is held."""

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        sampler = _Sampler(params, seeds)
        end_ids, stop = split_stop(params.stop, self.tokenizer)
        end_ids = [*self.eos_token_ids, *end_ids]
        with torch.compiler.set_stance("force_eager"):  # compiled blocks would compile again for the cache
            sequences, prompt_length = self.model.generate(
                *self._pad(prompts),
                num_samples=params.n,
                synced_gpus=False,  # weights are gathered: ranks need not wait for each other
                stopping_criteria=StoppingCriteriaList([_StopTexts(self.tokenizer, stop)] if stop else []),
                logits_processor=LogitsProcessorList([sampler]),
                generation_config=GenerationConfig(
                    max_new_tokens=params.max_new_tokens,
                    eos_token_id=end_ids,
                    pad_token_id=_PAD_TOKEN_ID,
                    do_sample=False,  # `_Sampler` has chosen already
                ),
            )
        tokens_BL, logprobs_BL, support_BLK = sequences[:, prompt_length:].tolist(), *sampler.results()
        supports = [None] * len(tokens_BL) if support_BLK is None else support_BLK.cpu()
        rows = zip(tokens_BL, logprobs_BL.tolist(), supports, strict=True)
        return [self._completion(*row, end_ids, stop) for row in rows]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[_PAD_TOKEN_ID] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, mask

    def _completion(
        self,
        tokens: list[int],
        logprobs: list[float],
        support: Tensor | None,
        end_ids: list[int],
        stop: tuple[str, ...],
    ) -> Completion:
        ends = [i for i, token in enumerate(tokens) if token in end_ids][:1]
        if stop:
            counts = range(1, len(tokens) + 1)
            complete = bisect_left(counts, True, key=lambda count: _has_stop(self.tokenizer, stop, tokens[:count]))
            ends += [complete] if complete < len(tokens) else []
        length = min(ends) + 1 if ends else len(tokens)
        support = None if support is None else support[:length]
        reason = "stop" if ends else "length"
        return Completion(tokens[:length], logprobs[:length], reason, (Span(length, self.weight_version),), support)


class _StopTexts(StoppingCriteria):
    """Stops a row when its completion contains a stop text. transformers' own criterion also searches the prompt.

    Only the last tokens are decoded first: decoding the whole row after each token would be quadratic in its length. A
    stop text that special tokens stretch beyond the last tokens is missed here, and `_completion` cuts the row later.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.span = 8 + max(len(text.encode()) for text in stop)  # a token has at least one byte; 8 tokens of context
        self.prompt_length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:  # pyrefly: ignore
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1  # the first call comes after the first new token
        rows = input_ids[:, self.prompt_length :].tolist()
        return torch.tensor([self._ends(row) for row in rows], device=input_ids.device)

    def _ends(self, row: list[int]) -> bool:
        return all(_has_stop(self.tokenizer, self.stop, tokens) for tokens in (row[-self.span :], row))


def _has_stop(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], tokens: list[int]) -> bool:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))  # as vLLM does
    return any(wanted in text for wanted in stop)


class _Sampler(LogitsProcessor):
    """Chooses each token, and keeps its log-probability and the ids that it was drawn among instead of (B, V) scores.

    Draws one uniform number per row, from the row's own generator. ``generate`` would sample by torch.multinomial,
    which draws one exponential number per row and vocabulary entry: on two CPU cores the draws took a quarter of a
    rollout (128 rows, V = 49152). The sampler passes its choice to ``generate`` as the only largest score.

    Args:
        params: temperature, top-k and top-p. At temperature 0 the most likely token of the vocabulary is taken.
        seeds: (B,) of the rows. A row's draws depend on no other row.
    """

    def __init__(self, params: SamplingParams, seeds: Sequence[int]) -> None:
        self.params = params
        self.uniform_BL: Tensor | None = None
        if params.temperature:
            rows = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]  # torch's keeps 32 bits of a seed
            self.uniform_BL = torch.from_numpy(np.stack([row.random(params.max_new_tokens) for row in rows]))
        self.logprobs: list[Tensor] = []
        self.supports: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        params = self.params
        z_BV = scores.float() / (params.temperature or 1.0)
        z, ids = z_BV, None
        if params.support_size is not None:
            z, ids = most_likely(z_BV, params.support_size, params.top_p)
            self.supports.append(ids.where(z > -torch.inf, -1).int())
        probability = z.softmax(-1)
        chosen = probability.argmax(-1, keepdim=True) if self.uniform_BL is None else self._draw(probability)
        self.logprobs.append(probability.gather(1, chosen).squeeze(1).log())
        return z_BV.zero_().scatter_(1, chosen if ids is None else ids.gather(1, chosen), 1.0)

    def _draw(self, probability: Tensor) -> Tensor:
        assert self.uniform_BL is not None
        self.uniform_BL = self.uniform_BL.to(probability.device)  # copies once
        return draw(probability, self.uniform_BL[:, len(self.logprobs)])

    def results(self) -> tuple[Tensor, Tensor | None]:
        """(B, N) log-probabilities of all N new tokens, and the (B, N, K) ids that they were drawn among."""
        supports = torch.stack(self.supports, dim=1) if self.supports else None
        return torch.stack(self.logprobs, dim=1), supports


def most_likely(z_BV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens that top-k and then top-p keep, most likely first.

    Never more than ``top_k`` tokens are kept: of equal logits at the cut, some are dropped.

    Args:
        z_BV: logits, after the temperature.
        top_k: most tokens to keep.
        top_p: keep the fewest tokens with at least this probability, relative to the tokens that top-k has kept.

    Returns:
        (B, K) logits, -inf for tokens that top-p has dropped, and (B, K) ids.
    """
    z_BK, ids_BK = z_BV.topk(min(top_k, z_BV.shape[1]))
    if top_p == 1:
        return z_BK, ids_BK
    left_BK = z_BK.softmax(-1).flip(-1).cumsum(-1).flip(-1)  # probability of each token and all less likely ones
    is_cut = left_BK <= 1 - top_p
    is_cut[:, 0] = False
    return z_BK.masked_fill(is_cut, -torch.inf), ids_BK


def draw(probability_BV: Tensor, uniform_B: Tensor, width: int = 256) -> Tensor:
    """Draws (B, 1) tokens, one per row. A uniform number selects a block of columns, then a token in the block.

    Running sums are float64: a single float32 sum would lose the probabilities of 50,000 unlikely tokens.
    """
    batch, vocab = probability_BV.shape
    blocks = pad(probability_BV, (0, -vocab % width)).view(batch, -1, width)
    ends = blocks.sum(-1).double().cumsum(-1)
    point = uniform_B.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True)  # right: never a block, or a token, of probability 0
    block = block.clamp(max=ends.shape[1] - 1)  # NaN is beyond all blocks; `Rollout` reports it
    inside = blocks[torch.arange(batch, device=ends.device), block.squeeze(1)].double().cumsum(-1)
    size = inside[:, -1:]
    rest = point - ends.gather(1, block) + size
    token = torch.searchsorted(inside, rest.clamp(min=0), right=True)
    last = (inside < size).sum(-1, keepdim=True)  # bounds a point that rounding puts on the end of the block
    return block * width + token.minimum(last)


@contextmanager
def _generation_mode(model: PolicyModel) -> Iterator[None]:
    """Inside, the model attends to padded sequences and has no sampling defaults. Both are restored afterwards.

    A repetition penalty or temperature among the model's defaults would change the distribution that is sampled from.
    """
    defaults, model.model.generation_config = model.model.generation_config, GenerationConfig()
    try:
        with padded_attention(model.model):
            yield
    finally:
        model.model.generation_config = defaults
