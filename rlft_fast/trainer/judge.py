"""From completions to samples with rewards: functions on the rank that sampled, a reward model on all of them."""

import math
import time
import warnings
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlft_fast.cluster import RemoteEngine
from rlft_fast.config import Config, EngineConfig
from rlft_fast.data import Batch, Samples
from rlft_fast.engine import reward_engine
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import (
    IsolatedReward,
    Parts,
    RewardError,
    WeightedRewards,
    check_columns,
    load_reward,
    reasoning_gym_reward,
    weighted_sum,
)
from rlft_fast.trainer.experience import with_rewards
from rlft_fast.trainer.prompts import Prompts
from rlft_fast.world import STOP, LeftEarlyError, World


class Judge:
    """The reward functions of a run, and, after `load_model`, its reward model.

    Args:
        config: of the run.
        tokenizer: of the policy.
        world: the processes that score together.

    Attributes:
        seconds: time in which this rank's functions scored the last answers [s].

    Raises:
        ValueError: a function cannot be used.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.world = world
        self.functions = _functions(config)
        self.model: RewardModelScorer | None = None
        self.model_weight = config.reward.model_weight
        self.seconds = 0.0

    @classmethod
    def for_evaluation(cls, config: Config, tokenizer: PreTrainedTokenizerBase, world: World) -> "Judge | None":
        """The judge of the held-out answers, where they are judged in another way than those to learn from.

        Raises:
            ValueError: a function cannot be used.
        """
        if config.evaluation is None or config.evaluation.function is None:
            return None
        reward = config.reward.model_copy(update={"function": config.evaluation.function, "model": None})
        return cls(config.model_copy(update={"reward": reward}), tokenizer, world)

    def score(self, prompts: Prompts, own: Samples) -> Samples:
        """The samples of all ranks, each scored by the rank that made it, and by the model of all.

        Args:
            prompts: of the rollout.
            own: the samples of this rank.

        Raises:
            RewardError: a function failed, here or in another process.
        """
        failure: RewardError | LeftEarlyError | None = None
        scored: list[Parts] = []
        started = time.perf_counter()
        try:
            with STOP.alone():
                scored = self._score_own(prompts, own)
        except (RewardError, LeftEarlyError) as error:
            failure = error
        self.seconds = time.perf_counter() - started
        STOP.leave_together(self.world)
        if self.world.any_rank(failure is not None):  # all or none: nobody waits for a rank that has given up
            raise failure or RewardError("the reward function failed in another process, which says why")
        weights = self.functions.weights
        # The model scores every sample: without a function's part, its score is the reward.
        nothing = None if self.model is None else 0.0
        rewards = [nothing if (total := weighted_sum(parts, weights)) is None else total for parts in scored]
        samples = with_rewards(own, rewards, scored, [*weights]).gather(self.world)
        return samples if self.model is None else self._with_model(self.model, prompts, samples)

    def check(self, prompts: Prompts, what: str) -> None:
        """Raises ValueError if a function cannot be called with the columns of these prompts, `what` in messages."""
        for function in self.functions.functions.values():
            check_columns(function, prompts.columns, what)

    def load_model(self, engine: RemoteEngine | None = None) -> None:
        """Loads the reward model, if there is one. It takes long: data is checked before.

        Args:
            engine: that has the model; None: make one.

        Raises:
            ValueError: it cannot be used.
        """
        if self.config.reward.model is not None:
            self.model = RewardModelScorer(
                self.config.reward.model, self.config.actor, self.tokenizer, self.world, engine
            )

    def close(self) -> None:
        """Ends the functions' worker processes; the next call starts new ones."""
        for function in self.functions.functions.values():
            if isinstance(function, IsolatedReward):
                function.close()

    def _score_own(self, prompts: Prompts, own: Samples) -> list[Parts]:
        if not len(own):  # there are fewer prompts than processes: functions need not know what to do with nothing
            return []
        asked, ids = prompts.select(own.row_B.tolist()), own.token_ids()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return self.functions.score(*asked.answered(texts), ids, asked.columns)

    def _with_model(self, model: "RewardModelScorer", prompts: Prompts, samples: Samples) -> Samples:
        score_B = model.score(prompts, samples.row_B.tolist(), samples.token_ids())
        reward_B = samples.reward_B + self.model_weight * score_B  # NaN where one of them is
        return samples.replace(reward_B=reward_B, parts={**samples.parts, "model": score_B})


class RewardModelScorer:
    """Scores prompt and completion as one text, at its last token.

    A model with the policy's vocabulary sees the policy's own tokens; another one gets the text, tokenized anew.

    Args:
        path: folder of the reward model: sequence classification with one label.
        config: of the policy's engine; the model runs the same way, without adapters.
        tokenizer: of the policy.
        world: the processes that score together.
        engine: that has the model; None: make one.

    Raises:
        ValueError: the folder cannot be used.
    """

    def __init__(
        self, path: str, config: EngineConfig, tokenizer: PreTrainedTokenizerBase, world: World,
        engine: RemoteEngine | None = None,
    ) -> None:  # fmt: skip
        own = load_tokenizer(path)
        self.policy_tokenizer = tokenizer
        self.tokenizer = None if own.get_vocab() == tokenizer.get_vocab() else own
        self.engine = engine or reward_engine(path, config, world)

    def score(self, prompts: Prompts, rows: Sequence[int], token_ids: list[list[int]]) -> Tensor:
        """The scores of the completions of all ranks, which every rank must ask for together.

        Args:
            prompts: of the rollout.
            rows: of the prompts that the completions answer.
            token_ids: of the completions.

        Returns:
            (B,) float64. NaN, and a warning, where the token cap has no room for a text.

        Raises:
            RewardError: a score is not finite.
        """
        sequences = self._sequences(prompts, rows, token_ids)
        cap = self.engine.config.max_tokens
        fits_B = torch.tensor([len(sequence) < cap for sequence in sequences], dtype=torch.bool)  # and one that asks
        if not fits_B.all():
            warnings.warn(
                f"answers that have more than {cap - 1} tokens with their prompt, as the reward model counts, have no "
                "score and are left out: raise actor.max_tokens",
                stacklevel=2,
            )
        score_B = torch.full((len(sequences),), math.nan, dtype=torch.float64)
        asked = [*compress(sequences, fits_B.tolist())]
        if not asked:
            return score_B
        scores = self.engine.score(Batch.from_samples(asked, [[] for _ in asked]))
        if (bad := ~scores.isfinite()).any():
            number = int(fits_B.nonzero()[bad.nonzero()[0]])
            raise RewardError(
                f"the reward model scored an answer to the prompt {prompts.texts[rows[number]][:80]!r} with "
                f"{scores[bad][0]}: look at its weights, or whether actor.compute_dtype, which it runs in, is too "
                "narrow for it"
            )
        score_B[fits_B] = scores.double()
        return score_B

    def _sequences(self, prompts: Prompts, rows: Sequence[int], token_ids: list[list[int]]) -> list[list[int]]:
        """Prompts and completions in the reward model's tokens."""
        if self.tokenizer is None:
            return [[*prompts.token_ids[row], *ids] for row, ids in zip(rows, token_ids, strict=True)]
        texts = self.policy_tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        pairs = [prompts.texts[row] + text for row, text in zip(rows, texts, strict=True)]
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
