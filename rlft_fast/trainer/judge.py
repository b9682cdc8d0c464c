"""From completions to samples with rewards: functions on the rank that sampled, a reward model on all of them."""

import math
import warnings
from dataclasses import replace
from itertools import compress

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import Config, EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import (
    IsolatedReward,
    RewardError,
    WeightedRewards,
    check_columns,
    load_reward,
    reasoning_gym_reward,
    weighted_sum,
)
from rlft_fast.rollout import Completion
from rlft_fast.trainer.experience import Sample, gather_samples
from rlft_fast.trainer.prompts import Prompts
from rlft_fast.world import STOP, LeftEarlyError, any_rank

Answers = list[tuple[int, Completion]]
"""Completions, each with the row of the prompt that it answers."""


class Judge:
    """The reward functions of a run, and, after `load_model`, its reward model.

    Args:
        config: of the run.
        tokenizer: of the policy.

    Raises:
        ValueError: a function cannot be used.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.functions = _functions(config)
        self.model: RewardModelScorer | None = None
        self.model_weight = config.reward.model_weight

    @classmethod
    def for_evaluation(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> "Judge | None":
        """The judge of the held-out answers, where they are judged in another way than those to learn from.

        Raises:
            ValueError: a function cannot be used.
        """
        if config.evaluation is None or config.evaluation.function is None:
            return None
        reward = config.reward.model_copy(update={"function": config.evaluation.function, "model": None})
        return cls(config.model_copy(update={"reward": reward}), tokenizer)

    def score(self, prompts: Prompts, own: Answers) -> list[Sample]:
        """The samples of all ranks, each scored by the rank that made it, and by the model of all.

        Args:
            prompts: of the rollout.
            own: the completions of this rank.

        Raises:
            RewardError: a function failed, here or in another process.
        """
        try:
            with STOP.alone():
                scored, failure = self._score_own(prompts, own), None
        except (RewardError, LeftEarlyError) as error:
            scored, failure = [], error
        STOP.leave_together()
        if any_rank(failure is not None):  # all or none: nobody waits for a rank that has given up
            raise failure or RewardError("the reward function failed in another process, which says why")
        samples = gather_samples(scored, [*self.functions.weights])
        return samples if self.model is None else self._with_model(self.model, prompts, samples)

    def check(self, prompts: Prompts, what: str) -> None:
        """Raises ValueError if a function cannot be called with the columns of these prompts, `what` in messages."""
        for function in self.functions.functions.values():
            check_columns(function, prompts.columns, what)

    def load_model(self) -> None:
        """Loads the reward model, if there is one. It takes long: data is checked before.

        Raises:
            ValueError: it cannot be used.
        """
        if self.config.reward.model is not None:
            self.model = RewardModelScorer(self.config.reward.model, self.config.actor, self.tokenizer)

    def close(self) -> None:
        """Ends the functions' worker processes; the next call starts new ones."""
        for function in self.functions.functions.values():
            if isinstance(function, IsolatedReward):
                function.close()

    def _score_own(self, prompts: Prompts, own: Answers) -> list[Sample]:
        if not own:  # there are fewer prompts than processes: functions need not know what to do with nothing
            return []
        asked = prompts.select([row for row, _ in own])
        ids = [completion.token_ids for _, completion in own]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        scored = self.functions.score(asked.texts, texts, ids, asked.columns)
        weights = self.functions.weights
        return [
            Sample(row, c, weighted_sum(parts, weights), parts) for (row, c), parts in zip(own, scored, strict=True)
        ]

    def _with_model(self, model: "RewardModelScorer", prompts: Prompts, samples: list[Sample]) -> list[Sample]:
        scores = model.score(prompts, [(sample.row, sample.completion) for sample in samples])
        return [
            replace(
                sample, parts={**sample.parts, "model": score},
                reward=None if sample.reward is None or score is None else sample.reward + self.model_weight * score,
            )
            for sample, score in zip(samples, scores, strict=True)
        ]  # fmt: skip


class RewardModelScorer:
    """Scores prompt and completion as one text, at its last token.

    A model with the policy's vocabulary sees the policy's own tokens; another one gets the text, tokenized anew.

    Args:
        path: folder of the reward model: sequence classification with one label.
        config: of the policy's engine; the model runs the same way, without adapters.
        tokenizer: of the policy.

    Raises:
        ValueError: the folder cannot be used.
    """

    def __init__(self, path: str, config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        own = load_tokenizer(path)
        self.policy_tokenizer = tokenizer
        self.tokenizer = None if own.get_vocab() == tokenizer.get_vocab() else own
        self.engine = FSDPEngine(path, config.model_copy(update={"lora": None}), head="score").initialize()

    def score(self, prompts: Prompts, answers: Answers) -> list[float | None]:
        """The scores of the completions of all ranks, which every rank must ask for together.

        None, of which a warning tells, where the token cap has no room for a text.

        Raises:
            RewardError: a score is not finite.
        """
        sequences = self._sequences(prompts, answers)
        cap = self.engine.config.max_tokens
        fitting = [len(sequence) < cap for sequence in sequences]  # and the token that asks
        if not all(fitting):
            warnings.warn(
                f"answers that have more than {cap - 1} tokens with their prompt, as the reward model counts, have no "
                "score and are left out: raise actor.max_tokens",
                stacklevel=2,
            )
        asked = [*compress(sequences, fitting)]
        scores = self.engine.score(Batch.from_samples(asked, [[] for _ in asked])).tolist() if asked else []
        for (row, _), score in zip(compress(answers, fitting), scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(
                    f"the reward model scored an answer to the prompt {prompts.texts[row][:80]!r} with {score}: look "
                    "at its weights, or whether actor.compute_dtype, which it runs in, is too narrow for it"
                )
        remaining = iter(scores)
        return [next(remaining) if fits else None for fits in fitting]

    def _sequences(self, prompts: Prompts, answers: Answers) -> list[list[int]]:
        """Prompts and completions in the reward model's tokens."""
        if self.tokenizer is None:
            return [[*prompts.token_ids[row], *completion.token_ids] for row, completion in answers]
        ids = [completion.token_ids for _, completion in answers]
        texts = self.policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
        pairs = [prompts.texts[row] + text for (row, _), text in zip(answers, texts, strict=True)]
        return [self.tokenizer.encode(pair, add_special_tokens=False) for pair in pairs]


def _functions(config: Config) -> WeightedRewards:
    """The functions that the configuration names, loaded or with their workers."""
    reward, weights = config.reward, config.function_weights
    if reward.function is None:
        return WeightedRewards({task: reasoning_gym_reward(task) for task in weights}, weights)
    if reward.timeout_s is None:
        return WeightedRewards({spec: load_reward(spec) for spec in weights}, weights)
    isolated = {spec: IsolatedReward(spec, reward.timeout_s, reward.workers) for spec in weights}
    return WeightedRewards(isolated, weights)
