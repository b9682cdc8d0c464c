"""What the models of a run compute for an objective: columns of a batch before the update, and the update."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlft_fast.config import Config
from rlft_fast.data import Batch
from rlft_fast.engine import Engine, Future, Output, results
from rlft_fast.ops.packing import segment_expand
from rlft_fast.rl import ValueLoss, explained_variance
from rlft_fast.trainer.collect import Experience, merge_metrics, mismatch
from rlft_fast.trainer.learn.objective import Objective
from rlft_fast.trainer.models import Models, with_known_tokens

_OF_STEP = ("loss", "grad_norm", "learning_rate", "skipped_steps")  # metrics of an optimizer step without a token


class Update(NamedTuple):
    """What the optimizer steps of a rollout give."""

    metrics: dict[str, float]
    outputs: Mapping[Output, Tensor]
    """Of the policy's first step, where no pass before it gave log-probabilities; empty elsewhere."""


class Learner:
    """Runs the policy, the critic and the reference over batches, and steps the models that train.

    Args:
        config: of the run.
        models: that compute.
        objective: what the policy learns; its coefficients adapt.

    Attributes:
        is_torn: whether an update has left the models between two steps: it failed after an optimizer step, or, with
            several ranks, each rank may have left it at another place.
    """

    def __init__(self, config: Config, models: Models, objective: Objective) -> None:
        self.config, self.models, self.objective = config, models, objective
        self.actor, self.critic = models.actor, models.engines.get("critic")
        self.is_torn = False
        self.value_loss: ValueLoss | None = None
        if config.critic is not None:
            self.value_loss = ValueLoss(
                clip=config.critic.value_clip, aggregation=config.algorithm.aggregation,
                max_response_tokens=config.rollout.max_new_tokens,
            )  # fmt: skip

    # ---- before the update --------------------------------------------------------------------------------------

    def infer(self, batch: Batch) -> Batch:
        """The batch with log-probabilities and values under the models as they are before the updates."""
        objective, critic = self.objective, self.critic
        begun: dict[str, Future[dict[Output, Tensor]]] = {}  # engines with workers of their own work at the same time
        if objective.outputs:
            begun["actor"] = self.actor.submit_infer(batch, objective.outputs)
        if self.config.algorithm.kl_coef:
            begun["reference"] = self._submit_reference(batch)
        if critic is not None:
            begun["critic"] = critic.submit_infer(with_known_tokens(batch, critic), ("value",))
        found = results(begun)
        inferred = found.get("actor", {})
        old_logprob_T = None if objective.defers_old else inferred.get("logprob", batch.rollout_logprob_T)
        batch = batch.replace(
            logprob_T=inferred.get("logprob"), old_logprob_T=old_logprob_T, entropy_T=inferred.get("entropy"),
            sum_prob_squared_T=inferred.get("sum_prob_squared"), routed_experts_TK=inferred.get("routed_experts"),
        )  # fmt: skip
        if "reference" in found:
            batch = batch.replace(ref_logprob_T=found["reference"]["logprob"])
        if "critic" in found:
            batch = batch.replace(value_T=found["critic"]["value"])
        return batch

    def _submit_reference(self, batch: Batch) -> Future[dict[Output, Tensor]]:
        if (reference := self.models.engines.get("reference")) is not None:
            return reference.submit_infer(batch, ("logprob",))
        with self.actor.disable_adapter():
            return self.actor.submit_infer(batch, ("logprob",))

    def with_old_logprob(self, experience: Experience, first: np.ndarray) -> Experience:
        """The experience with log π_old where an optimizer step after the first reads it, and 0 elsewhere.

        Args:
            experience: whose batch has none.
            first: the sequences of the first optimizer step, whose forward computes log π_old itself.
        """
        batch = experience.batch
        is_later_B = torch.ones(batch.num_sequences, dtype=torch.bool)
        is_later_B[first] = False
        read_T = batch.active_T & segment_expand(is_later_B, batch.cu_seqlens, num_tokens=batch.num_tokens)
        logprob_T = torch.zeros(batch.num_tokens)
        if read_T.any():
            logprob_T = self.actor.infer(batch.replace(loss_mask_T=read_T), ("logprob",))["logprob"]
        return replace(experience, batch=batch.replace(logprob_T=logprob_T, old_logprob_T=logprob_T))

    # ---- the update ---------------------------------------------------------------------------------------------

    def update(self, experience: Experience, rows: list[np.ndarray]) -> Update:
        """One optimizer step per mini-batch: first all of the critic's, then all of the policy's.

        A critic with workers of its own trains at the same time as the policy.

        The schedules of the learning rates follow the run: a step without anything to learn from counts as any other.
        The policy's begins when the policy does.

        Args:
            experience: to learn from.
            rows: the sequences of each mini-batch.
        """
        algorithm, batch = self.config.algorithm, experience.batch

        def mini_batches(step: int) -> list[tuple[int, Batch]]:
            """With the number of the optimizer step in the schedule, of which this is the step."""
            cut = [batch] if len(rows) == 1 else [batch.select(part) for part in rows]
            return [*enumerate(cut, step * algorithm.epochs * algorithm.mini_batches)]

        begun: dict[str, Future[dict[str, float]]] = {}
        critic = self.critic
        self.is_torn = critic is not None or self.actor.facts.num_ranks > 1
        if critic is not None:
            with critic.train_mode():
                parts = mini_batches(experience.step)
                begun = {f"critic, step {n}": self._submit_critic_step(critic, part, n) for n, part in parts}
        if self.freezes_actor(experience.step):
            found: dict[str, Any] = {"actor": Update({}, {}), **results(begun)}
        else:
            with self.actor.train_mode():
                own = mini_batches(experience.step - self.config.frozen_steps)
                found = results({"actor": Future(lambda: self._actor_steps(own)), **begun})
        self.is_torn = False
        update: Update = found.pop("actor")
        metrics = _critic_metrics(merge_metrics([*found.values()])) if found else {}
        return Update(metrics | update.metrics, update.outputs)

    def freezes_actor(self, step: int) -> bool:
        """Whether the critic alone learns in a step."""
        return step < self.config.frozen_steps

    def _actor_steps(self, mini_batches: list[tuple[int, Batch]]) -> Update:
        """The policy's optimizer steps, with the mismatch where no pass over the rollout gave it.

        The forward of the first step then gives log π_old of its tokens. In later steps the policy is no longer the one
        that sampled.
        """
        defers_old = self.objective.defers_old
        outputs: dict[Output, Tensor] = {}
        steps: list[dict[str, float]] = []
        ran: list[Batch] = []  # with log π_old of the tokens that ran
        for schedule_step, mini_batch in mini_batches:
            loss, active_T = self.objective.policy_loss, mini_batch.active_T
            asks = not steps and (defers_old or mini_batch.logprob_T is None)
            if not steps and self.objective.starts_on_policy:
                loss = replace(loss, on_policy=True)
            metrics = self.actor.train_step(  # every optimizer step has weights of its own, from its loss
                mini_batch.unweighted(), loss, outputs=outputs if asks else None, schedule_step=schedule_step
            )
            self.is_torn = True
            metrics |= self.objective.after_optimizer_step(metrics)
            steps.append(metrics if active_T.any() else {name: metrics[name] for name in _OF_STEP})
            if defers_old or asks:
                logprob_T = outputs["logprob"] if asks else mini_batch.logprob_T
                ran.append(mini_batch.replace(loss_mask_T=active_T, logprob_T=logprob_T))
        return Update(mismatch(*ran) | merge_metrics(steps), outputs)

    def _submit_critic_step(self, critic: Engine, mini_batch: Batch, schedule_step: int) -> Future[dict[str, float]]:
        assert self.value_loss is not None
        batch = with_known_tokens(mini_batch.unweighted(), critic)
        return critic.submit_train_step(batch, self.value_loss, schedule_step=schedule_step)

    def utilisation(self, experience: Experience, seconds: float) -> dict[str, float]:
        """FLOP/s of a device in the update, and their share of the device's peak where the peak is known.

        Args:
            experience: that was learned from.
            seconds: of the update.
        """
        facts, critic, batch = self.actor.facts, self.critic, experience.batch
        flops = 0.0 if self.freezes_actor(experience.step) else facts.flops.of(batch)
        if critic is not None:
            flops += critic.facts.flops.of(batch.unweighted())
        return facts.utilisation(flops * self.config.algorithm.epochs, seconds, self.models.num_devices)


def _critic_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """What a run logs of the critic's update, from the means over its optimizer steps.

    The moments of all returns give the explained variance. In a mini-batch whose returns hardly differ it is a large
    negative number, which a mean over mini-batches would show.
    """
    moments = {name: torch.tensor(value) for name, value in values.items()}
    names = ("grad_norm", "skipped_steps", "value_loss", "value_clip_share")
    metrics = {f"critic_{name}": values[name] for name in names}
    return metrics | {"critic_explained_variance": explained_variance(moments).item()}
