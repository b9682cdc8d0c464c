"""The training loop of PPO and GRPO. One step is :meth:`PPOTrainer.collect`, then :meth:`PPOTrainer.learn`.

With ``rollout.max_staleness``, samples come from a thread that collects them while earlier steps train, see `Schedule`.

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
from torch import Tensor

from rlft_fast.cluster import TotalUsage
from rlft_fast.config import Config
from rlft_fast.data import Batch
from rlft_fast.engine import Output, weighted
from rlft_fast.rl import AdvantageError
from rlft_fast.rollout import Rollout
from rlft_fast.run import Evaluated, Phases, StepResult, dotted, read_rollout, token_columns
from rlft_fast.trainer.collect import (
    Collected,
    Collector,
    Curriculum,
    Experience,
    Overlap,
    Schedule,
    build_batch,
    mini_batch_rows,
    rollout_metrics,
    sample_records,
    scored_samples,
    staleness_metrics,
)
from rlft_fast.trainer.evaluation import evaluate_sets
from rlft_fast.trainer.inputs import (
    check_support,
    check_tokens,
    identity_of,
    load_inputs,
    make_objective,
)
from rlft_fast.trainer.learn import Learner, asked_of_teacher, check_embeddings, with_teacher
from rlft_fast.trainer.models import build_models, check_finite, notes_on
from rlft_fast.trainer.prompts import ImageError, overlong_notes
from rlft_fast.world import STOP, LeftEarlyError, World, init_distributed

_SHOWN_EXAMPLES = 3
_AHEAD = "ahead."  # of the names of tensors in a checkpoint; then number of the group, ".", name
_MOST_GROUPS = 256  # collected at once; a thread each
_GATHER_S = 0.01  # groups that begin together ask the generator together


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
        num_training_steps = self.config.steps * algorithm.epochs * algorithm.mini_batches
        self.models = models = build_models(self._built, self.tokenizer, self.world, num_training_steps)
        self.actor, self.critic = models.actor, models.engines.get("critic")
        self.rollout = models.rollout
        self.judge.use_models(models.engines)
        self.collector = self._collector(self.phases)
        self.overlap: Overlap[Collected] | None = None
        self._kept: dict[str, Tensor] = {}  # samples of a checkpoint, before a step takes them
        self.num_updates = 0  # of the weights of now
        self.learner = Learner(self.config, models, self.objective)

    @property
    def _built(self) -> Config:
        """The configuration of the models."""
        if self.replay is None:
            return self.config
        return self.config.model_copy(update={"rollout": self.config.rollout.model_copy(update={"backend": "hf"})})

    def _collector(self, phases: Phases) -> Collector:
        return Collector(
            self.config, self.world, self.prompts, self.curriculum, self.judge, self.models, phases, self.player,
            needs_greedy=self.objective.needs_greedy,
        )  # fmt: skip

    def restart(self) -> None:
        """Starts new workers in place of all workers, after some were lost. Weights are those of the model folders."""
        self.models.close()
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
        torch.manual_seed(self._seed(step))  # for methods of one's own; samples have their own seeds
        staleness = self.config.rollout.max_staleness
        if self.replay is not None:
            collected = self.collector.again(read_rollout(self.replay, step + 1))
        else:
            collected = self._take(step, first_prompt) if staleness else self._collect(step, first_prompt)
        self.curriculum.learn(collected.rows, collected.samples)
        if staleness and self.replay is None:
            self.curriculum.plan(step + 1, first_prompt + collected.num_streamed, step + 1 + staleness)
        prompts, scored, greedy = collected.prompts, collected.samples, collected.greedy_G
        with_signal = self.collector.rows_with_signal(scored)
        samples = self.collector.penalize_length(scored)
        taught = scored_samples(self.collector.taught(samples, with_signal), greedy)
        images = self.world.together(prompts.load_images, ImageError)
        batch = self._infer(build_batch(taught, prompts.token_ids, greedy, images))
        metrics = rollout_metrics(samples, batch, len(with_signal)) | self.collector.metrics(collected)
        metrics |= staleness_metrics(samples, step + 1) if staleness else {}
        prepare = partial(self.objective.prepare, batch, self._seed(step))
        batch = self.world.together(prepare, AdvantageError)
        metrics |= self.objective.after_rollout(metrics, batch.num_sequences)
        if self.config.algorithm.mask_truncated:
            stopped = taught.stopped_B.nonzero().squeeze(1)
            batch, taught = batch.select(stopped), taught.select(stopped)
        batch = weighted(batch, self.objective.policy_loss)[0]
        return Experience(
            step=step, prompts=prompts, num_streamed=collected.num_streamed, samples=samples, taught=taught,
            batch=batch, metrics=metrics,
            kept=collected.tensors() if self.config.log_samples and self.world.is_first else None,
        )  # fmt: skip

    def _collect(self, step: int, first_prompt: int) -> Collected:
        """The samples of a step by the weights of now."""
        collected = self.collector.collect(step, first_prompt)
        with self.phases.timed("generate"):
            self.rollout.sleep()  # not before: only the sync after the update wakes it
        return collected

    def _take(self, step: int, first_prompt: int) -> Collected:
        """The samples of a step from the threads, which collect further steps meanwhile."""
        if self.overlap is None:
            self.overlap = self._begin_to_overlap(step, first_prompt)
        assert self.overlap.schedule.trained == step
        with self.phases.timed("wait"), _leaving_together(self.world):
            groups = self.overlap.take()
        collected = self.collector.joined(step, groups) if self._is_in_flight else groups[0]
        for name, seconds in collected.seconds.items():
            self.phases.seconds[name] = seconds
        return collected

    @property
    def _is_in_flight(self) -> bool:
        """Whether each prompt of a step is collected alone, and answers go on across updates."""
        return self.config.rollout.update == "in-flight"

    def _begin_to_overlap(self, first_step: int, first_prompt: int) -> Overlap[Collected]:
        rollout, count = self.rollout, self.config.rollout.prompts_per_step
        assert isinstance(rollout, Rollout)  # the configuration refuses a cluster
        rollout.restarts = False
        num_groups, num_threads = 1, 1
        if self._is_in_flight:
            num_groups, num_threads = count, min(count * (1 + self.config.rollout.max_staleness), _MOST_GROUPS)
            rollout.joined.gather_s = _GATHER_S
        kept = _by_group(self._kept)
        last_step = first_step + self.config.rollout.max_staleness
        self.curriculum.plan(first_step, first_prompt, max((last_step, *(group // num_groups for group in kept))))

        def collect(group: int) -> Collected:
            step, place = divmod(group, num_groups)
            collector = self._collector(Phases(self.world, elsewhere=TotalUsage))  # memory is measured here
            collected = collector.collect_group(step, place) if self._is_in_flight else collector.collect(step, None)
            return collected._replace(seconds=collector.phases.seconds)

        def known(group: int, tensors: dict[str, Tensor]) -> Collected | None:
            step, place = divmod(group, num_groups)
            return self.collector.of_tensors(step, tensors, place if self._is_in_flight else None)

        found = {group: known(group, own) for group, own in kept.items()}
        ready = {group: collected for group, collected in found.items() if collected is not None}
        self._kept = {}
        schedule = Schedule(
            self.config.rollout.max_staleness, self.config.steps, first_step, ready, num_groups,
            drains=not self._is_in_flight,
        )  # fmt: skip
        longest_wait_s = 60 * self.config.timeout_minutes
        return Overlap(schedule, ready, collect, self._sync, rollout.generator.name, longest_wait_s, num_threads)

    def _sync(self) -> None:
        """Gives the generator the weights of now."""
        self.rollout.weight_version = self.num_updates
        with self.phases.timed("sync"):
            self.rollout.sync()

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
        rows = mini_batch_rows(experience.batch, self.config.algorithm, self._seed(experience.step))
        if self.objective.defers_old and len(rows) > 1:
            with self.phases.timed("logprobs"):
                experience = self.learner.with_old_logprob(experience, rows[0])
        with self.phases.timed("update"):
            update = self.learner.update(experience, rows)
        self.num_updates = experience.step + 1
        if self.overlap is None:
            self._sync()
        else:
            self.overlap.train()
        metrics = experience.metrics | update.metrics | {"taught_share": experience.taught_share}
        metrics |= self.phases.metrics()
        metrics |= self.learner.utilisation(experience.batch, self.phases.seconds["update"])
        return StepResult(
            metrics=metrics, num_prompts=experience.num_streamed, warnings=experience.warnings,
            records=sample_records(
                experience.samples, experience.prompts,
                None if self.player is None else self.player.turns(experience.samples),
            ),
            tokens=self._token_columns(experience, update.outputs),
            samples=experience.kept,
        )  # fmt: skip

    def _token_columns(self, experience: Experience, outputs: Mapping[Output, Tensor]) -> dict[str, Tensor] | None:
        """What `StepResult.tokens` holds; the outputs are of the first optimizer step."""
        if self.config.log_tokens_mib is None or not self.world.is_first:
            return None
        algorithm, batch = self.config.algorithm, experience.batch
        if outputs and algorithm.epochs * algorithm.mini_batches == 1:  # otherwise they are of a part of the batch
            found = {name: x_T.where(batch.active_T, torch.nan) for name, x_T in outputs.items()}
            batch = batch.replace(logprob_T=found["logprob"], entropy_T=found["entropy"])
        return token_columns(experience.samples, experience.taught, batch, self.config.log_tokens_mib * 2**20)

    def _seed(self, step: int) -> int:
        """The seed of a step's random choices other than its samples."""
        return (self.config.seed * 1_000_003 + step) * 1_009 % 2**63

    # ---- evaluation ---------------------------------------------------------------------------------------------

    @property
    def example_prompts(self) -> list[str]:
        """See `Trainer`: the first prompts of the first set."""
        return next(iter(self.held_out.values())).texts[:_SHOWN_EXAMPLES] if self.held_out else []

    def evaluate(self) -> Evaluated:
        """The numbers of the held-out sets, see `evaluate_sets`."""
        judge = self.evaluation_judge or self.judge
        if self.overlap is not None:
            with _leaving_together(self.world):
                self.overlap.drain()
            self._sync()
        with self._restarting():
            metrics, samples = evaluate_sets(self.config, self.held_out, judge, self.collector.answer)
        first = next(iter(samples.values()))
        shown = first.select((first.number_B == 0).nonzero().flatten()[:_SHOWN_EXAMPLES])
        examples = [text.strip() for text in shown.texts or ()]
        num_scored = sum(len(found.row_B[found.has_reward_B].unique()) for found in samples.values())
        return Evaluated(metrics=metrics, examples=examples, num_scored=num_scored)

    @contextlib.contextmanager
    def _restarting(self) -> Iterator[None]:
        """Inside, nothing trains, and a generator that fails may be started again at once."""
        rollout = self.rollout
        if self.overlap is None or not isinstance(rollout, Rollout):
            yield
            return
        rollout.restarts = True
        try:
            yield
        finally:
            rollout.restarts = False

    # ---- the state of a run -------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """See `Trainer`."""
        return identity_of(self.config, self.prompts, self.held_out)

    def notes(self) -> Iterator[str]:
        """See `Trainer`."""
        yield from notes_on(self.models.engines, self.models.trained)
        sets = {"data": self.prompts} | {f"held-out data {name}".strip(): x for name, x in self.held_out.items()}
        yield from overlong_notes({name: prompts.overlong for name, prompts in sets.items()})

    def start(self, step: int) -> None:
        """Gives the generator the weights, as those of this step."""
        self.num_updates = step
        self._sync()

    def is_after(self, step: int) -> bool:
        """See `Trainer`: an update may have failed, or the generator while it took the weights of a further step."""
        return self.num_updates == step and not self.learner.is_torn

    def state(self) -> dict[str, Any]:
        """The coefficients of the objective, which adapt, and the estimates of the curriculum."""
        estimates = self.curriculum.state()
        return self.objective.state() | ({"curriculum": estimates} if estimates["row"] else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
        self.objective.load_state(state)
        self.curriculum.load_state(state.get("curriculum", {}))

    def ahead(self, *, waits: bool) -> dict[str, Tensor]:
        """See `Trainer`: the samples of coming steps."""
        if self.overlap is None:
            return self._kept
        ready = self.overlap.ready(waits=waits and not self._is_in_flight)
        return {
            f"{_AHEAD}{group}.{name}": x
            for group, collected in ready.items()
            for name, x in collected.tensors().items()
        }

    def load_ahead(self, tensors: Mapping[str, Any]) -> None:
        """See `Trainer`."""
        if self.overlap is not None:
            self.overlap.close()
        self.overlap = None
        self._kept = {name: tensor for name, tensor in tensors.items() if name.startswith(_AHEAD)}

    def close(self) -> None:
        """Ends the worker processes of reward functions and environments, and the generator."""
        with contextlib.ExitStack() as stack:  # each, also if one of them fails; the last comes first
            if self.overlap is not None:
                stack.callback(self.overlap.join)
            for part in filter(None, (self.models, self.evaluation_judge, self.judge, self.player, self.overlap)):
                stack.callback(part.close)


@contextlib.contextmanager
def _leaving_together(world: World) -> Iterator[None]:
    """Around a wait that a signal may end: the run stops then."""
    try:
        yield
    except LeftEarlyError:
        STOP.leave_together(world)
        raise


def _by_group(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """What `PPOTrainer.ahead` gave, by group."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, own = name.removeprefix(_AHEAD).split(".", 1)
        found.setdefault(int(group), {})[own] = tensor
    return found
