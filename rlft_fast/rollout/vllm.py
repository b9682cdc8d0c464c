"""Rollouts by vLLM, with a copy of the policy's weights that every `VLLMRollout.sync` renews.

colocated: one vLLM inside each training process. It takes whole weights from the engine's stream.
separate: one vLLM in a process beside each training process. It takes weights by vLLM's weight-transfer interface.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import PolicyModel
from rlft_fast.rollout.ends import end_token_ids, split_stop
from rlft_fast.rollout.failures import RolloutError, require_finite
from rlft_fast.rollout.types import Completion, SamplingParams, with_ties
from rlft_fast.rollout.vllm_engine import ColocatedEngine, check_vllm
from rlft_fast.rollout.vllm_separate import SeparateEngine
from rlft_fast.world import STOP, all_gather_ragged, any_rank, get_rank, require_agreement

T = TypeVar("T")


class VLLMRollout:
    """Samples by vLLM from the policy as it was at the last `sync`. All ranks call every method together.

    A vLLM that has died is started again once, with the current weights, and samples again with the same seeds: nothing
    is lost and nothing changes. Samples of one prompt share its blocks of the prefix cache. The cache is emptied with
    every change of the weights.

    Args:
        engine: the policy; its weights are sent in ``compute_dtype``.
        tokenizer: names the end tokens.
        config: how to sample, and the settings of vLLM.
        max_sequence_tokens: most tokens of a sequence, prompt and completion.

    Attributes:
        weight_version: of the weights that it samples from; every `sync` adds 1.

    Raises:
        ValueError: vLLM is missing, its version has not what is needed, or the settings do not fit the device.
        RolloutError: vLLM could not start: it does not know the model, or memory does not suffice, for instance.
    """

    def __init__(
        self, engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int
    ) -> None:
        check_vllm(config.vllm, engine.device)
        assert isinstance(engine.model, PolicyModel)
        self.engine = engine
        self.config = config
        self.max_sequence_tokens = max_sequence_tokens
        self.tokenizer = tokenizer
        self.eos_token_ids = end_token_ids(engine.model.model, tokenizer)
        self.weight_version = 0
        self.has_weights = False
        self._start()

    def _start(self) -> None:
        start = ColocatedEngine if self.config.vllm.process == "colocated" else SeparateEngine
        try:
            self.server = start(self.engine, self.config, self.max_sequence_tokens)
        except Exception as error:  # pydantic's, torch's and vLLM's own
            raise RolloutError(
                f"vLLM could not start with {self.engine.path}: {error}\n"
                "If memory is short: lower rollout.batch_size or rollout.vllm.cpu_cache_gib on a CPU; on a GPU lower "
                "rollout.vllm.gpu_memory_utilization or set actor.offload_between_phases"
            ) from error

    def sync(self) -> None:
        """Gives vLLM the policy's weights as they are now.

        Raises:
            RolloutError: vLLM did not take all of them, twice, or (``check_weights``) not as they were sent.
        """
        self.weight_version += 1
        _, failure = together(self._load)
        if failure is None:
            self._check_weights()
        else:
            self._restart()

    def _load(self) -> None:
        self.server.load(self.weight_version)
        self.has_weights = True

    def _restart(self) -> None:
        """Starts vLLM again, on all ranks, with the weights of now."""
        self.server.close()
        for part in (self._start, self._load):
            _, failure = together(part)
            if failure is not None:
                raise RolloutError(f"vLLM failed, and again when it was started again: {failure}") from failure
        self._check_weights()

    def _check_weights(self) -> None:
        if not self.config.vllm.check_weights:
            return
        checksums, failure = together(self.server.checksums)
        if failure is not None:
            raise RolloutError(f"vLLM has other weights than version {self.weight_version}: {failure}") from failure
        assert checksums is not None
        require_agreement(f"weights of version {self.weight_version}", checksums)

    def sleep(self) -> None:
        self.server.sleep()

    def close(self) -> None:
        self.server.close()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Samples ``params.n`` completions of each prompt.

        Args:
            prompts: token ids, this rank's own.
            params: number and length of the completions, what they are sampled from, and their ends.

        Returns:
            For each prompt its ``params.n`` completions, with log-probabilities under what was sampled from.

        Raises:
            ValueError: a prompt leaves no room for ``params.max_new_tokens``, or there was no `sync` yet.
            RolloutError: vLLM failed twice, or the policy's logits are not finite.
        """
        check_request(prompts, params.max_new_tokens, self.max_sequence_tokens, self.has_weights)
        seeds = torch.randint(2**62, (len(prompts),)).tolist()
        sample = partial(self._generate, prompts, seeds, params)
        groups, failure = _together_or_leave(sample)
        if failure is not None:
            self._restart()
            groups, failure = _together_or_leave(sample)
        if failure is not None:
            raise RolloutError(f"vLLM failed, was started again, and failed again: {failure}") from failure
        assert groups is not None
        require_finite(groups)
        return groups

    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: list[int], params: SamplingParams
    ) -> list[list[Completion]]:
        shared, start = gather_prompts(prompts, seeds, self.config.vllm.tensor_parallel)
        with STOP.alone() if self.config.vllm.tensor_parallel == 1 else nullcontext():
            outputs = self.server.generate(
                [{"prompt_token_ids": prompt} for prompt, _ in shared],
                [self._sampling_params(params, seed) for _, seed in shared],
            )
        own = outputs[start : start + len(prompts)]
        return [[completion_of(sample, self.weight_version) for sample in output.outputs] for output in own]

    def _sampling_params(self, params: SamplingParams, seed: int) -> Any:
        import vllm

        end_ids, stop = split_stop(params.stop, self.tokenizer)
        return vllm.SamplingParams(
            n=params.n,
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p,
            seed=seed,
            logprobs=self._num_logprobs(params),
            flat_logprobs=True,
            stop_token_ids=[*self.eos_token_ids, *end_ids],
            stop=list(stop),
            detokenize=bool(stop),
        )

    def _num_logprobs(self, params: SamplingParams) -> int:
        """Of how many tokens to ask for the log-probability, besides the sampled one: of all that are kept."""
        if params.support_size is None:
            return 0
        assert isinstance(self.engine.model, PolicyModel)
        vocab_size = self.engine.model.model.config.get_text_config().vocab_size
        return min(with_ties(params.support_size), vocab_size)


