"""Samples with the policy itself, as transformers runs it. There is no second copy of the weights to load."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlft_fast.engine import FSDPEngine, WeightStream
from rlft_fast.engine.sharding import gathered, narrowed
from rlft_fast.models import (
    Ends,
    PolicyModel,
    RowCache,
    end_token_ids,
    padded_attention,
    require_positions,
    sees_ahead,
    split_stop,
)
from rlft_fast.rollout.beginnings import Beginning, KeptBeginnings
from rlft_fast.rollout.by_transformers import PAD_TOKEN_ID, decode_by_transformers
from rlft_fast.rollout.decoding import decode
from rlft_fast.rollout.graphs import DecodeGraphs
from rlft_fast.rollout.sampling import Prompts, Sampled, uniform_numbers
from rlft_fast.rollout.types import Answers, Completion, Request, SamplingParams, Span


class HFGenerator:
    """Samples from a policy on its own device. `gathered_policy` has to gather sharded weights around `generate`.

    A prompt runs once for all its samples. Prompts are padded on the left. A model that `decodes_in_place` runs once
    what all prompts of a call begin with, and samples as long as they are equal (`decode`). Of a turn of an episode it
    runs the tokens that the turns before had not, if these are among the `batch_size` episodes whose keys and values
    are kept from one call of `generate` to the next. transformers' ``generate`` decodes any other model.

    Sequences are at most as long as those that can be trained, see `require_positions`.

    A model that cannot be packed has a cache of its own, which may hold states that see padding. Its batches have
    prompts of one length, every sample runs its prompt, and the others run again when some leave the batch. A model
    that counts positions from its cache (Llama 4) has batches of one length, too.

    Args:
        model: the policy.
        tokenizer: names an end token, and decodes completions to find stop texts.
        batch_size: most completions generated at once. Where it is below the samples of a prompt, the prompt runs
            several times.
        graphs: of the model's decode steps; None: steps are launched.
    """

    name = "transformers"

    def __init__(
        self, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, batch_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.graphs = graphs
        self.weight_version = 0
        self._kept = KeptBeginnings(batch_size)
        self.eos_token_ids = end_token_ids(model.model.generation_config, tokenizer)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request, see `Generator.generate`. No request is refused alone.

        Raises:
            ValueError: a request may be longer than the model's positions (`require_positions`).
        """
        longest = max((len(request.token_ids) + request.max_new_tokens for request in requests), default=0)
        require_positions(self.model.backbone, longest)
        one_length = self.model.sees_padding
        self._kept.keep_only({request.episode for request in requests})
        # The stance: compiled blocks would compile again for the cache.
        with _generation_mode(self.model), torch.compiler.set_stance("force_eager"):
            groups = _equal_prompts(requests)
            self._kept.common = self._run_beginning([requests[group[0]] for group in groups])
            groups = self._in_order(groups, requests, by_length=one_length)
            asked = [[requests[i] for i in group] for group in groups]
            batches = _batches(asked, self.batch_size, one_length=one_length)
            found = [completion for batch in batches for completion in self._generate(batch, params)]
        self._kept.common = None
        order = [*chain.from_iterable(groups)]
        return [found[i] for i in sorted(range(len(order)), key=order.__getitem__)]

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Takes the version alone: the weights are the policy's own. What others have computed is dropped."""
        self.weight_version = version
        self.sleep()

    def checksums(self) -> dict[str, str]:
        """Nothing: no weights were received."""
        return {}

    def sleep(self) -> None:
        """Drops what is kept of episodes, and recorded steps."""
        self._kept.keep_only(())
        if self.graphs is not None:
            self.graphs.drop()

    def close(self) -> None:
        """The same."""
        self.sleep()

    def _run_beginning(self, requests: Sequence[Request]) -> Beginning | None:
        """Runs what requests with different prompts begin with, where it is worth while."""
        ids = self._kept.new_beginning(requests) if self.model.decodes_in_place else []
        if not ids:
            return None
        device = next(self.model.parameters()).device
        cache = RowCache(self.model.model, 1, len(ids), keeps_all=True)
        ids_1L = torch.tensor([[*ids, PAD_TOKEN_ID]], device=device)  # the last never runs
        self.model.prefill_rows(ids_1L, torch.ones_like(ids_1L), cache)
        return Beginning(ids, cache.row(0, padding=0))

    def _in_order(self, groups: list[list[int]], requests: Sequence[Request], *, by_length: bool) -> list[list[int]]:
        """Groups of requests, those behind others that run more tokens: a batch runs as many of each prompt."""
        known = [max(self._kept.num_known(requests[i]) for i in group) for group in groups]
        if not (by_length or any(known)):
            return groups
        num_new = [len(requests[group[0]].token_ids) - n for group, n in zip(groups, known, strict=True)]
        return [groups[i] for i in sorted(range(len(groups)), key=num_new.__getitem__)]

    def _generate(self, batch: list[list[Request]], params: SamplingParams) -> list[Completion]:
        """The completions of a batch: groups of requests with equal prompts."""
        requests = [*chain.from_iterable(batch)]
        end_ids, stop = split_stop(params.stop, self.tokenizer)
        ends = Ends(self.tokenizer, [*self.eos_token_ids, *end_ids], stop)
        prompts = self._prompts(batch, params)
        if self.model.decodes_in_place:
            sampled = decode(self.model, prompts, params, ends, self.graphs)
        else:
            sampled = decode_by_transformers(self.model, prompts, params, ends)
        completions = []
        for row, request in zip(sampled, requests, strict=True):
            completions.append(self._completion(row, request.max_new_tokens, ends))
            if row.states is not None and completions[-1].finish_reason == "stop":
                self._kept.add(request, row.token_ids[:-1], row.states)
        return completions

    def _prompts(self, batch: list[list[Request]], params: SamplingParams) -> Prompts:
        device = next(self.model.parameters()).device
        prompts = [list(group[0].token_ids) for group in batch]
        limits = [request.max_new_tokens for group in batch for request in group]
        seeds = [request.seed for group in batch for request in group]
        width = max(map(len, prompts))
        num_new = max(len(group[0].token_ids) - max(map(self._kept.num_known, group)) for group in batch)
        images = [group[0].images for group in batch]
        runs_whole = any(images) and sees_ahead(self.model.backbone)  # an image does not run in two parts
        taken = [self._kept.take(group) for group in batch]
        begun = [None if runs_whole else states for states in taken]
        requests = [*chain.from_iterable(batch)] if self.model.decodes_in_place and not runs_whole else []
        asked = [i for i, r in enumerate(requests) if r.episode is not None][: self._kept.room]
        return Prompts(
            ids_GL=torch.tensor([[PAD_TOKEN_ID] * (width - len(p)) + p for p in prompts], device=device),
            mask_GL=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device),
            counts=[*map(len, batch)],
            limits=limits,
            uniform_BN=uniform_numbers(seeds, max(limits), device) if params.temperature else None,
            images=images,
            begun=begun,
            num_begun=0 if runs_whole else width - num_new,
            keeps=[i in asked for i in range(len(limits))],
        )

    def _completion(self, sampled: Sampled, max_new_tokens: int, ends: Ends) -> Completion:
        """Other rows of the batch may have had a larger limit."""
        tokens = sampled.token_ids[:max_new_tokens]
        last = ends.first(tokens)
        length, reason = (len(tokens), "length") if last is None else (last + 1, "stop")
        support = torch.cat(sampled.supports)[:length] if sampled.supports else None
        spans = (Span(length, self.weight_version),)
        return Completion(tokens[:length], sampled.logprobs[:length], reason, spans, support)


