"""Samples by transformers' ``generate`` with the policy itself. There is no second copy of the weights to load."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby, islice

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
from rlft_fast.models import PolicyModel, end_token_ids, padded_attention, split_stop
from rlft_fast.rollout.types import Answers, Completion, Request, SamplingParams, Span

_PAD_TOKEN_ID = 0  # any id with an embedding will do; the tokenizer's own padding token may have no embedding


@dataclass
class _Sampled:
    """The tokens of one completion that are sampled so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    """(n, K) of each round, if tokens are drawn among K."""


class HFGenerator:
    """Samples from a policy on its own device. Sharded weights must be gathered around `generate`.

    Samples of one prompt share its prefill: the prompt runs once and its key-value cache is repeated. Prompts are
    padded on the left. When a quarter of the completions of a batch have ended, they leave the batch and its cache.

    A model that cannot be packed has a cache of its own, which may hold states that see padding. Its batches have
    prompts of one length, every sample runs its prompt, and the others run again when some leave the batch.

    Args:
        model: the policy.
        tokenizer: names an end token, and decodes completions to find stop texts.
        batch_size: most completions generated at once. Where it is below the samples of a prompt, the prompt runs
            several times.
    """

    name = "transformers"

    def __init__(self, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.weight_version = 0
        self.eos_token_ids = end_token_ids(model.model, tokenizer)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request, see `Generator.generate`. No request is refused."""
        # The stance: compiled blocks would compile again for the cache.
        is_padded = bool(self.model.padded_because)
        lengths = [len(request.token_ids) * is_padded for request in requests]
        order = sorted(range(len(requests)), key=lengths.__getitem__)
        batches = _batches([requests[i] for i in order], self.batch_size, one_length=is_padded)
        with _generation_mode(self.model), torch.compiler.set_stance("force_eager"):
            found = [completion for batch in batches for completion in self._generate(batch, params)]
        return [found[i] for i in sorted(range(len(order)), key=order.__getitem__)]

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

    def _generate(self, batch: list[list[Request]], params: SamplingParams) -> list[Completion]:
        """The completions of a batch: groups of requests with equal token ids.

        A round ends when a quarter of its rows have ended, and the next round continues the others alone.
        """
        requests = [*chain.from_iterable(batch)]
        end_ids, stop = split_stop(params.stop, self.tokenizer)
        end_ids = [*self.eos_token_ids, *end_ids]
        prompt_ids, prompt_mask = self._pad([group[0].token_ids for group in batch])
        counts = torch.tensor([*map(len, batch)], device=prompt_ids.device)
        cache = self.model.prefill(prompt_ids, prompt_mask, counts)
        ids, mask = (x.repeat_interleave(counts, 0) for x in (prompt_ids, prompt_mask))
        longest = max(request.max_new_tokens for request in requests)
        prompt_length, limit = ids.shape[1], ids.shape[1] + longest
        limit_B = torch.tensor([prompt_length + request.max_new_tokens for request in requests], device=ids.device)
        seeds = [request.seed for request in requests]
        uniform_BN = _uniform_numbers(seeds, longest, ids.device) if params.temperature else None
        sampled = [_Sampled() for _ in requests]
        running = sampled
        while running:
            first = ids.shape[1]
            sampler = _Sampler(params, uniform_BN)
            ends = _Ends(self.tokenizer, prompt_length, end_ids, stop, limit_B)
            ids = self.model.generate(
                ids,
                mask,
                cache,
                synced_gpus=False,  # weights are gathered: ranks need not wait for each other
                stopping_criteria=StoppingCriteriaList([ends]),
                logits_processor=LogitsProcessorList([sampler]),
                generation_config=GenerationConfig(
                    max_length=limit,
                    pad_token_id=_PAD_TOKEN_ID,
                    do_sample=False,  # `_Sampler` has chosen already
                    # No end tokens: `_Ends` knows them.
                ),
            )
            # transformers may run one more pass and undo it, so far on MPS alone.
            assert len(sampler.logprobs) == ids.shape[1] - first, "generate() ran more passes than it returned tokens"
            rows = zip(running, ids[:, first:].tolist(), sampler.logprobs_BN().tolist(), strict=True)
            for row, token_ids, logprobs in rows:
                row.token_ids += token_ids
                row.logprobs += logprobs
            if sampler.supports:
                for row, support in zip(running, sampler.support_BNK().cpu(), strict=True):
                    row.supports.append(support)
            if ids.shape[1] == limit:
                break
            left = (~ends.ended_B).nonzero().squeeze(1)
            if cache is not None:
                cache.batch_select_indices(left)
            limit_B = limit_B[left]
            ids, mask = ids[left], pad(mask[left], (0, ids.shape[1] - first), value=1)
            uniform_BN = None if uniform_BN is None else uniform_BN[left, ids.shape[1] - first :]
            running = [running[row] for row in left.tolist()]
        rows = zip(sampled, requests, strict=True)
        return [self._completion(row, request.max_new_tokens, end_ids, stop) for row, request in rows]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[_PAD_TOKEN_ID] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, mask

    def _completion(
        self, sampled: _Sampled, max_new_tokens: int, end_ids: list[int], stop: tuple[str, ...]
    ) -> Completion:
        """Other rows of the batch may have had a larger limit."""
        tokens, logprobs = sampled.token_ids[:max_new_tokens], sampled.logprobs
        ends = [i for i, token in enumerate(tokens) if token in end_ids][:1]
        if stop:
            counts = range(1, len(tokens) + 1)
            complete = bisect_left(counts, True, key=lambda count: _has_stop(self.tokenizer, stop, tokens[:count]))
            ends += [complete] if complete < len(tokens) else []
        length = min(ends) + 1 if ends else len(tokens)
        support = torch.cat(sampled.supports)[:length] if sampled.supports else None
        reason = "stop" if ends else "length"
        return Completion(tokens[:length], logprobs[:length], reason, (Span(length, self.weight_version),), support)


def _batches(requests: Sequence[Request], batch_size: int, *, one_length: bool) -> Iterator[list[list[Request]]]:
    """Groups of neighbouring requests with equal token ids, in batches of at most so many requests.

    With `one_length`, a batch has token ids of one length alone.
    """
    batch: list[list[Request]] = []
    for _, equal in groupby(requests, key=lambda request: [*request.token_ids]):
        for group in _cut(equal, batch_size):
            is_other = one_length and batch and len(batch[0][0].token_ids) != len(group[0].token_ids)
            if batch and (is_other or sum(map(len, batch)) + len(group) > batch_size):
                yield batch
                batch = []
            batch.append(group)
    if batch:
        yield batch


def _cut(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    rest = iter(requests)
    while group := [*islice(rest, size)]:
        yield group


class _Ends(StoppingCriteria):
    """Stops a round when a quarter of its rows have ended: by an end token, a stop text in the completion, or a limit.

    transformers' own criterion of texts also searches the prompt. Only the last tokens are decoded first: decoding the
    whole row after each token would be quadratic in its length. A stop text that special tokens stretch beyond the last
    tokens is missed here, and `HFGenerator._completion` cuts the row later.

    Args:
        tokenizer: decodes rows.
        prompt_length: tokens of each row before its completion.
        end_ids: end tokens.
        stop: stop texts.
        limit_B: (B,) most tokens of each row, prompt and padding included, on the rows' device.

    Attributes:
        ended_B: (B,) bool, whether a row has ended.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, end_ids: list[int], stop: tuple[str, ...],
        limit_B: Tensor,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.end_ids = torch.tensor(end_ids, dtype=torch.int64, device=limit_B.device)
        self.stop = stop
        # A token has at least one byte; 8 tokens of context.
        self.span = 8 + max((len(text.encode()) for text in stop), default=0)
        self.limit_B = limit_B
        self.ended_B = torch.zeros_like(limit_B, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:  # pyrefly: ignore
        self.ended_B |= torch.isin(input_ids[:, -1], self.end_ids) | (self.limit_B <= input_ids.shape[1])
        if self.stop:
            rows = zip(input_ids[:, self.prompt_length :].tolist(), self.ended_B.tolist(), strict=True)
            ended = [has_ended or self._has_text(row) for row, has_ended in rows]
            self.ended_B |= torch.tensor(ended, device=self.ended_B.device)
        return self.ended_B | (4 * self.ended_B.sum() >= len(self.ended_B))

    def _has_text(self, row: list[int]) -> bool:
        return all(_has_stop(self.tokenizer, self.stop, tokens) for tokens in (row[-self.span :], row))


def _has_stop(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], tokens: list[int]) -> bool:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))  # as vLLM does
    return any(wanted in text for wanted in stop)


