"""From completions to a batch: gathered over the ranks, packed, with rewards and advantages. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.config import AlgorithmConfig, RewardConfig
from rlft_fast.data import Batch
from rlft_fast.rewards import Parts, overlong_penalty
from rlft_fast.rl import kl_estimate, mismatch_metrics
from rlft_fast.rollout import Completion
from rlft_fast.world import all_gather_ragged, all_reduce


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its reward, the parts that make it up, and the row of the prompt that it answers."""

    row: int
    completion: Completion
    reward: float | None
    parts: Parts = field(default_factory=dict)


def gather_samples(own: list[Sample], parts: Sequence[str] = ()) -> list[Sample]:
    """The samples of all ranks in rank order, the same list on every rank.

    They travel as tensors: tokens, log-probabilities, supports and a few numbers per sample, never as pickles.

    Args:
        own: the samples of this rank.
        parts: names of the parts that their rewards have, the same on every rank.
    """
    tokens = [token for sample in own for token in sample.completion.token_ids]
    logprobs = [value for sample in own for value in sample.completion.logprobs]
    stopped = [sample.completion.finish_reason == "stop" for sample in own]
    values = [value for sample in own for value in (sample.reward, *(sample.parts[name] for name in parts))]
    columns = (
        torch.tensor([sample.row for sample in own], dtype=torch.int64),
        torch.tensor([sample.completion.weight_version for sample in own], dtype=torch.int64),
        torch.tensor([len(sample.completion.token_ids) for sample in own], dtype=torch.int64),
        torch.tensor(stopped, dtype=torch.int64),
        torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64),
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(logprobs, dtype=torch.float64),
    )
    rows, versions, lengths, stops, numbers, token, logprob = (
        torch.cat(all_gather_ragged(column)).tolist() for column in columns
    )
    rewards = iter([None if number != number else number for number in numbers])
    supports = _gather_supports([sample.completion.support for sample in own], lengths)
    samples, end = [], 0
    for row, version, length, stop, support in zip(rows, versions, lengths, stops, supports, strict=True):
        start, end = end, end + length
        reason = "stop" if stop else "length"
        completion = Completion(token[start:end], logprob[start:end], reason, version, support)
        samples.append(Sample(row, completion, next(rewards), {name: next(rewards) for name in parts}))
    return samples


def _gather_supports(own: list[Tensor | None], lengths: list[int]) -> Sequence[Tensor | None]:
    """The supports of all ranks' completions of these lengths, all as wide as the widest; None if there are none."""
    given = [support for support in own if support is not None]
    widest = torch.tensor(max((support.shape[1] for support in given), default=0))
    width = int(all_reduce({"width_max": widest})["width_max"])
    if width == 0:
        return [None] * len(lengths)
    assert len(given) == len(own), "samples of one rollout are sampled alike"
    rows = [pad(support, (0, width - support.shape[1]), value=-1) for support in given]
    ids = torch.cat([torch.empty(0, width, dtype=torch.int32), *rows]).flatten()
    return torch.cat(all_gather_ragged(ids)).view(-1, width).split(lengths)


def penalize_length(samples: list[Sample], config: RewardConfig, max_new_tokens: int) -> list[Sample]:
    """The samples with the penalties for reaching the limit of tokens, or coming near it, taken from their rewards.

    A penalty is also a part of the reward, "length", which is negative.
    """

    def cost(completion: Completion) -> float:
        truncated = config.truncation_penalty * (completion.finish_reason == "length")
        near = overlong_penalty(len(completion.token_ids), max_new_tokens, config.overlong_buffer)
        return truncated + config.overlong_penalty * near

    def penalized(sample: Sample) -> Sample:
        taken = cost(sample.completion)
        if sample.reward is None or not taken:
            return sample
        return replace(sample, reward=sample.reward - taken, parts={**sample.parts, "length": -taken})

    return [penalized(sample) for sample in samples]


def rows_with_signal(samples: list[Sample], part: str | None = None) -> list[int]:
    """The rows of those prompts whose samples did not all get the same reward, in order.

    Args:
        samples: of one rollout, before `penalize_length`: wrong answers of different lengths are equally wrong.
        part: name of a part of the reward, to be compared instead.
    """
    compared: dict[int, set[float | None]] = {}
    for sample in samples:
        if sample.reward is not None:
            compared.setdefault(sample.row, set()).add(sample.reward if part is None else sample.parts[part])
    return sorted(row for row, values in compared.items() if len(values) > 1)


