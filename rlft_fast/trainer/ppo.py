"""The training loop of PPO and GRPO. One step, from top to bottom, is :meth:`PPOTrainer.train_step`.

Every sample is drawn from its own seed, a function of (seed, step, row of the prompt, number of the sample), and the
order of prompts is a function of the seed. So a run that continues from a checkpoint repeats what the uninterrupted run
would have done: on CPUs bit for bit, on GPUs but for the order of additions, which the backward of attention leaves
open there. The number of processes changes a run by rounding alone.
"""

import contextlib
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlft_fast.config import Config
from rlft_fast.data import Batch, Samples, cat_samples
from rlft_fast.engine import Output, weighted
from rlft_fast.ops.packing import segment_expand
from rlft_fast.rl import AdvantageError, ValueLoss, explained_variance
from rlft_fast.rollout import (
    NonFiniteLogitsError,
    SamplingParams,
    Seeds,
    sample_seeds,
)
from rlft_fast.trainer.evaluation import (
    check_finite,
    evaluate_sets,
    own_rows,
    own_samples,
)
from rlft_fast.trainer.experience import (
    build_batch,
    merge_metrics,
    mini_batch_rows,
    mismatch,
    penalize_length,
    rollout_metrics,
    rows_with_signal,
    scored_samples,
)
from rlft_fast.trainer.folder import flat
from rlft_fast.trainer.inputs import check_support, check_tokens, load_inputs, make_objective
from rlft_fast.trainer.judge import Judge
from rlft_fast.trainer.models import build_models
from rlft_fast.trainer.phases import Phases
from rlft_fast.trainer.prompts import Prompts
from rlft_fast.trainer.tokens import token_columns
from rlft_fast.world import World, init_distributed

_OF_STEP = ("loss", "grad_norm", "learning_rate", "skipped_steps")  # metrics of an optimizer step without a token


class Step(NamedTuple):
    """The prompts, samples and metrics of a step."""

    prompts: Prompts
    """All prompts that the step took from the stream, refills included."""
    samples: Samples
    """Of all ranks, by the row of their prompt."""
    metrics: dict[str, float]
    """Also ``seconds`` in all, ``tokens_per_second``, prompts included, and the numbers of `Phases`."""
    tokens: dict[str, Tensor] | None = None
    """On the first rank: numbers of each token, see `rlft_fast.trainer.tokens`. None without ``log_tokens_mib``."""