def _uniform_numbers(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """(B, count) float64 in [0, 1). A row depends on its seed alone."""
    rows = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]  # torch's keeps 32 bits of a seed
    return torch.from_numpy(np.stack([row.random(count) for row in rows])).to(device)


class _Sampler(LogitsProcessor):
    """Chooses each token, and keeps its log-probability and the ids that it was drawn among instead of (B, V) scores.

    Draws with one uniform number per row. ``generate`` would sample by torch.multinomial, which draws one exponential
    number per row and vocabulary entry: on two CPU cores the draws took a quarter of a rollout (128 rows, V = 49152).
    The sampler passes its choice to ``generate`` as the only largest score.

    Args:
        params: temperature, top-k and top-p. At temperature 0 the most likely token of the vocabulary is taken.
        uniform_BN: (B, N) float64, a number in [0, 1) for each of the next N tokens; not read at temperature 0.
    """

    def __init__(self, params: SamplingParams, uniform_BN: Tensor | None) -> None:
        self.params = params
        self.uniform_BN = uniform_BN
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
        if self.uniform_BN is None:
            chosen = probability.argmax(-1, keepdim=True)
        else:
            chosen = draw(probability, self.uniform_BN[:, len(self.logprobs)])
        self.logprobs.append(probability.gather(1, chosen).squeeze(1).log())
        return z_BV.zero_().scatter_(1, chosen if ids is None else ids.gather(1, chosen), 1.0)

    def logprobs_BN(self) -> Tensor:
        """(B, N) float32 log-probabilities of the N tokens that were chosen."""
        return torch.stack(self.logprobs, dim=1)

    def support_BNK(self) -> Tensor:
        """(B, N, K) int32, the ids that each token was drawn among, most likely first; -1 where there are fewer."""
        return torch.stack(self.supports, dim=1)


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