@contextmanager
def gathered_policy(engine: FSDPEngine, dtype: torch.dtype) -> Iterator[None]:
    """Inside, each rank has the policy's whole weights in this dtype, and samples. All ranks must enter it together."""
    with engine.eval_mode(), gathered(engine.model), narrowed(engine.model, dtype):
        yield


def _equal_prompts(requests: Sequence[Request]) -> list[list[int]]:
    """The numbers of the requests, together where prompts are equal, in order of first appearance."""
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(((*request.token_ids,), request.image_keys), []).append(i)
    return [*groups.values()]


def _batches(
    groups: Sequence[Sequence[Request]], batch_size: int, *, one_length: bool
) -> Iterator[list[list[Request]]]:
    """Groups of requests with equal prompts, in batches of at most so many requests.

    With `one_length`, a batch has token ids of one length alone.
    """
    batch: list[list[Request]] = []
    for equal in groups:
        for group in _cut(equal, batch_size):
            is_other = one_length and batch and len(batch[0][0].token_ids) != len(group[0].token_ids)
            if batch and (is_other or sum(map(len, batch)) + len(group) > batch_size):
                yield batch
                batch = []
            batch.append(group)
    if batch:
        yield batch


def _cut(requests: Sequence[Request], size: int) -> list[list[Request]]:
    return [[*requests[i : i + size]] for i in range(0, len(requests), size)]


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
