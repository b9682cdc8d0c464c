"""The samples of a step: prompts from the stream, answers of the rollout, rewards of the judge."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.cluster import RemoteRollout
from rlft_fast.config import Config
from rlft_fast.data import Samples, cat_samples
from rlft_fast.rollout import NonFiniteLogitsError, Rollout, SamplingParams, Seeds, sample_seeds
from rlft_fast.run import Phases
from rlft_fast.trainer.collect.curriculum import Curriculum
from rlft_fast.trainer.collect.experience import clip_turns, early_stop_metrics, penalize_length, rows_with_signal
from rlft_fast.trainer.collect.judge import Judge
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.models import SamplingModels
from rlft_fast.trainer.prompts import ImageError, Prompts
from rlft_fast.world import World


class Collected(NamedTuple):
    """The samples of a step."""

    rows: list[int]
    """Rows of the data: of the prompts of the step."""
    prompts: Prompts
    num_streamed: int
    """How many of the prompts come from the stream."""
    samples: Samples
    """By row and number. The penalties on length are not yet in the rewards."""
    greedy_G: Tensor | None
    """(prompts,) float64, reward of the most likely answer to each prompt; None where no method reads it."""
    seconds: Mapping[str, float] = MappingProxyType({})
    """Time of each phase that was measured in a thread of its own [s]."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint and a log of samples keep, see `Collector.of_tensors` and `Collector.again`."""
        greedy = {} if self.greedy_G is None else {_GREEDY: self.greedy_G}
        own = {_PROMPTS: _ids(self.prompts), _ROWS: torch.tensor(self.rows), _STREAMED: torch.tensor(self.num_streamed)}
        return {**self.samples.tensors(), **own, **greedy}


_GREEDY, _PROMPTS, _ROWS, _STREAMED = "greedy_G", "prompt_ids", "prompt_rows", "num_streamed"


