"""The fastest combination of settings with which a run fits.

A plan takes seconds, so few combinations are planned. Each combination first gets an estimate of its seconds, and a
bound of its memory from the plan that does not fit. Combinations whose bound fits are planned in the order of their
seconds, and the first that fits is the answer. A plan that does not fit teaches how many bytes each token takes with
its kind of activation checkpointing, which sharpens the bounds of the others.

The seconds of a step are the floating-point operations of the update, with the operations that are computed again; the
bytes that a rank sends for weights, gradients and shared sequences; and the bytes that move between a GPU and the CPU's
memory. The rates are of an H100, in round numbers: only the order of the combinations depends on them.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

import torch

from rlft_fast.config import Config, EngineConfig, Role, RunConfig, run_roles
from rlft_fast.engine.flops import model_flops
from rlft_fast.engine.memory.engine import (
    USABLE,
    EngineMemory,
    host_moment_bytes,
    sent_bytes,
    state_by_part,
    waiting_gradient_bytes,
)
from rlft_fast.engine.memory.processes import ranks_of
from rlft_fast.engine.memory.run import MemoryPlan, Phase, bound_memory, most_micro_batches
from rlft_fast.engine.memory.simulation import build_plain
from rlft_fast.engine.sharding import resolve_shard_size, state_bytes

Changes = dict[str, Any]

_FLOPS = 4e14  # per second
_SENT_BYTES = 5e10  # per second
_MOVED_BYTES = 1e10  # per second, between a GPU and the CPU's memory, with nothing else at the same time
_STEPPED_BYTES = 5e9  # per second, of optimizer state that a rank's share of the CPU steps
_COMPUTED_AGAIN = {"none": 0.0, "selective": 0.05, "full": 1 / 3, "offload": 1 / 3}  # share of forward and backward
# Share of the activations that a model keeps at least, about.
_KEPT = {"none": 1.0, "selective": 0.3, "full": 0.04, "offload": 0.01}
# Moments in bfloat16 cost no seconds, but change the run's numbers: other settings may cost this share of the update.
# Any other setting goes before moments in int8.
_ROUNDED_MOMENTS = {"bfloat16": 0.25, "int8": 1000.0}
# Shares of the update's seconds for each doubling of vLLM's ranks, and of the batches of transformers' `generate`.
_SPLIT_GENERATION, _SPLIT_BATCH = 0.02, 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a search found.

    Attributes:
        fits: whether a combination fits.
        changes: values by dotted key of the fastest that fits; or else of a combination that takes the least memory.
        plan: its plan; or else a bound of its plan.
        enough_ranks: if it does not fit, a number of ranks with which it would fit, about; 0 if no number is enough.
    """

    fits: bool
    changes: Changes
    plan: MemoryPlan
    enough_ranks: int = 0


