"""Rollouts by transformers' ``generate``, with the policy itself: no second copy of the weights, nothing to sync."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlft_fast.models import PolicyModel, packed_implementation, padded_implementation
from rlft_fast.rollout.types import Completion, SamplingParams


class HFRollout:
    """Samples from a policy on its own device.

    Samples of one prompt share its prefill: the prompt runs once and its key-value cache is repeated. This is the only
    place where sequences are padded, on the left.

    Args:
        model: the policy.
        tokenizer: names the end and padding tokens.
        batch_size: completions generated at once.
        phase: gives the context in which the policy is on its device.
    """

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        phase: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.phase = phase
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.weight_version = 0
        self.eos_token_ids = end_token_ids(model.model, tokenizer)
        pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_token_ids[0]
        self.pad_token_id = int(pad_token_id)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Samples ``params.n`` completions of each prompt.

        Args:
            prompts: token ids.
            params: number, length and temperature of the completions.

        Returns:
            For each prompt its ``params.n`` completions.
        """
        prompts_at_once = max(self.batch_size // params.n, 1)
        completions: list[list[Completion]] = []
        with self.phase(), _generation_mode(self.model), _gathered(self.model):
            for start in range(0, len(prompts), prompts_at_once):
                flat = self._generate(prompts[start : start + prompts_at_once], params)
                completions += [flat[i : i + params.n] for i in range(0, len(flat), params.n)]
        return completions

    def sync(self) -> None:
        """The weights are the policy's own."""
        self.weight_version += 1

    def sleep(self) -> None:
        """Holds no memory between calls."""

    def close(self) -> None:
        """Holds nothing."""

    def _generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        sampler = _Sampler(params.temperature)
        sequences, prompt_length = self.model.generate(
            *self._pad(prompts),
            num_samples=params.n,
            synced_gpus=False,  # weights are gathered: ranks need not wait for each other
            stopping_criteria=StoppingCriteriaList([_StopTexts(self.tokenizer, params.stop)] if params.stop else []),
            logits_processor=LogitsProcessorList([sampler]),
            generation_config=GenerationConfig(
                max_new_tokens=params.max_new_tokens,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
                do_sample=False,  # the sampler has chosen
            ),
        )
        rows = zip(sequences[:, prompt_length:].tolist(), sampler.logprobs().tolist(), strict=True)
        return [self._completion(tokens, logprobs, params.stop) for tokens, logprobs in rows]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, mask

    def _completion(self, tokens: list[int], logprobs: list[float], stop: tuple[str, ...]) -> Completion:
        ends = [i for i, token in enumerate(tokens) if token in self.eos_token_ids][:1]
        if stop:
            counts = range(1, len(tokens) + 1)
            complete = bisect_left(counts, True, key=lambda count: _has_stop(self.tokenizer, stop, tokens[:count]))
            ends += [complete] if complete < len(tokens) else []
        if ends:
            return Completion(tokens[: min(ends) + 1], logprobs[: min(ends) + 1], "stop")
        return Completion(tokens, logprobs, "length")


class _StopTexts(StoppingCriteria):
    """Stops a row when a text is complete in what was generated; transformers' own looks into the prompt, too."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.prompt_length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:  # pyrefly: ignore
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1  # it is asked after every token, first after the first
        rows = input_ids[:, self.prompt_length :].tolist()
        return torch.tensor([_has_stop(self.tokenizer, self.stop, row) for row in rows], device=input_ids.device)


def _has_stop(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], tokens: list[int]) -> bool:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))  # as vLLM does
    return any(wanted in text for wanted in stop)


class _Sampler(LogitsProcessor):
    """Chooses the tokens, and keeps the log-probability of each under the whole softmax: (B,) floats, not (B, V).

    Draws one uniform number per row. torch.multinomial, with which ``generate`` would sample, draws one exponential
    number per row and vocabulary entry: on two CPU cores that was a quarter of a rollout (128 rows, V = 49152). The
    choice reaches ``generate`` as the only largest score.

    Args:
        temperature: of the softmax; 0 takes the most likely token.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probability = (scores.float() / (self.temperature or 1.0)).softmax(-1)
        token = _draw(probability) if self.temperature else probability.argmax(-1, keepdim=True)
        self.columns.append(probability.gather(1, token).squeeze(1).log())
        return probability.zero_().scatter_(1, token, 1.0)

    def logprobs(self) -> Tensor:
        """(B, new tokens), once generation is over."""
        return torch.stack(self.columns, dim=1)


def _draw(probability_BV: Tensor, width: int = 256) -> Tensor:
    """(B, 1) tokens, one per row: the block of columns that a uniform number falls into, then the token within it.

    Sums run in float64: one running float32 sum would lose the probabilities of 50,000 unlikely tokens.
    """
    batch, vocab = probability_BV.shape
    blocks = pad(probability_BV, (0, -vocab % width)).view(batch, -1, width)
    ends = blocks.sum(-1).double().cumsum(-1)
    point = torch.rand(batch, 1, dtype=torch.float64, device=ends.device) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True)  # right: never a block, or a token, of probability 0
    inside = blocks[torch.arange(batch, device=ends.device), block.squeeze(1)].double().cumsum(-1)
    size = inside[:, -1:]
    rest = point - ends.gather(1, block) + size
    token = torch.searchsorted(inside, rest.clamp(min=0), right=True)
    last = (inside < size).sum(-1, keepdim=True)  # where rounding puts the point on the block's very end
    return block * width + token.minimum(last)


@contextmanager
def _generation_mode(model: PolicyModel) -> Iterator[None]:
    """Padded attention while generating, without the sampling defaults that come with the model; then all as before.

    A repetition penalty or a temperature among these defaults would change the distribution that is sampled from.
    """
    defaults, model.model.generation_config = model.model.generation_config, GenerationConfig()
    model.model.set_attn_implementation(padded_implementation(model.model.config))
    try:
        yield
    finally:
        model.model.set_attn_implementation(packed_implementation(model.model.config))
        model.model.generation_config = defaults


@contextmanager
def _gathered(model: PolicyModel) -> Iterator[None]:
    """Whole weights on every rank while generating, where they are sharded.

    They are gathered once and not once per token, and no collective runs meanwhile: ranks may have different numbers
    of prompts and stop at different lengths.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not model, recurse=False)  # the root's backward needs it at once


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends a completion: all end tokens of the model's generation defaults, and the tokenizer's.

    Raises:
        ValueError: there is none.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    known = {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not known:
        raise ValueError("neither the model nor its tokenizer names an end token: set eos_token_id in one of them")
    return sorted(known)