class Collector:
    """Answers the prompts of a step, and scores the answers.

    Args:
        config: of the run.
        world: the ranks that share the prompts.
        prompts: to learn from.
        curriculum: chooses among them.
        judge: scores the answers.
        models: their rollout answers.
        phases: are told of generation and scoring.
        needs_greedy: whether a step has a greedy answer to each prompt, too.
        player: plays an episode per answer; None: an answer is one message.
    """

    def __init__(
        self, config: Config, world: World, prompts: Prompts, curriculum: Curriculum, judge: Judge,
        models: SamplingModels, phases: Phases, player: EpisodePlayer | None = None, needs_greedy: bool = False,
    ) -> None:  # fmt: skip
        self.player, self.needs_greedy = player, needs_greedy
        self.config, self.world, self.prompts, self.judge = config, world, prompts, judge
        self.curriculum = curriculum
        self.models, self.phases = models, phases

    def timed_by(self, phases: Phases) -> "Collector":
        """The same collector with other phases, for a thread."""
        return Collector(
            self.config, self.world, self.prompts, self.curriculum, self.judge, self.models, phases, self.player,
            needs_greedy=self.needs_greedy,
        )  # fmt: skip

    def collect(self, step: int, first_prompt: int | None) -> Collected:
        """The prompts of a step and their samples; more prompts are added while too few have a signal.

        Steps take the stream of prompts without gaps, so that each pass over the data has every prompt once.

        Args:
            step: counts from 0; it decides every random draw.
            first_prompt: number of prompts of the stream that the steps before have taken; None: the step's prompts are
                planned, and none are added.
        """
        algorithm, count = self.config.algorithm, self.config.rollout.prompts_per_step
        rows: list[int] = []
        num_streamed = 0
        samples: Samples | None = None
        for _ in range(1 + algorithm.max_refills):
            if first_prompt is None:
                more, num_new = self.curriculum.planned(step)
            else:
                more, num_new = self.curriculum.choose(step, first_prompt + num_streamed, rows)
            found = self._rollout(self.prompts.select(more), step, len(rows))
            found = found.replace(row_B=found.row_B + len(rows))
            samples = found if samples is None else cat_samples([samples, found])
            rows, num_streamed = rows + more, num_streamed + num_new
            if not algorithm.max_refills or len(self.rows_with_signal(samples)) >= count:
                break
        assert samples is not None
        prompts = self.prompts.select(rows)
        greedy_G = self.greedy(prompts, step, 0).reward_B if self.needs_greedy else None
        return Collected(rows, prompts, num_streamed, samples, greedy_G)

    def collect_group(self, step: int, place: int) -> Collected:
        """The samples of one prompt of a step without refills; `joined` makes the step of all.

        Args:
            step: see `collect`; its prompts are planned.
            place: of the prompt among the prompts of the step.
        """
        rows = self.curriculum.planned(step).rows[place : place + 1]
        prompts = self.prompts.select(rows)
        samples = self._rollout(prompts, step, place)
        greedy_G = self.greedy(prompts, step, place).reward_B if self.needs_greedy else None
        return Collected(rows, prompts, 1, samples, greedy_G)

    def joined(self, step: int, groups: Sequence[Collected]) -> Collected:
        """What `collect` gives, of each prompt's own, in the order of the prompts.

        Args:
            step: see `collect_group`.
            groups: of `collect_group`.
        """
        rows, num_streamed = self.curriculum.planned(step)
        samples = [own.samples.replace(row_B=own.samples.row_B + place) for place, own in enumerate(groups)]
        greedy = [own.greedy_G for own in groups if own.greedy_G is not None]
        seconds: dict[str, float] = {}
        for own in groups:  # which are collected at the same time
            seconds |= {name: max(value, seconds.get(name, 0.0)) for name, value in own.seconds.items()}
        greedy_G = torch.cat(greedy) if greedy else None
        return Collected(rows, self.prompts.select(rows), num_streamed, cat_samples(samples), greedy_G, seconds)

    def of_tensors(self, step: int, tensors: Mapping[str, Tensor], place: int | None = None) -> Collected | None:
        """The samples from what a checkpoint has of them; None if they answer other prompts than are planned.

        Args:
            step: see `collect_group`.
            tensors: see `Collected.tensors`.
            place: see `collect_group`; None: of the whole step.
        """
        rows, num_streamed = self.curriculum.planned(step)
        if place is not None:
            rows, num_streamed = rows[place : place + 1], 1
        prompts = self.prompts.select(rows)
        if not torch.equal(_ids(prompts), tensors[_PROMPTS]):
            return None
        return Collected(rows, prompts, num_streamed, Samples.of_tensors(tensors), tensors.get(_GREEDY))

    def again(self, tensors: Mapping[str, Tensor]) -> Collected:
        """The samples that a run has kept of a step, see `Collected.tensors`.

        Raises:
            ValueError: they answer prompts that the data does not have in these rows.
        """
        rows = tensors[_ROWS].tolist()
        if max(rows) >= len(self.prompts) or not torch.equal(_ids(self.prompts.select(rows)), tensors[_PROMPTS]):
            raise ValueError("the samples answer other prompts than the data has: give the data of the run")
        samples = Samples.of_tensors(tensors)
        return Collected(rows, self.prompts.select(rows), int(tensors[_STREAMED]), samples, tensors.get(_GREEDY))

    def rows_with_signal(self, scored: Samples) -> list[int]:
        """The rows of the prompts whose samples differ in what the configuration compares."""
        return rows_with_signal(scored, self.config.algorithm.filter_by, self.config.reward.clip)

    def taught(self, samples: Samples, with_signal: list[int]) -> Samples:
        """The samples to learn from, given the rows with a signal. Their turns' rewards are within the bounds."""
        samples = clip_turns(samples, self.config.reward.clip)
        if not self.config.algorithm.skip_equal_groups:
            return samples
        return samples.of_rows(with_signal[: self.config.rollout.prompts_per_step])

    def metrics(self, collected: Collected) -> dict[str, float]:
        """What the curriculum and the early stop have done in a step, and what each environment has rewarded."""
        algorithm, metrics = self.config.algorithm, {}
        if algorithm.first_samples is not None:
            metrics |= early_stop_metrics(collected.samples, self.config.rollout.samples_per_prompt)
        if algorithm.curriculum:
            metrics["drawn_again_share"] = 1.0 - collected.num_streamed / len(collected.prompts)
            metrics |= self.curriculum.metrics()
        if self.player is not None:
            metrics |= self.player.metrics(collected.prompts, collected.samples)
        return metrics

    def penalize_length(self, scored: Samples) -> Samples:
        """The samples with the configuration's penalties on length in their rewards."""
        return penalize_length(scored, self.config.reward, self.config.rollout.max_new_tokens)

    def greedy(self, prompts: Prompts, step: int, first_row: int) -> Samples:
        """The most likely answer to each prompt, scored as the samples are. All ranks must call it together.

        Args:
            prompts: to be answered.
            step: see `collect`.
            first_row: row of the first prompt among all prompts of the step.
        """
        config = self.config.rollout
        rows = [first_row + i for i in own_rows(self.world, prompts)]
        count = config.samples_per_prompt
        # Environments draw by the seeds, which are no sample's.
        seeds = [own[count:] for own in sample_seeds(self.config.seed, step, rows, count + 1)]
        params = SamplingParams(
            max_new_tokens=config.max_new_tokens, temperature=0.0, stop=config.stop, structured=config.structured
        )
        return self.penalize_length(self.judge.score(prompts, self.answer(prompts, params, seeds)))

    def answer(self, prompts: Prompts, params: SamplingParams, seeds: Seeds | None = None) -> Samples:
        """This rank's answers to its share of the prompts. All ranks must call it together.

        Raises:
            RolloutError: the generator failed.
        """
        rollout = self.models.rollout
        try:
            with self.phases.timed("generate"):
                answers = own_samples(rollout, self.world, prompts, params, seeds, self.player)
            self.phases.busy("generate", rollout.seconds if self.player is None else self.player.seconds.generate)
            if self.player is not None:
                self.phases.within("environment", self.player.seconds.environment)
            return answers
        except NonFiniteLogitsError as error:
            if steps := rollout.weight_version - 1:
                raise NonFiniteLogitsError(f"{error} after step {steps}: {self.models.divergence('actor')}") from error
            raise NonFiniteLogitsError(
                f"{error} before the first step, although the weights in {self.config.model} are: they are too large, "
                "or of another model than config.json says"
            ) from error

    def _rollout(self, prompts: Prompts, step: int, first_row: int) -> Samples:
        """The samples of these prompts: all, or the first ones and then the rest where the first ones differ.

        Args:
            prompts: to be answered.
            step: see `collect`.
            first_row: row of the first prompt among all prompts of the step.
        """
        count, first = self.config.rollout.samples_per_prompt, self.config.algorithm.first_samples
        rows = range(first_row, first_row + len(prompts))
        samples = self._sample(prompts, step, rows, range(first or count))
        if first is None or not (differ := self.rows_with_signal(samples)):
            return samples
        more = self._sample(prompts.select(differ), step, [rows[row] for row in differ], range(first, count))
        more = more.replace(row_B=torch.tensor(differ)[more.row_B], number_B=more.number_B + first)
        return cat_samples([samples, more]).in_order()

    def _sample(self, prompts: Prompts, step: int, rows: Sequence[int], numbers: range) -> Samples:
        """Each rank samples and scores its share of the prompts; all ranks get all samples.

        Args:
            prompts: to be answered.
            step: see `collect`.
            rows: of the prompts among all prompts of the step; with the numbers, they decide every draw.
            numbers: of the samples among all samples of their prompt.
        """
        config = self.config.rollout
        params = SamplingParams(
            n=len(numbers), max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            top_k=config.top_k, min_p=config.min_p, top_p=config.top_p, stop=config.stop,
            structured=config.structured,
        )  # fmt: skip
        own = [rows[i] for i in own_rows(self.world, prompts)]
        seeds = [seeds[numbers.start :] for seeds in sample_seeds(self.config.seed, step, own, numbers.stop)]
        answers = self.answer(prompts, params, seeds)
        with self.phases.timed("reward"):
            samples = self.judge.score(prompts, answers)
        self.phases.busy("reward", self.judge.seconds)
        return samples