class Search:
    """Estimates of a run with other settings.

    Args:
        config: configuration of the run.
        plan: its plan, which does not fit.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.
        host_bytes: CPU memory for each rank.
    """

    def __init__(
        self, config: RunConfig, plan: MemoryPlan, world_size: int, memory_bytes: float, device_type: str,
        host_bytes: float,
    ) -> None:  # fmt: skip
        self.config, self.plan = config.for_device(device_type), plan
        self.world_size, self.memory_bytes = world_size, memory_bytes
        self.device_type, self.host_bytes = device_type, host_bytes
        self._has_learned = False
        ranks = ranks_of(self.config, world_size)
        self.trained = {
            name: _Trained(role, plan.engines[name], ranks[name], memory_bytes)
            for name, role in run_roles(self.config).items()
            if role.trains
        }

    def combinations(self, decisions: list[list[Changes]]) -> list[tuple[Changes, RunConfig]]:
        """All combinations with their configurations, the fastest first.

        Args:
            decisions: for each decision the changes of the configuration among which to choose.
        """
        combined = [
            {key: value for changes in choice for key, value in changes.items()} for choice in product(*decisions)
        ]
        configs = [(changes, _changed(self.config, changes)) for changes in combined if changes]
        return sorted(configs, key=lambda pair: self.seconds(pair[1]))

    def fastest(
        self, combinations: list[tuple[Changes, RunConfig]], planned: Callable[[Changes], MemoryPlan | None]
    ) -> Proposal | None:
        """The fastest combination that fits; None if no combination is found to fit.

        Args:
            combinations: from `combinations`.
            planned: returns the plan of the configuration with changes; None if the run cannot have them.
        """
        for changes, config in combinations:
            bound = self.bound(config)
            if bound is None or not bound.fits(self.memory_bytes, self.host_bytes):
                continue
            plan = planned(changes)
            if plan is not None and plan.fits(self.memory_bytes, self.host_bytes):
                return Proposal(fits=True, changes=changes, plan=plan)
            if plan is not None:
                self._learn(config, plan)
        return None

    def least(
        self, combinations: list[tuple[Changes, RunConfig]], planned: Callable[[Changes], MemoryPlan | None]
    ) -> Proposal:
        """The combination that takes the least memory, after `fastest` has found none. Arguments as there.

        If `fastest` has planned nothing, the combination is planned. It may fit all the same.
        """
        changes, config, bound = self._least(combinations)
        if changes and not self._has_learned and (plan := planned(changes)) is not None:
            if plan.fits(self.memory_bytes, self.host_bytes):
                return Proposal(fits=True, changes=changes, plan=plan)
            self._learn(config, plan)
            changes, config, bound = self._least(combinations)
        return Proposal(fits=False, changes=changes, plan=bound, enough_ranks=self.enough_ranks(changes))

    def _least(self, combinations: list[tuple[Changes, RunConfig]]) -> tuple[Changes, RunConfig, MemoryPlan]:
        unchanged: tuple[Changes, RunConfig, MemoryPlan] = {}, self.config, self.plan
        bounds = ((changes, config, self.bound(config)) for changes, config in combinations)
        possible = [(changes, config, bound) for changes, config, bound in bounds if bound is not None]
        return min([unchanged, *possible], key=lambda found: self._excess(found[2]))

    def _learn(self, config: RunConfig, plan: MemoryPlan) -> None:
        roles, self._has_learned = run_roles(config), True
        for name, engine in plan.engines.items():
            self.trained[name].learn(roles[name].config, engine)

    def enough_ranks(self, changes: Changes) -> int:
        """A number of ranks with which a combination that does not fit would fit, about; 0 if no number is enough."""
        config = _changed(self.config, changes)
        for factor in (2**n for n in range(1, 8)):
            more = copy(self)
            more.world_size = factor * self.world_size
            ranks = ranks_of(config, more.world_size)
            more.trained = {name: trained.on(ranks[name]) for name, trained in self.trained.items()}
            bound = more.bound(config)
            if bound is not None and bound.fits(self.memory_bytes, self.host_bytes):
                return more.world_size
        return 0

    def bound(self, config: RunConfig) -> MemoryPlan | None:
        """A plan with no more bytes than the run takes, about; None if the run cannot have the settings."""
        roles = run_roles(config)
        try:
            updates = {
                name: trained.bytes_at_least(
                    roles[name].config, most_micro_batches(config, trained.world_size, roles[name].config)
                )
                for name, trained in self.trained.items()
            }
            alone = [Phase(name=f"update {name}", memory={name: size}) for name, size in updates.items()]
            if any(phase.total_bytes > phase.limit(self.memory_bytes) for phase in alone):
                return MemoryPlan(engines={}, phases=alone)  # whatever the other models take
            return bound_memory(config, self.world_size, self.memory_bytes, self.device_type, updates)
        except ValueError:
            return None

    def seconds(self, config: RunConfig) -> float:
        """About the seconds of a step, apart from seconds that no setting changes."""
        roles, updates, moves = run_roles(config), 0.0, 0.0
        for name, trained in self.trained.items():
            engine = roles[name].config
            num_micro_batches = most_micro_batches(config, trained.world_size, engine)
            rows = self._rows_of_step(config, engine, trained.world_size)
            updates += trained.update_seconds(engine, num_micro_batches, rows)
            moves += trained.move_seconds(engine, num_micro_batches)
        for name in {"reference", "teacher"} & {*roles}:
            moves += self.trained["actor"].move_seconds(roles[name].config, 1)  # as if a teacher had the policy's size
        if not isinstance(config, Config):
            return updates + moves
        generation = _SPLIT_GENERATION * config.rollout.vllm.tensor_parallel_size.bit_length()
        return updates * (1 + generation + _SPLIT_BATCH / config.rollout.batch_size) + moves

    @staticmethod
    def _rows_of_step(config: RunConfig, engine: EngineConfig, world_size: int) -> float:
        """Tokens of a rank in an optimizer step, if every sequence has the greatest length."""
        share = math.ceil(config.sequences_per_update / max(world_size // engine.sequence_parallel, 1))
        return share * config.longest_taught / engine.sequence_parallel

    def _excess(self, plan: MemoryPlan) -> float:
        """Bytes that are missing, on the device or in the CPU's memory."""
        worst = plan.worst(self.memory_bytes)
        return max(worst.total_bytes - worst.limit(self.memory_bytes), plan.host_bytes - USABLE * self.host_bytes)


class _Trained:
    """A model that trains, with other settings than those of a plan.

    Args:
        role: the model's role.
        engine: its part of the plan.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
    """

    def __init__(self, role: Role, engine: EngineMemory, world_size: int, memory_bytes: float) -> None:
        self.config, self.world_size, self.memory_bytes = role.config, world_size, int(memory_bytes)
        self.model = build_plain(role.path, role.config, role.head, trains=True)
        flops, text = model_flops(self.model), self.model.backbone.config.get_text_config()
        self.flops_per_row = flops.per_token + flops.per_active
        # Queries, keys, values and outputs, in the forward, again, and in the backward.
        width = getattr(torch, role.config.compute_dtype).itemsize
        self.exchanged_per_row = 12 * text.num_hidden_layers * text.hidden_size * width
        kept = engine.memory["activations"] / _KEPT[role.config.activation_checkpointing]
        workspace = engine.memory["logits workspace"]
        self.bytes_per_row = {mode: (kept * share + workspace) / _rows(role.config) for mode, share in _KEPT.items()}
        self.rest = dict.fromkeys(_KEPT, _rest(engine))
        self.gathered = 0
        self._forget()

    def _forget(self) -> None:
        """Starts with nothing counted: parameters are counted once for all combinations that agree on what counts."""
        self._shards, self._state = cache(self._shards_of), cache(self._state_of)
        self._sent, self._waiting = cache(self._sent_of), cache(self._waiting_of)

    def on(self, world_size: int) -> "_Trained":
        """The same model on other ranks."""
        other = copy(self)
        other.world_size = world_size
        other._forget()
        return other

    def learn(self, config: EngineConfig, engine: EngineMemory) -> None:
        """Takes the bytes of a token, and the bytes that no token adds, from a plan with these settings."""
        in_all = engine.memory["activations"] + engine.memory["logits workspace"]
        self.bytes_per_row[config.activation_checkpointing] = in_all / _rows(config)
        self.rest[config.activation_checkpointing] = _rest(engine)
        if config.activation_checkpointing in ("full", "offload"):
            self.gathered = engine.memory["gathered units"]

    def bytes_at_least(self, config: EngineConfig, num_micro_batches: int) -> int:
        """Bytes of an update."""
        mode = config.activation_checkpointing
        state = 0 if config.cpu_offload else self._kept(config)[0]
        waiting = self._waiting(config.reduce_every_micro_batch is True, config.cpu_offload, num_micro_batches > 1)
        # The units of one moment are on the device together, whatever else waits there.
        return int(state + waiting + max(self.rest[mode] + self.bytes_per_row[mode] * _rows(config), self.gathered))

    def update_seconds(self, config: EngineConfig, num_micro_batches: int, rows: float) -> float:
        ranks = config.sequence_parallel
        dearer = _COMPUTED_AGAIN[config.activation_checkpointing] + self._rounds(config)
        computed = self.flops_per_row * rows * (1 + dearer)
        shards = self._shards(*_layout(config))
        sent = self._sent(shards, num_micro_batches, config.reduce_every_micro_batch)
        exchanged = self.exchanged_per_row * rows * (ranks - 1) / ranks
        return computed / _FLOPS + (sent + exchanged) / _SENT_BYTES

    def move_seconds(self, config: EngineConfig, num_micro_batches: int) -> float:
        """Of the state to the GPU and back once a step; or of weights in every micro-batch, and of steps on the CPU."""
        state, moments = self._kept(config)
        if config.cpu_offload:
            return num_micro_batches * state / _MOVED_BYTES + state / _STEPPED_BYTES
        return 2 * (moments + state * config.offload_between_phases) / _MOVED_BYTES

    def _rounds(self, config: EngineConfig) -> float:
        dtype = config.optimizer.moment_dtype
        return 0.0 if dtype == self.config.optimizer.moment_dtype else _ROUNDED_MOMENTS[dtype]

    def _kept(self, config: EngineConfig) -> tuple[int, int]:
        """Bytes of weights and optimizer state on the device, and of moments in the CPU's memory."""
        return self._state(*_layout(config))

    def _state_of(self, shard_size: Literal["auto"] | int, moment_dtype: str, offloads: bool) -> tuple[int, int]:
        config = self._with_moments(moment_dtype, offloads)
        shards = self._shards(shard_size, moment_dtype, offloads)
        state = state_by_part(self.model, config, shards)
        return state["parameters"] + state["optimizer"], host_moment_bytes(self.model, config, shards)

    def _waiting_of(self, reduces_each: bool, cpu_offload: bool, several: bool) -> int:
        config = _changed(self.config, {"reduce_every_micro_batch": reduces_each, "cpu_offload": cpu_offload})
        return waiting_gradient_bytes(self.model, config, self.world_size, 1 + several)

    def _sent_of(self, shards: int, num_micro_batches: int, reduces_each: bool) -> int:
        config = self.config.model_copy(update={"reduce_every_micro_batch": reduces_each})
        return sent_bytes(self.model, config, self.world_size // shards, shards, num_micro_batches)

    def _shards_of(self, shard_size: Literal["auto"] | int, moment_dtype: str, offloads: bool) -> int:
        state = state_bytes(self.model, self._with_moments(moment_dtype, offloads))
        return resolve_shard_size(shard_size, self.world_size, state, self.memory_bytes)

    def _with_moments(self, dtype: str, offloads: bool) -> EngineConfig:
        return _changed(self.config, {"optimizer.moment_dtype": dtype, "optimizer.cpu_offload": offloads})


def _rest(engine: EngineMemory) -> int:
    """Bytes of gathered units, and of reduced gradients that exist at the peak."""
    return engine.memory["gradients"] + engine.memory["gathered units"]


def _layout(config: EngineConfig) -> tuple[Literal["auto"] | int, str, bool]:
    """The settings that decide which state lies where."""
    return config.shard_size, config.optimizer.moment_dtype, config.optimizer.cpu_offload


def _rows(config: EngineConfig) -> int:
    """Tokens of a micro-batch on each rank."""
    return -(-config.max_tokens // config.sequence_parallel)


def _changed(config: Any, changes: Changes) -> Any:
    """The configuration with other values by dotted key, which are not checked: hundreds of copies are made."""
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        config = config.model_copy(
            update={section: _changed(getattr(config, section), {rest: value}) if rest else value}
        )
    return config
