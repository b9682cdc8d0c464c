"""Rollouts by transformers' ``generate``, with the policy itself: no second copy of the weights, nothing to sync."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlft_fast.models import PACKED_ATTENTION, PolicyModel
from rlft_fast.rollout.types import Completion, SamplingParams


class HFRollout:
    """Samples from a policy on its own device.

    Samples of one prompt share its prefill: the prompt runs once and its key-value cache is repeated. This is the only
    place where sequences are padded, on the left.

    Args:
        model: the policy.
        tokenizer: names the end and padding tokens.
        batch_size: completions generated at once.
    """

    def __init__(self, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.eos_token_ids = _eos_token_ids(model.model, tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_token_ids[0]
        self.pad_token_id = int(pad)

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
        with _generation_mode(self.model), _gathered(self.model):
            for start in range(0, len(prompts), prompts_at_once):
                flat = self._generate(prompts[start : start + prompts_at_once], params)
                completions += [flat[i : i + params.n] for i in range(0, len(flat), params.n)]
        return completions

    def _generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        recorder = _LogprobRecorder(params.temperature)
        sequences, prompt_length = self.model.generate(
            *self._pad(prompts),
            num_samples=params.n,
            synced_gpus=False,  # weights are gathered: ranks need not wait for each other
            logits_processor=LogitsProcessorList([recorder]),
            generation_config=GenerationConfig(
                max_new_tokens=params.max_new_tokens,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
                # 0 switches top-k off (None means 50): the log-probabilities must be those of the whole softmax.
                **({"do_sample": True, "top_k": 0, "top_p": 1.0} if params.temperature > 0 else {"do_sample": False}),
            ),
        )
        rows = zip(sequences[:, prompt_length:].tolist(), recorder.logprobs(sequences).tolist(), strict=True)
        return [self._completion(tokens, logprobs) for tokens, logprobs in rows]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, mask

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        for i, token in enumerate(tokens):
            if token in self.eos_token_ids:
                return Completion(tokens[: i + 1], logprobs[: i + 1], "stop")
        return Completion(tokens, logprobs, "length")


class _LogprobRecorder(LogitsProcessor):
    """Applies the temperature and keeps the log-probability of what was then sampled: (B, V) floats, not (B, L, V)."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.pending: Tensor | None = None  # (B, V) log-probabilities whose sampled token is not known yet
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._settle(input_ids)
        self.pending = torch.log_softmax(scores.float() / (self.temperature or 1.0), dim=-1)
        return self.pending

    def logprobs(self, sequences: Tensor) -> Tensor:
        """(B, new tokens), once generation is over."""
        self._settle(sequences)
        return torch.stack(self.columns, dim=1)

    def _settle(self, input_ids: Tensor) -> None:
        if self.pending is not None:
            self.columns.append(self.pending.gather(1, input_ids[:, -1:]).squeeze(1))
            self.pending = None


@contextmanager
def _generation_mode(model: PolicyModel) -> Iterator[None]:
    """Padded attention while generating, without the sampling defaults that come with the model; then all as before.

    A repetition penalty or a temperature among these defaults would change the distribution that is sampled from.
    """
    defaults, model.model.generation_config = model.model.generation_config, GenerationConfig()
    model.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.model.set_attn_implementation(PACKED_ATTENTION)
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


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    known = {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not known:
        raise ValueError("neither the model nor its tokenizer names an end token: set eos_token_id in one of them")
    return sorted(known)
