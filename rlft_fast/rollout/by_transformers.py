"""Decodes any model by transformers' ``generate``."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlft_fast.models import Ends, PolicyModel
from rlft_fast.rollout.sampling import Prompts, Sampled, choose
from rlft_fast.rollout.types import SamplingParams

PAD_TOKEN_ID = 0  # any id with an embedding will do; the tokenizer's own padding token may have no embedding


def decode_by_transformers(model: PolicyModel, prompts: Prompts, params: SamplingParams, ends: Ends) -> list[Sampled]:
    """Samples completions, in their order. A completion may go on beyond its end.

    A round ends when a quarter of its rows have ended, and the next round continues the others alone.
    """
    counts = torch.tensor(prompts.counts, device=prompts.ids_GL.device)
    cache = model.prefill(prompts.ids_GL, prompts.mask_GL, counts)
    ids, mask = (x.repeat_interleave(counts, 0) for x in (prompts.ids_GL, prompts.mask_GL))
    prompt_length, limit = ids.shape[1], ids.shape[1] + max(prompts.limits)
    limit_B = torch.tensor(prompts.limits, device=ids.device) + prompt_length
    uniform_BN = prompts.uniform_BN
    sampled = [Sampled() for _ in prompts.limits]
    running = sampled
    while running:
        first = ids.shape[1]
        sampler = _Sampler(params, uniform_BN)
        criteria = _RoundEnd(ends, prompt_length, limit_B)
        ids = model.generate(
            ids,
            mask,
            cache,
            synced_gpus=False,  # weights are gathered: ranks need not wait for each other
            stopping_criteria=StoppingCriteriaList([criteria]),
            logits_processor=LogitsProcessorList([sampler]),
            generation_config=GenerationConfig(
                max_length=limit,
                pad_token_id=PAD_TOKEN_ID,
                do_sample=False,  # `_Sampler` has chosen already
                # No end tokens: `_RoundEnd` knows them.
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
        left = (~criteria.ended_B).nonzero().squeeze(1)
        if cache is not None:
            cache.batch_select_indices(left)
        limit_B = limit_B[left]
        ids, mask = ids[left], pad(mask[left], (0, ids.shape[1] - first), value=1)
        uniform_BN = None if uniform_BN is None else uniform_BN[left, ids.shape[1] - first :]
        running = [running[row] for row in left.tolist()]
    return sampled


class _RoundEnd(StoppingCriteria):
    """Stops a round when a quarter of its rows have ended: by an end token, a stop text in the completion, or a limit.

    transformers' own criterion of texts also searches the prompt.

    Args:
        ends: of completions.
        prompt_length: tokens of each row before its completion.
        limit_B: (B,) most tokens of each row, prompt and padding included, on the rows' device.

    Attributes:
        ended_B: (B,) bool, whether a row has ended.
    """

    def __init__(self, ends: Ends, prompt_length: int, limit_B: Tensor) -> None:
        self.ends = ends
        self.end_ids = torch.tensor(sorted(ends.token_ids), dtype=torch.int64, device=limit_B.device)
        self.prompt_length = prompt_length
        self.limit_B = limit_B
        self.ended_B = torch.zeros_like(limit_B, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:  # pyrefly: ignore
        self.ended_B |= torch.isin(input_ids[:, -1], self.end_ids) | (self.limit_B <= input_ids.shape[1])
        if self.ends.texts:
            rows = zip(input_ids[:, self.prompt_length :].tolist(), self.ended_B.tolist(), strict=True)
            ended = [has_ended or self.ends.has_text(row) for row, has_ended in rows]
            self.ended_B |= torch.tensor(ended, device=self.ended_B.device)
        return self.ended_B | (4 * self.ended_B.sum() >= len(self.ended_B))


class _Sampler(LogitsProcessor):
    """Chooses each token, and passes it to ``generate`` as the only largest score.

    Keeps the log-probability of each token and the ids that it was drawn among, instead of (B, V) scores.

    Args:
        params: see `choose`.
        uniform_BN: (B, N) float64, a number in [0, 1) for each of the next N tokens; not read at temperature 0.
    """

    def __init__(self, params: SamplingParams, uniform_BN: Tensor | None) -> None:
        self.params = params
        self.uniform_BN = uniform_BN
        self.logprobs: list[Tensor] = []
        self.supports: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        row_B = torch.arange(len(scores), device=scores.device)
        uniform_B = None if self.uniform_BN is None else self.uniform_BN[:, len(self.logprobs)]
        choice = choose(scores, row_B, uniform_B, self.params)
        self.logprobs.append(choice.logprob_B)
        if choice.support_BK is not None:
            self.supports.append(choice.support_BK)
        return scores.zero_().scatter_(1, choice.token_B.unsqueeze(1), 1.0)

    def logprobs_BN(self) -> Tensor:
        """(B, N) float32 log-probabilities of the N tokens that were chosen."""
        return torch.stack(self.logprobs, dim=1)

    def support_BNK(self) -> Tensor:
        """(B, N, K) int32, the ids that each token was drawn among, most likely first; -1 where there are fewer."""
        return torch.stack(self.supports, dim=1)