def check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, max_sequence_tokens: int, has_weights: bool
) -> None:
    """Raises ValueError on all ranks if it does on one, so that no rank waits for another that has given up.

    Args:
        prompts: this rank's own.
        max_new_tokens: most tokens of a completion.
        max_sequence_tokens: most tokens of a sequence that vLLM was started for.
        has_weights: whether there was a sync.
    """
    problem = None
    longest = max(map(len, prompts), default=0) + max_new_tokens
    if longest > max_sequence_tokens:
        problem = (
            f"a prompt and its completion may have {longest} tokens, vLLM was started for {max_sequence_tokens}: raise "
            "rollout.max_prompt_tokens or rollout.max_new_tokens"
        )
    if not has_weights:
        problem = "vLLM has no weights yet: call sync() before generate()"
    if any_rank(problem is not None):
        raise ValueError(problem or "vLLM cannot take the prompts of another process, which says why")


def gather_prompts(
    prompts: Sequence[Sequence[int]], seeds: list[int], num_ranks: int
) -> tuple[list[tuple[list[int], int]], int]:
    """The prompts and seeds of all ranks that share one generator, and where this rank's own begin among them.

    Neighbouring ranks share a generator. Each of them runs its part of the model for the prompts of all of them.
    """
    own = [(list(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    if num_ranks == 1:
        return own, 0
    tokens = torch.tensor([token for prompt, _ in own for token in prompt], dtype=torch.int64)
    columns = (tokens, torch.tensor([len(prompt) for prompt, _ in own]).long(), torch.tensor(seeds).long())
    tokens_by_rank, lengths_by_rank, seeds_by_rank = map(all_gather_ragged, columns)
    first = get_rank() // num_ranks * num_ranks
    shared: list[tuple[list[int], int]] = []
    start = 0
    for rank in range(first, first + num_ranks):
        start = len(shared) if rank == get_rank() else start
        parts = tokens_by_rank[rank].split(lengths_by_rank[rank].tolist())
        shared += zip((part.tolist() for part in parts), seeds_by_rank[rank].tolist(), strict=True)
    return shared, start


def completion_of(sample: Any, weight_version: int) -> Completion:
    """Converts a sample of vLLM to a completion.

    For each token vLLM returns the id and log-probability of the sampled token, then those of the most likely tokens if
    they were requested. Tokens that the sampler has cut off have log-probability -inf.
    """
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave up a sample: {sample.finish_reason}")
    tokens = list(sample.token_ids)
    shape = (len(tokens), -1 if tokens else 1)
    ids = torch.tensor(sample.logprobs.token_ids, dtype=torch.int32).view(shape)
    logprobs = torch.tensor(sample.logprobs.logprobs, dtype=torch.float64).view(shape)
    support = _support(ids, logprobs) if ids.shape[1] > 1 else None
    return Completion(tokens, logprobs[:, 0].tolist(), sample.finish_reason, weight_version, support)


def _support(ids: Tensor, logprobs: Tensor) -> Tensor:
    """The ids that the sampler has kept, with the sampled id, which is the first column, exactly once."""
    kept = ids.where(logprobs > -torch.inf, -1)
    sampled, likely = kept[:, :1], kept[:, 1:]
    is_known = (likely == sampled).any(1, keepdim=True)
    support = torch.cat([likely, sampled.masked_fill(is_known, -1)], dim=1)
    share = logprobs.roll(-1, 1).exp().where(support >= 0, 0).sum(1).min()
    if share < 0.999:
        warnings.warn(
            f"vLLM sampled a token among more equally likely tokens than it returned: the returned tokens have "
            f"a probability of {share:.4f} together, and the token's log-probability is taken over these",
            stacklevel=2,
        )
    return support


def _together_or_leave(sample: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """`together`, unless a signal ended it, which also ends the process of a separate vLLM where it reaches all."""
    outcome = together(sample)
    STOP.leave_together()
    return outcome


def together(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Calls the function on all ranks; returns its result, or an error if it raised on any rank."""
    try:
        result, failure = function(), None
    except Exception as error:
        result, failure = None, error
    if any_rank(failure is not None):
        return None, failure or RuntimeError("it failed in another process, which says why")
    return result, None