def _ids(prompts: Prompts) -> Tensor:
    return torch.tensor([number for ids in prompts.token_ids for number in (len(ids), *ids)], dtype=torch.int64)


def own_samples(
    rollout: Rollout | RemoteRollout, world: World, prompts: Prompts, params: SamplingParams,
    seeds: Seeds | None = None, player: EpisodePlayer | None = None,
) -> Samples:  # fmt: skip
    """This rank's answers to its share of the prompts. All ranks must call it together.

    Args:
        rollout: samples.
        world: the ranks that share the prompts.
        prompts: of all ranks.
        params: how to sample.
        seeds: of this rank's answers; None: torch's random state gives them.
        player: plays an episode per answer; None: an answer is one message.
    """
    rows = own_rows(world, prompts)
    own = prompts.select(rows)
    if player is None:
        images = world.together(own.load_images, ImageError) if prompts.images else []
        more = {"images": images} if images else {}  # the generators of a cluster take none
        samples = rollout.samples(own.token_ids, params, seeds, **more)
    else:
        samples = player.samples(rollout, world, own, params, seeds)
    return samples.replace(row_B=samples.row_B * rows.step + rows.start)


def own_rows(world: World, prompts: Prompts) -> range:
    """The prompts that this rank answers."""
    return range(world.rank, len(prompts), world.size)
