"""From completions to a batch with rewards: columns of samples, and what a step learns from. Pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlft_fast.config import AlgorithmConfig, Config, RewardConfig
from rlft_fast.data import Batch, Images, Samples, image_table
from rlft_fast.engine import Output
from rlft_fast.rewards import Parts, overlong_penalty
from rlft_fast.rl import kl_estimate, mismatch_metrics
from rlft_fast.run import token_columns
from rlft_fast.trainer.episodes import STOP
from rlft_fast.trainer.prompts import Prompts


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """The samples of a step, and the batch that the policy learns from.

    Args:
        step: number of the step, from 0.
        prompts: all that the step asked, refills included.
        num_streamed: how many of them come from the stream; the curriculum drew the others again.
        samples: of all ranks, by the row of their prompt.
        taught: the samples to learn from, in the order of the batch.
        batch: with advantages. Its weights say which tokens run (`Batch.active_T`); an optimizer step has its own.
        metrics: of the rollout.
        kept: what a log of samples keeps, see `Collected.tensors`; None: nothing.
    """

    step: int
    prompts: Prompts
    num_streamed: int
    samples: Samples
    taught: Samples
    batch: Batch
    metrics: dict[str, float]
    kept: dict[str, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, each with its prompt."""
        prompts = sum(len(self.prompts.token_ids[row]) for row in self.samples.row_B.tolist())
        return prompts + len(self.samples.token_ids_T)

    @property
    def warnings(self) -> list[str]:
        """What users should know of rewards that tell no answer from another."""
        if not self.samples.has_reward_B.any() and not len(self.taught):
            return ["the reward function left out every sample; nothing is learned"]
        if self.metrics["reward_std"] == 0 and self.batch.teacher_logprob_T is None:
            return [
                f"all rewards are {self.metrics['reward_mean']:g}, which tells no answer from another (is the task too "
                "easy, too hard, or the reward function blind?)"
            ]
        return []

    @property
    def taught_share(self) -> float:
        """The share of the batch's response tokens that run."""
        return int(self.batch.active_T.sum()) / max(int(self.batch.loss_mask_T.sum()), 1)


def with_rewards(
    samples: Samples, rewards: Sequence[float | None], parts: Sequence[Parts] = (), names: Sequence[str] = ()
) -> Samples:
    """The samples with their rewards; the parts that they have already are added.

    Args:
        samples: of this process.
        rewards: of each; None where there is none.
        parts: the parts of each reward by name, None where a part is missing.
        names: names of the parts, the same on every rank, also where a rank has no completion.
    """
    columns = {name: _numbers([own[name] for own in parts]) for name in names}
    reward_B = sum(samples.parts.values(), start=_numbers(rewards))  # NaN where one of them is
    return samples.replace(reward_B=reward_B, parts={**samples.parts, **columns})


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def penalize_length(samples: Samples, config: RewardConfig, max_new_tokens: int) -> Samples:
    """The samples with rewards in their bounds, from which penalties are taken for reaching the limit of tokens.

    Coming near the limit has a penalty, too.

    The penalty is also a part of the reward, "length", which is negative or 0.
    """
    samples = samples.replace(reward_B=_clipped(samples.reward_B, config.clip))
    if not (config.truncation_penalty or config.overlong_buffer):
        return samples
    near = [overlong_penalty(x, max_new_tokens, config.overlong_buffer) for x in _longest_sampled(samples).tolist()]
    cost_B = config.truncation_penalty * (~samples.stopped_B).double() + config.overlong_penalty * _numbers(near)
    reward_B = samples.reward_B - cost_B
    length_B = (0.0 - cost_B).where(samples.has_reward_B, math.nan)
    return samples.replace(reward_B=reward_B, parts={**samples.parts, "length": length_B})


def clip_turns(samples: Samples, clip: tuple[float, float] | None) -> Samples:
    """The samples with rewards of turns that add up to rewards in the bounds, which hold after every turn.

    A turn has what it changes of the clipped sum: beyond a bound it earns nothing more. Otherwise the last turn would
    be charged with what others have earned beyond.
    """
    if clip is None or samples.reward_T is None:
        return samples
    zero = torch.zeros(1, dtype=torch.float64)
    earned = [torch.cat([zero, own.cumsum(0)]) for own in samples.reward_T.split(samples.length_B.tolist())]
    beyond = [(own - own.clamp(*clip)).diff() for own in earned]
    return samples.replace(reward_T=samples.reward_T - torch.cat([zero[:0], *beyond]))


