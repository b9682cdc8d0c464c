"""The roles of workers, under the names that verl's users know. A worker is one rank of its group's world."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlft_fast.cluster.dispatch import DP_COMPUTE_PROTO, ONE_TO_ALL, RANK_ZERO, register
from rlft_fast.config import TOKEN_VARIABLE, Config, ModelConfig, RunConfig, TaughtConfig, run_roles
from rlft_fast.data import Samples, Share
from rlft_fast.engine import (
    CheckpointManager,
    EngineFacts,
    FSDPEngine,
    Loss,
    Output,
    export_hf,
    role_engine,
)
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import (
    Answers,
    Request,
    Rollout,
    SampledModel,
    SamplingParams,
    Seeds,
    ServedVLLM,
    build_rollout,
)
from rlft_fast.world import World

_NO_ROLE = {
    "critic": "the configuration has no critic: set critic, {} for the policy's model",
    "reference": "there is no reference: set algorithm.kl_coef above 0, and train without adapters",
    "teacher": "the configuration has no teacher: set teacher.model",
    "reward": "the configuration has no reward model: set reward.model",
}


class Worker:
    """One process of a group. `engines` is filled by `init_model`.

    Args:
        config: of the run.
        world: the group's world, seen from this process.

    Attributes:
        busy_seconds: time in which the present call did this worker's own share and waited for no other worker [s]. A
            method that measures it sets it.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config: Any = config  # of the objective that the class is for
        self.world = world
        self.engines: dict[str, FSDPEngine] = {}
        self.busy_seconds = 0.0
        self._managers: dict[str, CheckpointManager] = {}

    @staticmethod
    def engine_configs(config: Any) -> Mapping[str, ModelConfig]:
        """The configuration of each engine, by the names that `register` uses; the driver plans with it."""
        raise NotImplementedError

    @register(ONE_TO_ALL)
    def save_checkpoint(
        self, folder: str, step: int, state: Mapping[str, Any] | None = None, asynchronous: bool = False,
        num_more: int = 0,
    ) -> None:  # fmt: skip
        """Saves the engines that train, and a state of JSON values and tensors, as a run does.

        ``num_more`` checkpoints are kept beyond the number of the configuration, of any size.
        """
        manager = self._checkpoints(folder)
        manager.max_num = self.config.checkpoint.max_num + num_more
        manager.max_mem = None if num_more else self.config.checkpoint.max_mem
        manager.save(step, self._trained, dict(state or {}), asynchronous=asynchronous)

    @register(ONE_TO_ALL)
    def wait_for_checkpoint(self, folder: str) -> None:
        """Returns when no save is under way."""
        self._checkpoints(folder).wait()

    @register(ONE_TO_ALL)
    def load_checkpoint(self, folder: str, step: int | None = None) -> dict[str, Any] | None:
        """Loads the newest intact checkpoint, or that of a step; returns its state, or None if there is none."""
        return self._checkpoints(folder).load(self._trained, step)

    # ---- the language of `FSDPEngine`: the methods below are the calls, and verl's names are short for them ---------

    @register(DP_COMPUTE_PROTO)
    def infer(
        self, share: Share, outputs: Sequence[Output], *, engine: str, adapter: bool = True
    ) -> dict[Output, Tensor]:
        """See `FSDPEngine.infer`.

        Args:
            share: this worker's part of the batch.
            outputs: of the engine's head.
            engine: name of the role.
            adapter: whether with the adapters of LoRA; False: see `FSDPEngine.disable_adapter`.
        """
        found = self._engine(engine)
        with contextlib.nullcontext() if adapter else found.disable_adapter():
            return found.infer(share, outputs)

    @register(DP_COMPUTE_PROTO, trains=True)
    def train_step(
        self, share: Share, loss: Loss, *, engine: str, with_outputs: bool = False, schedule_step: int | None = None
    ) -> tuple[dict[str, float], dict[Output, Tensor]]:
        """See `FSDPEngine.train_step`.

        Args:
            share: this worker's part of the batch.
            loss: per-token loss.
            engine: name of the role.
            with_outputs: whether to return the outputs of the step's forward passes, too.
            schedule_step: see `FSDPEngine.optimizer_step`.

        Returns:
            The metrics, and the outputs.
        """
        outputs: dict[Output, Tensor] = {}
        asked = outputs if with_outputs else None
        metrics = self._engine(engine).train_step(share, loss, outputs=asked, schedule_step=schedule_step)
        return metrics, outputs

    @register(ONE_TO_ALL)
    def zero_grad(self, name: str) -> None:
        """See `FSDPEngine.zero_grad`."""
        self._engine(name).zero_grad()

    @register(DP_COMPUTE_PROTO, trains=True)
    def forward_backward(self, share: Share, loss: Loss, *, engine: str, is_last: bool = True) -> dict[str, Tensor]:
        """See `FSDPEngine.forward_backward`.

        Args:
            share: this worker's part of the batch.
            loss: per-token loss.
            engine: name of the role.
            is_last: whether to reduce gradients over the workers.

        Returns:
            Sums over the tokens of all workers, 0-d tensors.
        """
        return self.world.all_reduce(self._engine(engine).forward_backward(share, loss, is_last=is_last))

    @register(ONE_TO_ALL)
    def optimizer_step(self, name: str, schedule_step: int | None = None) -> dict[str, float]:
        """See `FSDPEngine.optimizer_step`."""
        return self._engine(name).optimizer_step(schedule_step)

    @register(ONE_TO_ALL)
    def non_finite_weights(self, name: str) -> list[str]:
        """Names of the engine's parameters that hold a NaN or an infinity."""
        return self._engine(name).non_finite_weights()

    @register(RANK_ZERO)
    def facts(self) -> dict[str, EngineFacts]:
        """The facts of each engine."""
        return {name: engine.facts for name, engine in self.engines.items()}

    def _engine(self, name: str) -> FSDPEngine:
        if name not in self.engines:
            raise ValueError(f"there is no engine {name!r}, expected one of {', '.join(self.engines) or 'none'}")
        return self.engines[name]

    def _load(self, names: Sequence[str], num_training_steps: int | None = None) -> None:
        """Makes the engines of these roles."""
        for name in names:
            self.engines[name] = role_engine(self.config, name, self.world, num_training_steps)

    @property
    def _trained(self) -> dict[str, FSDPEngine]:
        return {name: engine for name, engine in self.engines.items() if engine.trains}

    def _checkpoints(self, folder: str) -> CheckpointManager:
        if folder not in self._managers:
            kept = self.config.checkpoint
            self._managers[folder] = CheckpointManager(Path(folder), kept.max_num, kept.max_mem, self.world)
        return self._managers[folder]


