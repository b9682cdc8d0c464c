"""Held-out prompts, answered and scored: during a run, and for a model alone."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rlft_fast.config import Config, RolloutConfig
from rlft_fast.data import Samples, cat_samples
from rlft_fast.engine import FSDPEngine, role_engine
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Rollout, SamplingParams, Seeds, build_rollout, sample_seeds
from rlft_fast.run import dotted
from rlft_fast.trainer.collect import Judge, merge_metrics, own_rows, own_samples, sample_records
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.inputs import (
    check_held_out,
    check_images,
    check_tokens,
    load_held_out,
    open_environment,
    require_agreement,
)
from rlft_fast.trainer.models import check_finite
from rlft_fast.trainer.prompts import ImageReader, Prompts
from rlft_fast.world import World, init_distributed, naming_lost_ranks

_STEP_OF_SEEDS = 2**32  # no step of a run has this number, so no seed of an evaluation is a seed of a step

Answer = Callable[[Prompts, SamplingParams, Seeds | None], Samples]
"""This rank's answers to its share of the prompts."""


def evaluate_sets(
    config: Config, held_out: Mapping[str, Prompts], judge: Judge, answer: Answer
) -> tuple[dict[str, float], dict[str, Samples]]:
    """Answers the held-out sets, and scores the answers. All ranks must call it together.

    Answers that are not greedy have the same seeds in each evaluation, whatever other sets there are.

    Args:
        config: of the run.
        held_out: prompts of each set by its name.
        judge: scores the answers.
        answer: samples the answers.

    Returns:
        The numbers by the names of `EvaluationConfig.metrics`, and the answers to each set. A set without a scored
        answer has no number, and does not enter the means over the sets.

    Raises:
        RewardError: a reward function failed.
        RolloutError: the generator failed.
    """
    settings = config.evaluation
    assert settings is not None
    params = SamplingParams(
        n=settings.samples_per_prompt, max_new_tokens=config.max_evaluation_tokens, temperature=settings.temperature,
        stop=config.rollout.stop, structured=config.rollout.structured,
    )  # fmt: skip
    samples: dict[str, Samples] = {}
    for name, prompts in held_out.items():
        seeds = sample_seeds(config.seed, _STEP_OF_SEEDS, own_rows(judge.world, prompts), params.n)
        samples[name] = judge.score(prompts, answer(prompts, params, seeds))
    by_set = {name: _metrics(found, params.n) for name, found in samples.items()}
    for name in (name for name, found in by_set.items() if not found and judge.world.is_first):
        warnings.warn(
            f"the reward function left out every answer to the held-out prompts{name and f' of the set {name!r}'}, "
            "which therefore have no accuracy",
            stacklevel=2,
        )
    named = {f"{key}_{name}": value for name, found in by_set.items() if name for key, value in found.items()}
    return merge_metrics([*by_set.values()]) | named, samples


def _metrics(samples: Samples, samples_per_prompt: int) -> dict[str, float]:
    scored_B = samples.has_reward_B
    reward_B, row_B = samples.reward_B[scored_B], samples.row_B[scored_B]
    if not len(reward_B):
        return {}
    metrics = {"accuracy": float(reward_B.mean())}
    if samples_per_prompt > 1:
        rows, place_B = row_B.unique(return_inverse=True)
        best = reward_B.new_full((len(rows),), -torch.inf).scatter_reduce(0, place_B, reward_B, "amax")
        metrics[f"pass_at_{samples_per_prompt}"] = float(best.mean())
    return metrics


class Evaluation(NamedTuple):
    """The numbers and the answers of a model."""

    metrics: dict[str, float]
    """By the names of `EvaluationConfig.metrics`, see `evaluate_sets`."""
    answers: list[dict[str, Any]]
    """In the order of the prompts: the name of their ``set``, and what ``samples.jsonl`` of a run holds."""