def _clipped(reward_B: Tensor, clip: tuple[float, float] | None) -> Tensor:
    return reward_B if clip is None else reward_B.clamp(*clip)  # NaN stays


def _longest_sampled(samples: Samples) -> Tensor:
    """(B,) int64, sampled tokens of each completion, or of the longest of its branches, each of which has the limit."""
    if samples.kept_T is None:
        return samples.sampled_length_B
    index_U, _, length_N, sample_N = samples.branches()
    sampled_N = torch.stack([own.sum() for own in samples.is_sampled_T[index_U].split(length_N.tolist())])
    return torch.zeros_like(samples.length_B).scatter_reduce(0, sample_N, sampled_N, "amax")


def rows_with_signal(
    samples: Samples, part: str | None = None, clip: tuple[float, float] | None = None
) -> list[int]:  # fmt: skip
    """The rows of those prompts whose samples did not all get the same reward, in order.

    Args:
        samples: of one rollout, before `penalize_length`: wrong answers of different lengths are equally wrong.
        part: see `compared_rewards`.
        clip: see `compared_rewards`.
    """
    row, value = compared_rewards(samples, part, clip)
    order = np.lexsort((value, row))
    row, value = row[order], value[order]
    is_equal = (value[1:] == value[:-1]) | (np.isnan(value[1:]) & np.isnan(value[:-1]))
    return np.unique(row[1:][(row[1:] == row[:-1]) & ~is_equal]).tolist()


def compared_rewards(
    samples: Samples, part: str | None, clip: tuple[float, float] | None
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The row of each sample with a reward, and the value by which the samples of a prompt are compared.

    Args:
        samples: before `penalize_length`.
        part: name of a part of the reward, whose values are compared as they are; None: the rewards.
        clip: bounds of the rewards. Rewards that are equal within the bounds teach nothing.
    """
    has_reward = samples.has_reward_B.numpy()
    value_B = _clipped(samples.reward_B, clip) if part is None else samples.parts[part]
    return samples.row_B.numpy()[has_reward], value_B.numpy()[has_reward]


def scored_samples(samples: Samples, greedy: Tensor | None = None) -> Samples:
    """The samples that have a reward, and a baseline where `greedy` is given; the others teach nothing.

    Args:
        samples: of one rollout.
        greedy: (prompts,) float64, reward of the greedy answer to the prompt of each row; NaN where it has none.
    """
    is_scored_B = samples.has_reward_B
    if greedy is not None:
        is_scored_B &= ~greedy[samples.row_B].isnan()
    return samples if is_scored_B.all() else samples.select(is_scored_B.nonzero().squeeze(1))


def build_batch(
    scored: Samples, prompts: Sequence[Sequence[int]], greedy: Tensor | None = None,
    images: Sequence[Images | None] = (),
) -> Batch:  # fmt: skip
    """Packs the samples that have a reward; samples of one prompt form a group.

    Args:
        scored: from `scored_samples`.
        prompts: token ids of the prompt of each row.
        greedy: see `scored_samples`.
        images: of each sample, None where it has none; empty: no sample has.
    """
    batch = scored.to_batch(prompts)
    assert batch.group_B is not None  # the rows
    if images:
        of_B = range(len(scored)) if batch.episode_B is None else batch.episode_B.tolist()
        batch = batch.replace(**image_table(images[i] for i in of_B))
    return batch if greedy is None else batch.replace(baseline_B=greedy[batch.group_B])


def mini_batch_rows(batch: Batch, config: AlgorithmConfig, seed: int) -> list[np.ndarray]:
    """The sequences of every optimizer step of a rollout: each epoch shuffles the prompts and cuts their samples anew.

    Samples of a prompt stay neighbours, since together they cost less (`rlft_fast.data.layout`), and an episode is in
    one mini-batch. No mini-batch is empty: where samples were left out, there may be fewer than configured, or none.
    A single one is the batch as it is.
    """
    if config.epochs * config.mini_batches == 1:
        return [np.arange(batch.num_sequences)] if batch.num_sequences else []
    assert batch.group_B is not None
    groups, group_index_B = batch.group_B.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    parts: list[np.ndarray] = []
    for _ in range(config.epochs):
        order_G = torch.randperm(len(groups), generator=generator)
        shuffled = torch.argsort(order_G[group_index_B], stable=True).numpy()
        first = np.arange(len(shuffled))
        if batch.episode_B is not None:
            first = np.flatnonzero(np.diff(batch.episode_B.numpy()[shuffled], prepend=-1))
        begins = [part[0] for part in np.array_split(first, config.mini_batches) if len(part)]
        parts += np.split(shuffled, begins[1:]) if begins else []
    return parts


def mismatch(*batches: Batch) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the policy's, over these batches; {} where one lacks them."""
    columns = [(batch.logprob_T, batch.rollout_logprob_T, batch.loss_mask_T) for batch in batches]
    if not columns or any(x_T is None for column in columns for x_T in column):
        return {}
    joined = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*columns, strict=True))  # a single one is not copied
    return mismatch_metrics(*joined)