class ActorRolloutRefWorker(Worker):
    """The policy, the generator that samples from it, and the reference where the configuration has a divergence."""

    rollout: Rollout
    server_urls: Sequence[str] = ()

    @staticmethod
    def engine_configs(config: Config) -> Mapping[str, ModelConfig]:
        roles = run_roles(config)
        return {"actor": roles["actor"].config, "reference": roles.get("reference", roles["actor"]).config}

    @register(ONE_TO_ALL)
    def init_model(self, num_training_steps: int) -> None:
        """Loads the models and starts the generator.

        Args:
            num_training_steps: optimizer steps of the whole run, for the schedule.
        """
        self._load([name for name in ("actor", "reference") if _is_here(self.config, name)], num_training_steps)
        self._start_rollout()
        self.rollout.sync()

    def _start_rollout(self) -> None:
        config = self.config
        actor, tokenizer = self.engines["actor"], load_tokenizer(config.model)
        urls = (lambda: self.server_urls) if self.server_urls else None
        self.rollout = build_rollout(actor, tokenizer, config.rollout, config.longest_sequence, urls)

    @register(DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: list[list[int]], params: SamplingParams, seeds: Seeds) -> Samples:
        """Samples completions of each prompt. `Samples.row_B` counts the prompts; there are no rewards yet.

        Args:
            prompts: token ids.
            params: how to sample.
            seeds: one per sample, see `rlft_fast.rollout.sample_seeds`: what is sampled does not depend on the number
                of workers.
        """
        samples = self.rollout.samples(prompts, params, seeds)
        self.busy_seconds = self.rollout.seconds
        return samples

    @register(DP_COMPUTE_PROTO)
    def answer(self, requests: list[list[Request]], params: SamplingParams) -> list[Answers]:
        """Samples a completion for each request, see `Rollout.answer`.

        Args:
            requests: of each worker.
            params: how to sample.
        """
        (own,) = requests
        answers = self.rollout.answer(own, params)
        self.busy_seconds = self.rollout.seconds
        return [answers]

    @register(DP_COMPUTE_PROTO, engine="actor")
    def compute_log_prob(self, share: Share, outputs: Sequence[Output] = ("logprob", "entropy")) -> dict[str, Tensor]:
        """``logprob_T`` and ``entropy_T`` of the policy as it is now, or other outputs, see `FSDPEngine.infer`."""
        return _by_field(self.infer(share, outputs, engine="actor"))

    @register(DP_COMPUTE_PROTO, engine="reference")
    def compute_ref_log_prob(self, share: Share) -> dict[str, Tensor]:
        """``ref_logprob_T`` of the reference; with LoRA, of the policy without its adapter."""
        if "reference" in self.engines:
            return _of_reference(self.infer(share, ("logprob",), engine="reference"))
        if self.config.actor.lora is None:
            raise ValueError(_NO_ROLE["reference"])
        return _of_reference(self.infer(share, ("logprob",), engine="actor", adapter=False))

    @register(DP_COMPUTE_PROTO, engine="actor", trains=True)
    def update_actor(
        self, share: Share, loss: Loss, with_outputs: bool = False, schedule_step: int | None = None
    ) -> dict[str, Any]:
        """One optimizer step. The generator samples from the new weights after `sync_rollout`.

        Args:
            share: this worker's part of the batch.
            loss: per-token loss.
            with_outputs: whether to return the outputs, too.
            schedule_step: see `FSDPEngine.optimizer_step`.

        Returns:
            The metrics; and ``logprob_T`` and ``entropy_T`` of the step's forward passes where they are asked for.
        """
        metrics, outputs = self.train_step(
            share, loss, engine="actor", with_outputs=with_outputs, schedule_step=schedule_step
        )
        return metrics | _by_field(outputs)

    @register(ONE_TO_ALL)
    def use_servers(self, urls: Sequence[str], token: str) -> None:
        """Has these vLLM servers generate from the next sync on; before `init_model`, instead of a generator here."""
        self.server_urls = urls
        os.environ[TOKEN_VARIABLE] = token

    @register(RANK_ZERO)
    def served(self) -> tuple[SampledModel, dict[str, Any], str]:
        """What asks the servers instead of the workers: model, fingerprint and run of `ServedVLLM`."""
        servers = self.rollout.generator
        assert isinstance(servers, ServedVLLM)
        return servers.model, servers.fingerprint, servers.run

    @register(ONE_TO_ALL)
    def sync_rollout(self, version: int | None = None) -> int:
        """Gives the generator the policy's weights as they are now, as this version; None: one more than before.

        Returns:
            Bytes of the weights.
        """
        if version is not None:
            self.rollout.weight_version = version - 1
        self.rollout.sync()
        return self.rollout.sync_bytes

    @register(ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Frees the generator's device memory until the next `sync_rollout`."""
        self.rollout.sleep()

    @register(ONE_TO_ALL)
    def export(self, folder: str) -> None:
        """Writes the policy as transformers loads it."""
        export_hf(self.engines["actor"], Path(folder), stop=self.config.rollout.stop, overwrite=True)

    @register(RANK_ZERO)
    def weight_version(self) -> int:
        """Version of the weights that the generator samples from."""
        return self.rollout.weight_version


class CriticWorker(Worker):
    """The critic."""

    @staticmethod
    def engine_configs(config: Config) -> Mapping[str, ModelConfig]:
        return _own_config(config, "critic")

    @register(ONE_TO_ALL)
    def init_model(self, num_training_steps: int) -> None:
        """Loads the model.

        Args:
            num_training_steps: optimizer steps of the whole run, for the schedule.
        """
        self._load(["critic"], num_training_steps)

    @register(DP_COMPUTE_PROTO, engine="critic")
    def compute_values(self, share: Share) -> dict[str, Tensor]:
        """``value_T`` of the critic as it is now."""
        return _by_field(self.infer(share, ("value",), engine="critic"))

    @register(DP_COMPUTE_PROTO, engine="critic", trains=True)
    def update_critic(self, share: Share, loss: Loss, schedule_step: int | None = None) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        return self.train_step(share, loss, engine="critic", schedule_step=schedule_step)[0]


class RewardModelWorker(Worker):
    """The reward models. `compute_scores` and `compute_rm_score` ask ``reward.model``, with the policy's token ids."""

    @staticmethod
    def engine_configs(config: Config) -> Mapping[str, ModelConfig]:
        scoring = {name: role.config for name, role in run_roles(config).items() if role.part is not None}
        return scoring or _own_config(config, "reward")

    @register(ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the models."""
        self._load([*self.engine_configs(self.config)])

    @register(DP_COMPUTE_PROTO, engine="reward")
    def compute_scores(self, share: Share) -> dict[str, Tensor]:
        """``score_T`` at the sampled tokens."""
        return _by_field(self.infer(share, ("score",), engine="reward"))

    @register(DP_COMPUTE_PROTO, engine="reward")
    def compute_rm_score(self, share: Share) -> dict[str, Tensor]:
        """``reward_B``: the score of each sequence at its last token."""
        return {"reward_B": self.engines["reward"].score(share)}


class ReferenceWorker(Worker):
    """The reference, apart from the policy."""

    @staticmethod
    def engine_configs(config: Config) -> Mapping[str, ModelConfig]:
        return _own_config(config, "reference")

    @register(ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model."""
        self._load(["reference"])

    @register(DP_COMPUTE_PROTO, engine="reference")
    def compute_ref_log_prob(self, share: Share) -> dict[str, Tensor]:
        """``ref_logprob_T`` of the reference."""
        return _of_reference(self.infer(share, ("logprob",), engine="reference"))


class TeacherWorker(Worker):
    """The teacher of a distillation."""

    @staticmethod
    def engine_configs(config: Any) -> Mapping[str, ModelConfig]:
        return _own_config(config, "teacher")

    @register(ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model."""
        self._load(["teacher"])

    @register(DP_COMPUTE_PROTO, engine="teacher")
    def compute_teacher_log_prob(self, share: Share) -> dict[str, Tensor]:
        """``teacher_logprob_T`` of the teacher."""
        return {"teacher_logprob_T": self.infer(share, ("logprob",), engine="teacher")["logprob"]}


class ColocatedWorker(ActorRolloutRefWorker, CriticWorker, TeacherWorker, RewardModelWorker):
    """All roles of the configuration that have no workers of their own: what a rank under torchrun holds."""

    @staticmethod
    def engine_configs(config: Config) -> Mapping[str, ModelConfig]:
        here = {name: role.config for name, role in run_roles(config).items() if _is_here(config, name)}
        return {**ActorRolloutRefWorker.engine_configs(config), **here}

    @register(ONE_TO_ALL)
    def init_model(self, num_training_steps: int) -> None:  # type: ignore[override]
        """Loads the models in torchrun's order. The generator has no weights before `sync_rollout`."""
        self._load([name for name in run_roles(self.config) if _is_here(self.config, name)], num_training_steps)
        self._start_rollout()


class TaughtWorker(Worker):
    """The models of a run that learns from rows, but for a teacher with workers of its own."""

    @staticmethod
    def engine_configs(config: TaughtConfig) -> Mapping[str, ModelConfig]:
        return {name: role.config for name, role in run_roles(config).items() if _is_here(config, name)}

    @register(ONE_TO_ALL)
    def init_model(self, num_training_steps: int) -> None:
        """Loads the models.

        Args:
            num_training_steps: optimizer steps of the whole run, for the schedule.
        """
        self._load([*self.engine_configs(self.config)], num_training_steps)

    @register(ONE_TO_ALL)
    def export(self, folder: str) -> None:
        """Writes the model that trains as transformers loads it."""
        export_hf(self.engines["actor"], Path(folder), overwrite=True)


def _is_here(config: RunConfig, name: str) -> bool:
    """Whether the run has the role, and the actor's workers hold it."""
    apart = name != "actor" and config.cluster is not None and name.partition(".")[0] in config.cluster.groups
    return name in run_roles(config) and not apart


def _own_config(config: RunConfig, name: str) -> dict[str, ModelConfig]:
    """The configuration of a role, for workers that hold it alone."""
    roles = run_roles(config)
    if name not in roles:
        raise ValueError(_NO_ROLE[name])
    return {name: roles[name].config}


def _by_field(outputs: Mapping[Output, Tensor]) -> dict[str, Tensor]:
    """The outputs by the names of a batch's fields."""
    return {f"{name}_T": values for name, values in outputs.items()}


def _of_reference(outputs: Mapping[Output, Tensor]) -> dict[str, Tensor]:
    return {"ref_logprob_T": outputs["logprob"]}