def build_batch(
    samples: list[Sample], prompt_ids: dict[int, list[int]], greedy: dict[int, float] | None = None
) -> Batch:
    """Packs the samples that have a reward; samples of one prompt form a group.

    Args:
        samples: of one rollout.
        prompt_ids: token ids of the prompt of each row.
        greedy: reward of the greedy answer to each row's prompt; samples of a row without one are left out.
    """
    kept = [sample for sample in samples if _is_scored(sample, greedy)]
    return Batch.from_samples(
        [prompt_ids[sample.row] for sample in kept],
        [sample.completion.token_ids for sample in kept],
        rollout_logprobs=[sample.completion.logprobs for sample in kept],
        supports=[sample.completion.support for sample in kept],
        rewards=[sample.reward for sample in kept if sample.reward is not None],
        groups=[sample.row for sample in kept],
    ).replace(baseline_B=None if greedy is None else torch.tensor([greedy[sample.row] for sample in kept]).float())


def _is_scored(sample: Sample, greedy: dict[int, float] | None) -> bool:
    return sample.reward is not None and (greedy is None or sample.row in greedy)


def leave_out_truncated(batch: Batch, samples: list[Sample], greedy: dict[int, float] | None = None) -> Batch:
    """The batch without the samples that the limit of tokens cut off; `build_batch` made it of the same arguments."""
    kept = [sample for sample in samples if _is_scored(sample, greedy)]
    return batch.select([i for i, sample in enumerate(kept) if sample.completion.finish_reason == "stop"])


def mini_batches(batch: Batch, config: AlgorithmConfig, seed: int) -> list[Batch]:
    """The batch of every optimizer step of a rollout: each epoch shuffles the prompts and cuts their samples anew.

    Samples of a prompt stay neighbours, since together they cost less (`rlft_fast.data.sharing`). No mini-batch is
    empty: where samples were left out, there may be fewer than configured, or none.
    """
    if config.epochs * config.mini_batches == 1:
        return [batch] if batch.num_sequences else []
    assert batch.group_B is not None
    groups, group_index_B = batch.group_B.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Batch] = []
    for _ in range(config.epochs):
        order_G = torch.randperm(len(groups), generator=generator)
        shuffled = torch.argsort(order_G[group_index_B], stable=True).numpy()
        parts += [batch.select(part) for part in np.array_split(shuffled, config.mini_batches) if len(part)]
    return parts


def mismatch(batch: Batch) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the policy's; {} where the batch lacks one of them."""
    if batch.logprob_T is None or batch.rollout_logprob_T is None:
        return {}
    return mismatch_metrics(batch.logprob_T, batch.rollout_logprob_T, batch.loss_mask_T)


def merge_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout from those of its optimizer steps: means, but maxima and counts as they stand at the end."""
    merged = {}
    for name in steps[0] if steps else ():
        values = [metrics[name] for metrics in steps]
        merged[name] = max(values) if name.endswith(("_max", "skipped_steps")) else sum(values) / len(values)
    return merged


def rollout_metrics(samples: list[Sample], batch: Batch, num_with_signal: int) -> dict[str, float]:
    """What the rollout was like, and why it may teach nothing.

    Args:
        samples: all samples of the rollout.
        num_with_signal: how many prompts `rows_with_signal` found among them.
        batch: what is learned from them, with the log-probabilities of the models.
    """
    rewards = np.array([sample.reward for sample in samples if sample.reward is not None])
    groups = {sample.row for sample in samples if sample.reward is not None}
    metrics = {
        "reward_mean": float(rewards.mean()) if len(rewards) else math.nan,  # null in the log, and no point of a curve
        "reward_std": float(rewards.std()) if len(rewards) else math.nan,
        "completion_length_mean": float(np.mean([len(sample.completion.token_ids) for sample in samples])),
        "truncated_share": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
        "left_out_share": 1.0 - len(rewards) / len(samples),
        "zero_std_group_share": 1.0 - num_with_signal / len(groups) if groups else 0.0,
    }
    metrics |= mismatch(batch)
    if batch.old_logprob_T is not None and batch.ref_logprob_T is not None and batch.loss_mask_T.any():
        ref_kl_T = kl_estimate(batch.old_logprob_T, batch.ref_logprob_T, "k3")
        metrics["ref_kl"] = ref_kl_T[batch.loss_mask_T].mean().item()
    return metrics