def merge_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout from those of its optimizer steps: means, but maxima and counts as they stand at the end.

    A step may lack a metric.
    """
    merged = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        values = [metrics[name] for metrics in steps if name in metrics]
        merged[name] = max(values) if name.endswith(("_max", "skipped_steps")) else sum(values) / len(values)
    return merged


def rollout_metrics(samples: Samples, batch: Batch, num_with_signal: int) -> dict[str, float]:
    """What the rollout was like, and why it may teach nothing.

    Args:
        samples: all samples of the rollout.
        num_with_signal: how many prompts `rows_with_signal` found among them.
        batch: what is learned from them, with the log-probabilities of the models.
    """
    rewards = samples.reward_B[samples.has_reward_B].numpy()
    num_groups = len(samples.row_B[samples.has_reward_B].unique())
    metrics = {
        "reward_mean": float(rewards.mean()) if len(rewards) else math.nan,  # null in the log, and no point of a curve
        "reward_std": float(rewards.std()) if len(rewards) else math.nan,
        "completion_length_mean": float(samples.sampled_length_B.numpy().mean()),
        "truncated_share": float((~samples.stopped_B).numpy().mean()),
        "left_out_share": 1.0 - len(rewards) / len(samples),
        "zero_std_group_share": 1.0 - num_with_signal / num_groups if num_groups else math.nan,
    }
    metrics |= _part_means(samples)
    metrics |= {f"{name}_mean": float(count_B.mean()) for name, count_B in samples.counts.items()}
    metrics |= _means_of_episodes(samples)
    metrics |= mismatch(batch)
    if batch.old_logprob_T is not None and batch.ref_logprob_T is not None and batch.loss_mask_T.any():
        ref_kl_T = kl_estimate(batch.old_logprob_T, batch.ref_logprob_T, "k3")
        metrics["ref_kl"] = ref_kl_T[batch.loss_mask_T].mean().item()
    if batch.old_logprob_T is not None and batch.teacher_logprob_T is not None and batch.loss_mask_T.any():
        teacher_kl_T = batch.old_logprob_T - batch.teacher_logprob_T
        metrics["teacher_kl"] = teacher_kl_T[batch.loss_mask_T].mean().item()
    return metrics


def _means_of_episodes(samples: Samples) -> dict[str, float]:
    """Means over all turns, and over all calls of environments; {} where the samples are no episodes."""
    total = {name: float(count_B.sum()) for name, count_B in samples.counts.items()}
    means = {}
    if turns := total.get("turns"):
        means["tokens_per_turn_mean"] = int(samples.is_sampled_T.sum()) / turns
    if calls := total.get("environment_calls"):
        means["seconds_per_environment_call"] = total["seconds_environment_calls"] / calls
    return means


def staleness_metrics(samples: Samples, version: int, max_staleness: int) -> dict[str, float]:
    """How many updates older the weights are that sampled a token than the weights that the update begins with.

    Args:
        samples: of a step.
        version: of the weights that the update begins with.
        max_staleness: largest number of updates.

    Returns:
        Mean and maximum over the sampled tokens. ``staleness_share_0``, ``staleness_share_1``, ... are the shares of
        tokens whose weights are so many updates old.
    """
    stale_T = version - samples.weight_version_T[samples.is_sampled_T].long()
    if not len(stale_T):
        return {}
    count_S = stale_T.bincount(minlength=max_staleness + 1).tolist()
    shares = {f"staleness_share_{updates}": count / len(stale_T) for updates, count in enumerate(count_S)}
    return {"staleness_mean": float(stale_T.double().mean()), "staleness_max": float(stale_T.max()), **shares}


def early_stop_metrics(samples: Samples, samples_per_prompt: int) -> dict[str, float]:
    """What was not sampled, because the first samples of a prompt have equal rewards.

    Args:
        samples: of a step.
        samples_per_prompt: of a prompt whose first samples differ.
    """
    rows, row_B, count_G = samples.row_B.unique(return_inverse=True, return_counts=True)
    left_out_G = samples_per_prompt - count_G
    length_G = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_B, samples.length_B.double())
    return {
        "stopped_early_share": float((left_out_G > 0).double().mean()),
        "saved_tokens": float((left_out_G * length_G / count_G).sum()),  # as long as those of the prompt, on average
    }


def _part_means(samples: Samples) -> dict[str, float]:
    """Mean of each part over the samples that have it, where there are several; NaN where none has it."""
    if len(samples.parts) < 2:
        return {}
    return {f"reward_mean_{name}": part_B.nanmean().item() for name, part_B in samples.parts.items()}


def sample_records(
    samples: Samples, prompts: Prompts, turns: Sequence[list[dict[str, Any]]] | None = None,
    environments: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What ``samples.jsonl`` holds of each sample, beside its step.

    Args:
        samples: scored, of all ranks.
        prompts: that they answer.
        turns: of each sample, if it is an episode.
        environments: name of each sample's environment; None: it has none.
    """
    assert samples.texts is not None
    parts = {name: _nullable(part) for name, part in samples.parts.items()}
    stops = _stop_reasons(samples)
    rewards, stopped, versions = _nullable(samples.reward_B), samples.stopped_B.tolist(), _oldest_versions(samples)
    for i, row in enumerate(samples.row_B.tolist()):
        yield {
            "prompt": prompts.texts[row], "completion": samples.texts[i], "reward": rewards[i],
            "parts": {name: values[i] for name, values in parts.items()},
            "finish_reason": "stop" if stopped[i] else "length", "weight_version": versions[i],
            **({} if turns is None else {"turns": turns[i], "stop_reason": stops[i]}),
            **({} if environments is None else {"environment": environments[i]}),
            **({"images": prompts.images[row].names} if row in prompts.images else {}),
        }  # fmt: skip


