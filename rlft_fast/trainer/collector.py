"""The samples of a step: prompts from the stream, answers of the rollout, rewards of the judge."""

from rlft_fast.config import Config
from rlft_fast.data import Samples, cat_samples
from rlft_fast.rollout import NonFiniteLogitsError, SamplingParams, Seeds, sample_seeds
from rlft_fast.run import Phases
from rlft_fast.trainer.evaluation import own_rows, own_samples
from rlft_fast.trainer.experience import penalize_length, rows_with_signal
from rlft_fast.trainer.judge import Judge
from rlft_fast.trainer.models import Models
from rlft_fast.trainer.prompts import Prompts
from rlft_fast.world import World


class Collector:
    """Answers the prompts of a step, and scores the answers.

    Args:
        config: of the run.
        world: the ranks that share the prompts.
        prompts: to learn from.
        judge: scores the answers.
        models: their rollout answers.
        phases: are told of generation and scoring.
    """

    def __init__(
        self, config: Config, world: World, prompts: Prompts, judge: Judge, models: Models, phases: Phases
    ) -> None:
        self.config, self.world, self.prompts, self.judge = config, world, prompts, judge
        self.models, self.phases = models, phases

    def collect(self, step: int, first_prompt: int) -> tuple[Prompts, Samples]:
        """The prompts of a step and their samples; more prompts are added while too few have a signal.

        The penalties on length are not yet in the rewards. Steps take the stream of prompts without gaps, so that each
        pass over the data has every prompt once.

        Args:
            step: counts from 0; it decides every random draw.
            first_prompt: number of prompts that the steps before have taken.
        """
        config, count = self.config, self.config.rollout.prompts_per_step
        rows: list[int] = []
        samples: Samples | None = None
        for _ in range(1 + config.algorithm.max_refills):
            more = self.prompts.order(first_prompt + len(rows), count, config.seed)
            found = self._rollout(self.prompts.select(more), step, len(rows))
            found = found.replace(row_B=found.row_B + len(rows))
            samples = found if samples is None else cat_samples([samples, found])
            rows += more
            if not config.algorithm.max_refills or len(self.rows_with_signal(samples)) >= count:
                break
        assert samples is not None
        return self.prompts.select(rows), samples

    def rows_with_signal(self, scored: Samples) -> list[int]:
        """The rows of the prompts whose samples differ in what the configuration compares."""
        return rows_with_signal(scored, self.config.algorithm.filter_by)

    def taught(self, samples: Samples, with_signal: list[int]) -> Samples:
        """The samples to learn from, given the rows with a signal."""
        if not self.config.algorithm.skip_equal_groups:
            return samples
        return samples.of_rows(with_signal[: self.config.rollout.prompts_per_step])

    def penalize_length(self, scored: Samples) -> Samples:
        """The samples with the configuration's penalties on length in their rewards."""
        return penalize_length(scored, self.config.reward, self.config.rollout.max_new_tokens)

    def greedy(self, prompts: Prompts) -> Samples:
        """The most likely answer to each prompt, scored as the samples are. All ranks must call it together."""
        config = self.config.rollout
        params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=0.0, stop=config.stop)
        return self.penalize_length(self.judge.score(prompts, self.answer(prompts, params)))

    def answer(self, prompts: Prompts, params: SamplingParams, seeds: Seeds | None = None) -> Samples:
        """This rank's answers to its share of the prompts. All ranks must call it together.

        Raises:
            RolloutError: the generator failed.
        """
        rollout = self.models.rollout
        try:
            with self.phases.timed("generate"):
                answers = own_samples(rollout, self.world, prompts, params, seeds)
            self.phases.busy("generate", rollout.seconds)
            return answers
        except NonFiniteLogitsError as error:
            if steps := rollout.weight_version - 1:
                raise NonFiniteLogitsError(f"{error} after step {steps}: {self.models.divergence('actor')}") from error
            raise NonFiniteLogitsError(
                f"{error} before the first step, although the weights in {self.config.model} are: they are too large, "
                "or of another model than config.json says"
            ) from error

    def _rollout(self, prompts: Prompts, step: int, first_row: int) -> Samples:
        """Each rank samples and scores its share of the prompts; all ranks get all samples.

        Args:
            prompts: to be answered.
            step: see `collect`.
            first_row: row of the first prompt among all prompts of the step.
        """
        config = self.config.rollout
        params = SamplingParams(
            n=config.samples_per_prompt, max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, stop=config.stop,
        )  # fmt: skip
        own = [first_row + row for row in own_rows(self.world, prompts)]
        answers = self.answer(prompts, params, sample_seeds(self.config.seed, step, own, params.n))
        with self.phases.timed("reward"):
            samples = self.judge.score(prompts, answers)
        self.phases.busy("reward", self.judge.seconds)
        return samples