def evaluate(config: Config, progress: Callable[[int, int], object] = lambda done, total: None) -> Evaluation:
    """Evaluates ``config.model`` on the held-out sets of the configuration, without a run.

    Args:
        config: with an evaluation section.
        progress: called with the number of prompts that are answered, and of all prompts: after each batch of
            transformers' generator, and of vLLM after each set.

    Raises:
        ValueError: the configuration has no evaluation, or model, data or reward function cannot be used.
        RewardError: a reward function failed.
        RolloutError: the generator failed.
    """
    if config.evaluation is None:
        raise ValueError("the configuration has no evaluation section: give the held-out prompts as evaluation.path")
    world = init_distributed(config.timeout_minutes)
    with naming_lost_ranks(world), contextlib.ExitStack() as stack:
        world.require_agreement("configuration", dict(dotted(config.model_dump(mode="json"))))
        tokenizer = load_tokenizer(config.model)
        judge = Judge.for_evaluation(config, tokenizer, world) or Judge(config, tokenizer, world)
        stack.callback(judge.close)
        reader = ImageReader.of_model(config.model, tokenizer)
        held_out = load_held_out(config, tokenizer, reader)
        check_held_out(held_out, judge)
        check_images(config, *held_out.values())
        player = None
        if config.environments_by_name:
            player, sets = open_environment(config, tokenizer, [*held_out.values()], reader)
            stack.callback(player.close)
            held_out = dict(zip(held_out, sets, strict=True))
        require_agreement(world, "held-out data", *held_out.values())
        judge.use_models({name: role_engine(judge.config, name, world) for name in judge.roles})
        frozen = config.actor.model_copy(update={"lora": None})
        engine = FSDPEngine(config.model, frozen, world=world).initialize()
        check_tokens("model", engine.facts.num_embeddings, *held_out.values())
        check_finite("model", engine)
        longest = config.rollout.max_prompt_tokens + config.max_evaluation_tokens
        rollout = build_rollout(engine, tokenizer, _with_whole_weights(config.rollout), longest)
        stack.callback(rollout.close)
        rollout.sync()
        answer = _Batches(rollout, world, config.rollout, sum(map(len, held_out.values())), progress, player)
        metrics, samples = evaluate_sets(config, held_out, judge, answer)
        answers: list[dict[str, Any]] = []
        for name, found in samples.items():
            order = (found.row_B * (int(found.number_B.max()) + 1) + found.number_B).argsort()
            found, prompts = found.select(order), held_out[name]
            turns, played = (None, None) if player is None else (player.turns(found), player.played(prompts, found))
            answers += [{"set": name, **x} for x in sample_records(found, prompts, turns, played)]
        return Evaluation(metrics, answers)


def _with_whole_weights(config: RolloutConfig) -> RolloutConfig:
    """The rollout of a model without adapters."""
    return config.model_copy(update={"vllm": config.vllm.model_copy(update={"adapter": False})})


class _Batches:
    """Answers held-out prompts in the batches of the generator, and tells how many are answered.

    Args:
        rollout: samples.
        world: the ranks that share the prompts.
        config: of the rollout.
        total: number of prompts of all sets.
        progress: see `evaluate`.
        player: see `own_samples`.
    """

    def __init__(
        self, rollout: Rollout, world: World, config: RolloutConfig, total: int,
        progress: Callable[[int, int], object], player: EpisodePlayer | None,
    ) -> None:  # fmt: skip
        self.player = player
        self.rollout, self.world, self.config, self.total, self.progress = rollout, world, config, total, progress
        self.done = 0
        progress(0, total)

    def __call__(self, prompts: Prompts, params: SamplingParams, seeds: Seeds | None) -> Samples:
        """This rank's answers. A batch has the prompts that the generator would run together anyway."""
        at_once = max(self.config.batch_size // params.n, 1) if self.config.backend == "hf" else len(prompts)
        size, parts = self.world.size, []
        for start in range(0, len(prompts), at_once * size):
            rows = range(start, min(start + at_once * size, len(prompts)))
            own = None if seeds is None else seeds[start // size : start // size + at_once]
            samples = own_samples(self.rollout, self.world, prompts.select(rows), params, own, self.player)
            parts.append(samples.replace(row_B=samples.row_B + start))
            self.done += len(rows)
            self.progress(self.done, self.total)
        return cat_samples(parts)