def logged_tokens(experience: Experience, outputs: Mapping[Output, Tensor], config: Config) -> dict[str, Tensor]:
    """What `StepResult.tokens` holds.

    Args:
        experience: of the step.
        outputs: of the policy's first optimizer step, where no pass before it gave log-probabilities; else empty.
        config: of the run, which logs tokens.
    """
    assert config.log_tokens_mib is not None
    batch = experience.batch
    if outputs and config.algorithm.epochs * config.algorithm.mini_batches == 1:  # else they are of a part of the batch
        found = {name: x_T.where(batch.active_T, torch.nan) for name, x_T in outputs.items()}
        batch = batch.replace(logprob_T=found["logprob"], entropy_T=found["entropy"])
    return token_columns(experience.samples, experience.taught, batch, config.log_tokens_mib * 2**20)


def _stop_reasons(samples: Samples) -> list[str | None]:
    """How each episode has ended."""
    columns = [(name, of_B.tolist()) for name, of_B in samples.counts.items() if name.startswith(STOP)]
    return [next((n.removeprefix(STOP) for n, own in columns if own[i]), None) for i in range(len(samples))]


def _nullable(values: Tensor) -> list[float | None]:
    """Numbers as a log has them: None in place of NaN."""
    return [None if value != value else value for value in values.tolist()]


def _oldest_versions(samples: Samples) -> list[int | None]:
    """For each sample the oldest version of the weights that sampled a token of it; None where it has no token."""
    versions = samples.weight_version_T.split(samples.length_B.tolist())
    return [int(own.min()) if len(own) else None for own in versions]
