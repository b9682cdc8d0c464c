"""The training loop of PPO and GRPO. One step is :meth:`PPOTrainer.collect`, then :meth:`PPOTrainer.learn`.

A `SampleSource` has the samples: it collects them for the step, or ahead of it while earlier steps train.

Every sample is drawn from its own seed, a function of (seed, step, row of the prompt, number of the sample), and the
order of prompts is a function of the seed. So a run that continues from a checkpoint repeats what the uninterrupted run
would have done: on CPUs bit for bit, on GPUs but for the order of additions, which the backward of attention leaves
open there. The number of processes changes a run by rounding alone.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlft_fast.config import Config, ConfigError, load_config
from rlft_fast.data import Batch, Images, Samples
from rlft_fast.engine import weighted
from rlft_fast.rl import AdvantageError
from rlft_fast.run import Evaluated, Phases, StepResult, dotted
from rlft_fast.trainer.collect import (
    Collector,
    Curriculum,
    Experience,
    SampleSource,
    build_batch,
    logged_tokens,
    mini_batch_rows,
    rollout_metrics,
    sample_records,
    scored_samples,
    staleness_metrics,
)
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.evaluation import evaluate_sets
from rlft_fast.trainer.inputs import (
    check_support,
    check_tokens,
    identity_of,
    load_inputs,
    make_objective,
)
from rlft_fast.trainer.learn import Learner, asked_of_teacher, check_embeddings, with_teacher
from rlft_fast.trainer.models import build_models, check_finite, notes_on, without_generator
from rlft_fast.trainer.prompts import ImageError, Prompts, named_sets, overlong_notes
from rlft_fast.world import World, init_distributed

_SHOWN_EXAMPLES = 3


class PPOTrainer:
    """The models, the rollout and the rewards of a configuration, and one step of learning with them.

    Everything that can be wrong with the input is checked here, before anything runs.

    Args:
        config: the run.
        world: the processes that train together; None: the processes that torchrun has started.
        replay: folder of a run with ``log_samples``, whose samples are learned from. The policy samples for evaluations
            alone, and no other generator is started.

    Raises:
        ValueError: models, data or reward function cannot be used.
    """

    def __init__(self, config: Config, world: World | None = None, replay: Path | None = None) -> None:
        self.replay = replay
        self.world = world = world or init_distributed(config.timeout_minutes)
        world.require_agreement("configuration", dict(dotted(config.model_dump(mode="json"))))
        self.config = config
        inputs = load_inputs(config, world)
        self.objective, self.tokenizer = inputs.objective, inputs.tokenizer
        self.judge, self.evaluation_judge = inputs.judge, inputs.evaluation_judge
        self.prompts, self.held_out = inputs.prompts, inputs.held_out
        self.player = inputs.player
        self.curriculum = Curriculum(inputs.prompts, config)
        elsewhere = None if config.cluster is None else lambda: self.models.take_usage()  # of the models of now
        self.phases = Phases(world, elsewhere=elsewhere)  # of the current step
        self._load_models()
        with contextlib.ExitStack() as stack:
            stack.callback(self.models.close)
            check_support(config, self.actor.facts.hidden_size, world.device.type)
            check_tokens("model", self.actor.facts.num_embeddings, self.prompts, *self.held_out.values())
            check_finite("model", self.actor)
            if self.critic is not None:
                check_tokens("critic.model", self.critic.facts.num_embeddings, self.prompts)
                check_finite("critic.model", self.critic)
            if (teacher := self.models.engines.get("teacher")) is not None:
                assert config.teacher is not None
                check_embeddings(self.actor.facts.num_embeddings, teacher.facts.num_embeddings, config.teacher)
                check_finite("teacher.model", teacher)
            stack.pop_all()

    def _load_models(self) -> None:
        algorithm = self.config.algorithm
        num_training_steps = _scheduled_steps(self.config, self.replay) * algorithm.epochs * algorithm.mini_batches
        built = self.config if self.replay is None else without_generator(self.config)
        self.models = models = build_models(built, self.tokenizer, self.world, num_training_steps)
        self.actor, self.critic = models.actor, models.engines.get("critic")
        self.rollout = models.rollout
        self.judge.use_models(models.engines)
        self.collector = Collector(
            self.config, self.world, self.prompts, self.curriculum, self.judge, models, self.phases, self.player,
            needs_greedy=self.objective.needs_greedy,
        )  # fmt: skip
        self._identity = identity_of(self.config, self.prompts, self.held_out)
        self.source = SampleSource(self.collector, self._identity, self.replay)
        self.learner = Learner(self.config, models, self.objective)

    def restart(self) -> None:
        """Starts new workers in place of all workers, after some were lost. Weights are those of the model folders."""
        self.source.close()
        self.models.close()
        self.source.join()
        self.objective = make_objective(self.config)  # a checkpoint or the beginning gives the adapted coefficients
        self._load_models()

    # ---- one step -----------------------------------------------------------------------------------------------

    def train_step(self, step: int, first_prompt: int | None = None) -> StepResult:
        """`collect`, then `learn`.

        Args:
            step: counts from 0; it decides every random draw.
            first_prompt: number of prompts of the stream that the steps before have taken; None: ``prompts_per_step``
                each.
        """
        started = time.perf_counter()
        experience = self.collect(step, first_prompt)
        result = self.learn(experience)
        seconds = time.perf_counter() - started
        result.metrics.update(seconds=seconds, tokens_per_second=experience.num_tokens / seconds)
        if (waited := result.metrics.get("seconds_environment")) is not None:
            result.metrics["environment_time_share"] = waited / seconds
        return result

    def collect(self, step: int, first_prompt: int | None = None) -> Experience:
        """prompts -> rollout -> rewards -> batch -> old and reference log-probs, values -> advantages.

        The old log-probs are left to `learn` where the updates alone read them (`Objective.defers_old`).

        Args:
            step: see `train_step`.
            first_prompt: see `train_step`.
        """
        if first_prompt is None:
            first_prompt = step * self.config.rollout.prompts_per_step
        self.phases.restart()
        torch.manual_seed(_seed(self.config, step))  # for methods of one's own; samples have their own seeds
        collected = self.source.take(step, first_prompt)
        prompts, scored, greedy = collected.prompts, collected.samples, collected.greedy_G
        with_signal = self.collector.rows_with_signal(scored)
        samples = self.collector.penalize_length(scored)
        taught = self.collector.taught(samples, with_signal)
        if self.config.algorithm.advantage != "none" or self.player is not None:  # an episode without one has failed
            taught = scored_samples(taught, greedy)  # a teacher alone needs no reward
        images = self.world.together(partial(_images, prompts, taught, self.player), ImageError)
        batch = build_batch(taught, prompts.token_ids, greedy, images)
        batch = self._infer(self.objective.normalized(batch, samples.reward_B[samples.has_reward_B]))
        metrics = rollout_metrics(samples, batch, len(with_signal)) | self.collector.metrics(collected)
        if max_staleness := self.config.rollout.max_staleness:
            metrics |= staleness_metrics(samples, step + 1, max_staleness)
        prepare = partial(self.objective.prepare, batch, _seed(self.config, step))
        batch = self.world.together(prepare, AdvantageError)
        moves = not self.learner.freezes_actor(step)  # else its divergence says nothing of the penalty's weight
        metrics |= self.objective.after_rollout(metrics, len(taught) if moves else 0)
        if self.config.algorithm.mask_truncated:
            stopped_B = taught.stopped_B
            ends_B = stopped_B if batch.episode_B is None else stopped_B[batch.episode_B]
            batch, taught = batch.select(ends_B.nonzero().flatten()), taught.select(stopped_B.nonzero().flatten())
        batch = weighted(batch, self.objective.policy_loss)[0]
        return Experience(
            step=step, prompts=prompts, num_streamed=collected.num_streamed, samples=samples, taught=taught,
            batch=batch, metrics=metrics,
            kept=collected.tensors() if self.config.log_samples and self.world.is_first else None,
        )  # fmt: skip

    def _infer(self, batch: Batch) -> Batch:
        """The batch with what the models compute before the update. A teacher with workers of its own works beside."""
        asked = None
        if (teacher := self.models.engines.get("teacher")) is not None:
            with self.phases.timed("teacher"):
                asked = teacher.submit_infer(batch, asked_of_teacher(self.config.teacher))
        with self.phases.timed("logprobs"):
            batch = self.learner.infer(batch)
        if asked is not None:
            with self.phases.timed("teacher"):
                batch = with_teacher(batch, asked.result(), self.actor.facts.num_embeddings)
        return batch

    def learn(self, experience: Experience) -> StepResult:
        """old log-probs, where `collect` left them out -> updates -> the rollout gets the new weights."""
        rows = mini_batch_rows(experience.batch, self.config.algorithm, _seed(self.config, experience.step))
        if self.objective.defers_old and len(rows) > 1:
            with self.phases.timed("logprobs"):
                experience = self.learner.with_old_logprob(experience, rows[0])
        with self.phases.timed("update"):
            update = self.learner.update(experience, rows)
        self.source.update(experience.step)
        metrics = experience.metrics | update.metrics | {"taught_share": experience.taught_share}
        metrics |= self.phases.metrics()
        metrics |= {"sync_mib": self.rollout.sync_bytes / 2**20} if self.rollout.sync_bytes else {}
        metrics |= self.learner.utilisation(experience, self.phases.seconds["update"])
        logs_tokens = self.config.log_tokens_mib is not None and self.world.is_first
        return StepResult(
            metrics=metrics, num_prompts=experience.num_streamed, warnings=experience.warnings,
            records=_records(experience, self.player),
            tokens=logged_tokens(experience, update.outputs, self.config) if logs_tokens else None,
            samples=experience.kept,
        )  # fmt: skip

    # ---- evaluation ---------------------------------------------------------------------------------------------

    @property
    def example_prompts(self) -> list[str]:
        """See `Trainer`: the first prompts of the first set."""
        return next(iter(self.held_out.values())).texts[:_SHOWN_EXAMPLES] if self.held_out else []

    def evaluate(self) -> Evaluated:
        """The numbers of the held-out sets, see `evaluate_sets`."""
        judge = self.evaluation_judge or self.judge
        with self.source.at_rest():
            metrics, samples = evaluate_sets(self.config, self.held_out, judge, self.collector.answer)
        first = next(iter(samples.values()))
        shown = first.select((first.number_B == 0).nonzero().flatten()[:_SHOWN_EXAMPLES])
        examples = [text.strip() for text in shown.texts or ()]
        num_scored = sum(len(found.row_B[found.has_reward_B].unique()) for found in samples.values())
        return Evaluated(metrics=metrics, examples=examples, num_scored=num_scored)

    # ---- the state of a run -------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """See `Trainer`."""
        return self._identity

    def notes(self) -> Iterator[str]:
        """See `Trainer`."""
        yield from notes_on(self.models.engines, self.models.trained)
        sets = named_sets(self.prompts, self.held_out)
        yield from overlong_notes({name: prompts.overlong for name, prompts in sets.items()})

    def start(self, step: int) -> None:
        """Gives the generator the weights, as those of this step."""
        self.source.start(step)

    def is_after(self, step: int) -> bool:
        """See `Trainer`: an update may have failed, or the generator while it took the weights of a further step."""
        return self.source.num_updates == step and not self.learner.is_torn

    def state(self) -> dict[str, Any]:
        """The coefficients of the objective, which adapt, and the estimates of the curriculum."""
        estimates = self.curriculum.state()
        return self.objective.state() | ({"curriculum": estimates} if estimates["row"] else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
        self.objective.load_state(state)
        self.curriculum.load_state(state.get("curriculum", {}))

    def ahead(self, *, waits: bool) -> dict[str, Any]:
        """See `Trainer`: the samples of coming steps."""
        return self.source.ahead(waits=waits)

    def load_ahead(self, tensors: Mapping[str, Any]) -> None:
        """See `Trainer`."""
        self.source.load_ahead(tensors)

    def close(self) -> None:
        """Ends the worker processes of reward functions and environments, and the generator."""
        with contextlib.ExitStack() as stack:  # each, also if one of them fails; the last comes first
            stack.callback(self.source.join)
            for part in filter(None, (self.models, self.evaluation_judge, self.judge, self.player, self.source)):
                stack.callback(part.close)


def _scheduled_steps(config: Config, replay: Path | None) -> int:
    """Steps over which learning rates change: a replay of the first steps of a run has the rates of the whole run."""
    if replay is None:
        return config.steps
    try:
        return max(config.steps, load_config(replay / "config.yaml").steps)
    except ConfigError:  # the folder has samples alone
        return config.steps


def _seed(config: Config, step: int) -> int:
    """The seed of a step's random choices other than its samples."""
    return (config.seed * 1_000_003 + step) * 1_009 % 2**63


def _images(prompts: Prompts, samples: Samples, player: EpisodePlayer | None) -> list[Images | None]:
    """The images of each sample; empty: no sample has images."""
    images = prompts.load_images()
    if player is not None:
        return player.images(samples, images)
    return [images[row] for row in samples.row_B.tolist()] if images else []


def _records(experience: Experience, player: EpisodePlayer | None) -> Iterator[dict[str, Any]]:
    """What the log of samples holds of each."""
    samples, prompts = experience.samples, experience.prompts
    if player is None:
        return sample_records(samples, prompts)
    return sample_records(samples, prompts, player.turns(samples), player.played(prompts, samples))
