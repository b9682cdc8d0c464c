"""Samples with the policy itself, as transformers runs it. There is no second copy of the weights to load."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, islice

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlft_fast.engine import WeightStream
from rlft_fast.models import PolicyModel, end_token_ids, padded_attention, split_stop
from rlft_fast.rollout.by_transformers import PAD_TOKEN_ID, decode_by_transformers
from rlft_fast.rollout.decoding import decode
from rlft_fast.rollout.ends import Ends
from rlft_fast.rollout.sampling import Prompts, Sampled, uniform_numbers
from rlft_fast.rollout.types import Answers, Completion, Request, SamplingParams, Span


class HFGenerator:
    """Samples from a policy on its own device. Sharded weights must be gathered around `generate`.

    A prompt runs once for all its samples. Prompts are padded on the left. A model that `decodes_in_place` runs samples
    once as long as they are equal (`decode`). transformers' ``generate`` decodes any other model.

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
        self.eos_token_ids = end_token_ids(model.model.generation_config, tokenizer)

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
        """The completions of a batch: groups of requests with equal prompts."""
        requests = [*chain.from_iterable(batch)]
        end_ids, stop = split_stop(params.stop, self.tokenizer)
        ends = Ends(self.tokenizer, [*self.eos_token_ids, *end_ids], stop)
        sample = decode if self.model.decodes_in_place else decode_by_transformers
        sampled = sample(self.model, self._prompts(batch, params), params, ends)
        rows = zip(sampled, requests, strict=True)
        return [self._completion(row, request.max_new_tokens, ends) for row, request in rows]

    def _prompts(self, batch: list[list[Request]], params: SamplingParams) -> Prompts:
        device = next(self.model.parameters()).device
        prompts = [list(group[0].token_ids) for group in batch]
        limits = [request.max_new_tokens for group in batch for request in group]
        seeds = [request.seed for group in batch for request in group]
        width = max(map(len, prompts))
        return Prompts(
            ids_GL=torch.tensor([[PAD_TOKEN_ID] * (width - len(p)) + p for p in prompts], device=device),
            mask_GL=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device),
            counts=[*map(len, batch)],
            limits=limits,
            uniform_BN=uniform_numbers(seeds, max(limits), device) if params.temperature else None,
            images=[group[0].images for group in batch],
        )

    def _completion(self, sampled: Sampled, max_new_tokens: int, ends: Ends) -> Completion:
        """Other rows of the batch may have had a larger limit."""
        tokens = sampled.token_ids[:max_new_tokens]
        last = ends.first(tokens)
        length, reason = (len(tokens), "length") if last is None else (last + 1, "stop")
        support = torch.cat(sampled.supports)[:length] if sampled.supports else None
        spans = (Span(length, self.weight_version),)
        return Completion(tokens[:length], sampled.logprobs[:length], reason, spans, support)


def _batches(requests: Sequence[Request], batch_size: int, *, one_length: bool) -> Iterator[list[list[Request]]]:
    """Groups of neighbouring requests with equal prompts, in batches of at most so many requests.

    With `one_length`, a batch has token ids of one length alone.
    """
    batch: list[list[Request]] = []
    for _, equal in groupby(requests, key=_prompt):
        for group in _cut(equal, batch_size):
            is_other = one_length and batch and len(batch[0][0].token_ids) != len(group[0].token_ids)
            if batch and (is_other or sum(map(len, batch)) + len(group) > batch_size):
                yield batch
                batch = []
            batch.append(group)
    if batch:
        yield batch


def _prompt(request: Request) -> tuple[list[int], str | None]:
    """What requests have in common that share a prefill. Image tokens are equal where images differ."""
    return [*request.token_ids], None if request.images is None else request.images.key


def _cut(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    rest = iter(requests)
    while group := [*islice(rest, size)]:
        yield group


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