class PPOTrainer:
    """The models, the rollout and the rewards of a configuration, and one step of learning with them.

    Everything that can be wrong with the input is checked here, before anything runs.

    Args:
        config: the run.
        world: the processes that train together; None: the processes that torchrun has started.

    Raises:
        ValueError: models, data or reward function cannot be used.
    """

    def __init__(self, config: Config, world: World | None = None) -> None:
        self.world = world = world or init_distributed(config.timeout_minutes)
        world.require_agreement("configuration", dict(flat(config.model_dump(mode="json"))))
        self.config = config
        inputs = load_inputs(config, world)
        self.objective, self.tokenizer = inputs.objective, inputs.tokenizer
        self.judge, self.evaluation_judge = inputs.judge, inputs.evaluation_judge
        self.prompts, self.held_out = inputs.prompts, inputs.held_out
        if config.cluster is None:
            self.judge.load_model()
        self._load_models()
        with contextlib.ExitStack() as stack:
            stack.callback(self.models.close)
            check_support(config, self.actor.facts.hidden_size, world.device.type)
            check_tokens("model", self.actor.facts.num_embeddings, self.prompts, *self.held_out.values())
            check_finite("model", self.actor)
            if self.critic is not None:
                check_tokens("critic.model", self.critic.facts.num_embeddings, self.prompts)
                check_finite("critic.model", self.critic)
                assert config.critic is not None
                self.value_loss = ValueLoss(
                    clip=config.critic.value_clip, aggregation=config.algorithm.aggregation,
                    max_response_tokens=config.rollout.max_new_tokens,
                )  # fmt: skip
            stack.pop_all()
        self.phases = self._make_phases()  # of the current step

    def _load_models(self) -> None:
        algorithm = self.config.algorithm
        num_training_steps = self.config.steps * algorithm.epochs * algorithm.mini_batches
        self.models = models = build_models(self.config, self.tokenizer, self.world, num_training_steps)
        self.actor, self.critic, self.reference = models.actor, models.critic, models.reference
        self.rollout = models.rollout
        self.engines: dict[str, Any] = {"actor": self.actor}  # that train
        if self.critic is not None:
            self.engines["critic"] = self.critic
        if models.reward is not None:
            self.judge.load_model(models.reward)

    def restart(self) -> None:
        """Starts new workers in place of all workers, after some were lost. Weights are those of the model folders."""
        self.models.close()
        self.objective = make_objective(self.config)  # a checkpoint or the beginning gives the adapted coefficients
        self._load_models()

    # ---- one step -----------------------------------------------------------------------------------------------

    def train_step(self, step: int, first_prompt: int | None = None) -> Step:
        """prompts -> rollout -> rewards -> batch -> old and reference log-probs, values -> advantages -> updates.

        The old log-probs follow the advantages where the updates alone read them (`Objective.defers_old`).

        Args:
            step: counts from 0; it decides every random draw.
            first_prompt: number of prompts that the steps before have taken; None: ``prompts_per_step`` each.
        """
        if first_prompt is None:
            first_prompt = step * self.config.rollout.prompts_per_step
        started = time.perf_counter()
        self.phases = self._make_phases()
        prompts, scored = self._collect(step, first_prompt)
        greedy = self._greedy_rewards(prompts) if self.objective.needs_greedy else None
        with self.phases.timed("generate"):
            self.rollout.sleep()  # not before: only the sync after the update wakes it
        with_signal = self._rows_with_signal(scored)
        samples = self._penalize_length(scored)
        taught = scored_samples(self._taught(samples, with_signal), greedy)
        with self.phases.timed("logprobs"):
            batch = self._infer(build_batch(taught, prompts.token_ids, greedy))
        metrics = rollout_metrics(samples, batch, len(with_signal))
        batch = self._with_advantages(batch, self._seed(step))
        metrics |= self.objective.after_rollout(metrics, batch.num_sequences)
        if self.config.algorithm.mask_truncated:
            stopped = taught.stopped_B.nonzero().squeeze(1)
            batch, taught = batch.select(stopped), taught.select(stopped)
        running = weighted(batch, self.objective.policy_loss)[0]  # with the weights that say which tokens run
        outputs: dict[Output, Tensor] = {}
        rows = mini_batch_rows(batch, self.config.algorithm, self._seed(step))
        if self.objective.defers_old and len(rows) > 1:
            with self.phases.timed("logprobs"):
                batch = self._with_old_logprob(batch, running.active_T, rows[0])
        with self.phases.timed("update"):
            metrics |= self._update(batch, rows, outputs, step)
        with self.phases.timed("sync"):
            self.rollout.sync()
        num_prompt_tokens = sum(len(prompts.token_ids[row]) for row in samples.row_B.tolist())
        num_tokens = num_prompt_tokens + len(samples.token_ids_T)
        metrics |= {"taught_share": int(running.active_T.sum()) / max(int(batch.loss_mask_T.sum()), 1)}
        metrics |= self.phases.metrics() | self._utilisation(batch, running)
        seconds = time.perf_counter() - started
        metrics |= {"seconds": seconds, "tokens_per_second": num_tokens / seconds}
        return Step(prompts, samples, metrics, self._token_columns(samples, taught, running, outputs))

    def _make_phases(self) -> Phases:
        return Phases(self.world, elsewhere=self.config.cluster is not None)

    def _token_columns(
        self, samples: Samples, taught: Samples, batch: Batch, outputs: dict[Output, Tensor]
    ) -> dict[str, Tensor] | None:
        """What `Step.tokens` holds; the outputs are of the first optimizer step."""
        if self.config.log_tokens_mib is None or not self.world.is_first:
            return None
        algorithm = self.config.algorithm
        if outputs and algorithm.epochs * algorithm.mini_batches == 1:  # otherwise they are of a part of the batch
            found = {name: x_T.where(batch.active_T, torch.nan) for name, x_T in outputs.items()}
            batch = batch.replace(logprob_T=found["logprob"], entropy_T=found["entropy"])
        return token_columns(samples, taught, batch, self.config.log_tokens_mib * 2**20)

    def _collect(self, step: int, first_prompt: int) -> tuple[Prompts, Samples]:
        """The prompts of a step and their samples; more prompts are added while too few have a signal.

        The penalties on length are not yet in the rewards. Steps take the stream of prompts without gaps, so that each
        pass over the data has every prompt once.
        """
        count, refills = self.config.rollout.prompts_per_step, self.config.algorithm.max_refills
        torch.manual_seed(self._seed(step))  # for methods of one's own; samples have their own seeds
        rows: list[int] = []
        samples: Samples | None = None
        for _ in range(1 + refills):
            more = self.prompts.order(first_prompt + len(rows), count, self.config.seed)
            found = self._rollout(self.prompts.select(more), step, len(rows))
            found = found.replace(row_B=found.row_B + len(rows))
            samples = found if samples is None else cat_samples([samples, found])
            rows += more
            if not refills or len(self._rows_with_signal(samples)) >= count:
                break
        assert samples is not None
        return self.prompts.select(rows), samples

    def _utilisation(self, batch: Batch, running: Batch) -> dict[str, float]:
        """FLOP/s of a device in the update, and their share of the device's peak where the peak is known."""
        flops = self.actor.facts.flops.of(running)
        if self.critic is not None:
            flops += self.critic.facts.flops.of(batch)
        flops *= self.config.algorithm.epochs
        facts = self.actor.facts
        flops_per_second = flops / self.phases.seconds["update"] / facts.num_ranks
        peak = facts.peak_flops
        found = {"tflops_update": flops_per_second / 1e12}
        return found if peak is None else found | {"mfu_update": flops_per_second / peak}

    def _rows_with_signal(self, scored: Samples) -> list[int]:
        return rows_with_signal(scored, self.config.algorithm.filter_by)

    def _taught(self, samples: Samples, with_signal: list[int]) -> Samples:
        """The samples to learn from."""
        if not self.config.algorithm.skip_equal_groups:
            return samples
        return samples.of_rows(with_signal[: self.config.rollout.prompts_per_step])

    def _penalize_length(self, scored: Samples) -> Samples:
        return penalize_length(scored, self.config.reward, self.config.rollout.max_new_tokens)

    def _rollout(self, prompts: Prompts, step: int, first_row: int) -> Samples:
        """Each rank samples and scores its share of the prompts; all ranks get all samples.

        Args:
            prompts: to be answered.
            step: see `train_step`.
            first_row: row of the first prompt among all prompts of the step.
        """
        config = self.config.rollout
        params = SamplingParams(
            n=config.samples_per_prompt, max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, stop=config.stop,
        )  # fmt: skip
        own = [first_row + row for row in own_rows(self.world, prompts)]
        answers = self._generate(prompts, params, sample_seeds(self.config.seed, step, own, params.n))
        with self.phases.timed("reward"):
            samples = self.judge.score(prompts, answers)
        self.phases.busy("reward", self.judge.seconds)
        return samples

    def _generate(self, prompts: Prompts, params: SamplingParams, seeds: Seeds | None = None) -> Samples:
        """This rank's answers to its share of the prompts."""
        try:
            with self.phases.timed("generate"):
                answers = own_samples(self.rollout, self.world, prompts, params, seeds)
            self.phases.busy("generate", self.rollout.seconds)
            return answers
        except NonFiniteLogitsError as error:
            if steps := self.rollout.weight_version - 1:
                raise NonFiniteLogitsError(f"{error} after step {steps}: {self.divergence('actor')}") from error
            raise NonFiniteLogitsError(
                f"{error} before the first step, although the weights in {self.config.model} are: they are too large, "
                "or of another model than config.json says"
            ) from error

    def divergence(self, name: str) -> str:
        """What has happened to an engine whose numbers are not finite after a step, and what to do."""
        key, optimizer = f"{name}.optimizer", self.engines[name].config.optimizer
        return (
            f"the run has diverged. Lower {key}.learning_rate ({optimizer.learning_rate:g}) or {key}.max_grad_norm "
            f"({optimizer.max_grad_norm})"
        )

    def _greedy_rewards(self, prompts: Prompts) -> Tensor:
        """(prompts,) float64, the reward of the most likely answer to each prompt; NaN where there is none."""
        return self._penalize_length(self._greedy(prompts, self.config.rollout.max_new_tokens, self.judge)).reward_B

    def _greedy(self, prompts: Prompts, max_new_tokens: int, judge: Judge) -> Samples:
        """One most likely answer to each prompt, from all ranks."""
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, stop=self.config.rollout.stop)
        return judge.score(prompts, self._generate(prompts, params))

    def _infer(self, batch: Batch) -> Batch:
        """Log-probabilities and values under the models as they are before the updates."""
        inferred = self.actor.infer(batch, self.objective.outputs) if self.objective.outputs else {}
        old_logprob_T = None if self.objective.defers_old else inferred.get("logprob", batch.rollout_logprob_T)
        batch = batch.replace(
            logprob_T=inferred.get("logprob"), old_logprob_T=old_logprob_T, entropy_T=inferred.get("entropy"),
            sum_prob_squared_T=inferred.get("sum_prob_squared"),
        )  # fmt: skip
        if self.config.algorithm.kl_coef:
            batch = batch.replace(ref_logprob_T=self._reference_logprob(batch))
        if self.critic is not None:
            batch = batch.replace(value_T=self.critic.infer(batch, ("value",))["value"])
        return batch

    def _reference_logprob(self, batch: Batch) -> Tensor:
        if self.reference is not None:
            return self.reference.infer(batch, ("logprob",))["logprob"]
        with self.actor.disable_adapter():
            return self.actor.infer(batch, ("logprob",))["logprob"]

    def _with_advantages(self, batch: Batch, seed: int) -> Batch:
        """The batch with advantages; a failure on one rank is raised on all, so that no rank updates alone."""
        failure: AdvantageError | None = None
        try:
            batch = self.objective.prepare(batch, seed)
        except AdvantageError as error:
            failure = error
        if self.world.any_rank(failure is not None):
            raise failure or AdvantageError("the advantage failed in another process, which says why")
        return batch

    def _with_old_logprob(self, batch: Batch, active_T: Tensor, first: np.ndarray) -> Batch:
        """The batch with log π_old where an optimizer step after the first reads it, and 0 elsewhere.

        Args:
            batch: the rollout.
            active_T: (T,) bool, the tokens that run.
            first: the sequences of the first optimizer step, whose forward computes log π_old itself.
        """
        is_later_B = torch.ones(batch.num_sequences, dtype=torch.bool)
        is_later_B[first] = False
        read_T = active_T & segment_expand(is_later_B, batch.cu_seqlens, num_tokens=batch.num_tokens)
        logprob_T = torch.zeros(batch.num_tokens)
        if read_T.any():
            logprob_T = self.actor.infer(batch.replace(loss_mask_T=read_T), ("logprob",))["logprob"]
        return batch.replace(logprob_T=logprob_T, old_logprob_T=logprob_T)

    def _update(
        self, batch: Batch, rows: list[np.ndarray], outputs: dict[Output, Tensor], step: int
    ) -> dict[str, float]:
        """One optimizer step per mini-batch: first all of the critic's, then all of the policy's.

        The schedules of the learning rates follow the run: a step without anything to learn from counts as any other.

        Args:
            batch: the rollout.
            rows: the sequences of each mini-batch.
            outputs: filled with the outputs of the policy's first step where no pass before gave log-probabilities.
            step: see `train_step`.
        """
        algorithm = self.config.algorithm
        first = step * algorithm.epochs * algorithm.mini_batches

        def cut() -> list[Batch]:
            return [batch] if len(rows) == 1 else [batch.select(part) for part in rows]

        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self.critic.train_mode():
                metrics = merge_metrics([self._critic_step(part, first + i) for i, part in enumerate(cut())])
        with self.actor.train_mode():
            return metrics | self._actor_steps(cut(), outputs, first)

    def _actor_steps(
        self, cut: list[Batch], outputs: dict[Output, Tensor], first_schedule_step: int
    ) -> dict[str, float]:
        """Metrics of the policy's optimizer steps, and the mismatch where no pass over the rollout gave it.

        The forward of the first step then gives log π_old of its tokens. In later steps the policy is no longer the one
        that sampled.
        """
        defers_old, steps = self.objective.defers_old, []
        ran: list[Batch] = []  # with log π_old of the tokens that ran
        for schedule_step, mini_batch in enumerate(cut, first_schedule_step):
            loss, asked = self.objective.policy_loss, None
            if not steps and (defers_old or mini_batch.logprob_T is None):
                asked = outputs
            if not steps and self.objective.starts_on_policy:
                loss = replace(loss, on_policy=True)
            active_T = weighted(mini_batch, loss)[0].active_T
            metrics = self.actor.train_step(mini_batch, loss, outputs=asked, schedule_step=schedule_step)
            metrics |= self.objective.after_optimizer_step(metrics)
            steps.append(metrics if active_T.any() else {name: metrics[name] for name in _OF_STEP})
            if defers_old or asked is not None:
                logprob_T = mini_batch.logprob_T if asked is None else asked["logprob"]
                ran.append(mini_batch.replace(loss_mask_T=active_T, logprob_T=logprob_T))
        return mismatch(*ran) | merge_metrics(steps)

    def _critic_step(self, mini_batch: Batch, schedule_step: int) -> dict[str, float]:
        assert self.critic is not None
        values = self.critic.train_step(mini_batch, self.value_loss, schedule_step=schedule_step)
        moments = {name: torch.tensor(value) for name, value in values.items()}
        names = ("grad_norm", "skipped_steps", "value_loss", "value_clip_share")
        metrics = {f"critic_{name}": values[name] for name in names}
        return metrics | {"critic_explained_variance": explained_variance(moments).item()}

    def _seed(self, step: int) -> int:
        """The seed of a step's random choices other than its samples."""
        return (self.config.seed * 1_000_003 + step) * 1_009 % 2**63

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[dict[str, float], dict[str, Samples]]:
        """The numbers of the held-out sets, and the answers to each set by its name, see `evaluate_sets`."""
        return evaluate_sets(self.config, self.held_out, self.evaluation_judge or self.judge, self._generate)

    def close(self) -> None:
        """Ends the reward functions' worker processes and the generator."""
        with contextlib.ExitStack() as stack:  # each, also if one of them fails
            for part in filter(None, (self.models, self.evaluation_judge, self.judge)):
                stack.callback(part.close)
