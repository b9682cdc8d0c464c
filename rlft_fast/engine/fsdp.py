"""``FSDPEngine``: one class for actor, reference and critic. A model, a head, and an optimizer if it trains.

Every rank is given the same whole batch on the CPU; ranks split only the compute. Each plans the batch alone (the plan
is a pure function), runs its own micro-batches, and results are gathered. Losses are plain sums of weighted tokens, so
the gradient does not depend on micro-batches, their order, or the number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch, MicroBatchPlan, plan_batch
from rlft_fast.engine.distributed import (
    all_gather_ragged,
    all_reduce,
    ensure_process_group,
    get_device,
    get_rank,
    get_world_size,
    new_sequence_group,
)
from rlft_fast.engine.forward import (
    active_fields,
    check_batch,
    prepare_micro_batches,
    prepare_model_inputs,
    prepare_model_outputs,
)
from rlft_fast.engine.optimizer import build_optimizer, learning_rate_factor
from rlft_fast.models import ModelInputs, PolicyModel, ValueModel, load_critic, load_policy, require_divisible_heads
from rlft_fast.ops import FusedAdamW, clip_coefficient, grad_norm
from rlft_fast.rl import Aggregation, loss_weights

Output = Literal["logprob", "entropy", "value"]


class Loss(Protocol):
    """A per-token loss: `rlft_fast.rl.PolicyLoss`, `rlft_fast.rl.ValueLoss`, or your own."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    per_token: Callable[..., Tensor]
    metrics: Callable[..., dict[str, Tensor]]


class FSDPEngine:
    """A model sharded by FSDP2 (a single process holds it whole), with its optimizer.

    Args:
        path: folder of the model's configuration and weights.
        config: compute dtype, token cap and optimizer.
        head: "logprob" for a policy or reference, "value" for a critic.
        num_training_steps: optimizer steps of the whole run, for the schedule; None: the model is frozen.
        temperature: sampling temperature of the log-probabilities.

    Attributes:
        step: optimizer steps taken.
        skipped_steps: steps left out because the gradient norm was not finite.
    """

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        *,
        head: Literal["logprob", "value"] = "logprob",
        num_training_steps: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.path = path
        self.config = config
        self.head = head
        self.num_training_steps = num_training_steps
        self.temperature = temperature
        self.device = get_device()
        self.step = 0
        self.skipped_steps = 0
        self.model: PolicyModel | ValueModel
        self.optimizer: FusedAdamW | None = None
        self.sequence_group: dist.ProcessGroup | None = None

    def initialize(self) -> "FSDPEngine":
        """Loads the weights, shards them, and builds the optimizer. Returns the engine itself.

        Raises:
            ValueError: the model folder cannot be used, or `sequence_parallel` does not divide the ranks or heads.
        """
        self.sequence_group = new_sequence_group(self.config.sequence_parallel)
        if self.head == "logprob":
            self.model = load_policy(self.path, self.config.workspace_mib)
        else:
            self.model = load_critic(self.path)
        require_divisible_heads(self.model.backbone, self.config.sequence_parallel)
        self.model.requires_grad_(self.num_training_steps is not None)
        self.model.to(self.device)
        if get_world_size() > 1 or self.config.compute_dtype != "float32":
            self._shard()
        if self.num_training_steps is not None:
            self.optimizer = build_optimizer(self.model.parameters(), self.config.optimizer)
        return self

    def _shard(self) -> None:
        """One FSDP unit per decoder block; the root holds the rest, so tied embedding and head stay one parameter."""
        ensure_process_group()
        mesh = init_device_mesh(self.device.type, (get_world_size(),), mesh_dim_names=("shard",))
        dtype = getattr(torch, self.config.compute_dtype)
        options: dict[str, Any] = {
            "mesh": mesh,
            # Inputs keep their dtype: hidden states are in `dtype` already, and the loss needs its fields in float32.
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        }
        for block in decoder_blocks(self.model):
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        if isinstance(self.model, PolicyModel):
            register_fsdp_forward_method(self.model, "generate")

    # ---- inference ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self, batch: Batch, outputs: Sequence[Output]) -> dict[Output, Tensor]:
        """Runs the model over the batch without gradients.

        Args:
            batch: the whole batch, the same on every rank, on the CPU.
            outputs: "logprob" and "entropy" of a policy, or "value" of a critic.

        Returns:
            For each output a (T,) float32 tensor on the CPU in the order of the batch, 0 outside ``loss_mask_T``.

        Raises:
            ValueError: a sequence is longer than the token cap, the batch has images that the model cannot take (see
                `check_batch`), or the head does not give an output.
        """
        self._check_outputs(outputs)
        plan = self._plan(batch)
        parts: dict[Output, list[Tensor]] = {name: [] for name in outputs}
        for micro_batch in prepare_micro_batches(batch, plan, self._data_rank):
            inputs = self._inputs(micro_batch)
            if self.head == "value":
                results = {"value": self.model(inputs)}
            else:
                results = self.model(
                    inputs, temperature=self.temperature, return_entropy="entropy" in outputs
                )._asdict()
            for name in outputs:
                parts[name].append(prepare_model_outputs(results[name], micro_batch, inputs))
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # the root keeps its weights gathered for a backward pass, which does not come here
        return {name: self._gather(torch.cat(parts[name]), batch, plan) for name in outputs}

    def _gather(self, own_T: Tensor, batch: Batch, plan: MicroBatchPlan) -> Tensor:
        """Puts the ranks' results together and back into the order of the batch."""
        if self.sequence_group is not None:
            dist.all_reduce(own_T, group=self.sequence_group)  # each has its own rows' results, and zeros
        share = self.config.sequence_parallel
        sizes = [int(batch.lengths[plan.rank_indices(rank)].sum()) for rank in range(plan.world_size)]
        parts = all_gather_ragged(own_T, [size for size in sizes for _ in range(share)])
        planned_T = torch.cat([part.cpu() for part in parts[::share]])
        restored_T = batch.select(plan.indices).replace(logprob_T=planned_T).select(plan.inverse).logprob_T
        assert restored_T is not None
        return restored_T

    def _plan(self, batch: Batch) -> MicroBatchPlan:
        check_batch(batch, self.model.backbone)
        return plan_batch(batch, self.config.max_tokens, get_world_size() // self.config.sequence_parallel)

    @property
    def _data_rank(self) -> int:
        """This rank's place in the plan; the ranks of a sequence group have the same."""
        return get_rank() // self.config.sequence_parallel

    def _inputs(self, micro_batch: Batch) -> ModelInputs:
        return prepare_model_inputs(
            micro_batch, self.device, backbone=self.model.backbone, sequence_group=self.sequence_group
        )

    def _check_outputs(self, outputs: Sequence[Output]) -> None:
        possible = ("value",) if self.head == "value" else ("logprob", "entropy")
        if unknown := [name for name in outputs if name not in possible]:
            raise ValueError(f"a {self.head} head gives {' and '.join(possible)}, not {', '.join(unknown)}")

    # ---- training -----------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step on the whole batch.

        plan -> forward and backward per micro-batch, gradients reduced with the last -> global norm -> AdamW, which
        clips. The host waits for the device once, at the end, for the metrics.
        A gradient norm that is not finite skips the step: parameters, moments and schedule stay as they are.

        Args:
            batch: the batch of this step, the same on every rank, on the CPU, with the fields that the loss reads.
            loss: per-token loss; ``loss_weight_T`` is filled in here over the whole batch.

        Returns:
            The loss's metrics, ``loss``, ``grad_norm``, ``learning_rate`` and ``skipped_steps`` (in all).

        Raises:
            ValueError: the engine is frozen, a field is missing, a sequence is longer than the token cap, or the batch
                has images that the model cannot take.
        """
        if self.optimizer is None:
            raise ValueError("this engine is frozen: give it num_training_steps to train it")
        batch = batch.replace(loss_weight_T=loss_weights(batch.loss_mask_T, batch.cu_seqlens, loss.aggregation))
        micro_batches = prepare_micro_batches(batch, self._plan(batch), self._data_rank)
        totals: dict[str, Tensor] = {}
        for i, micro_batch in enumerate(micro_batches):
            self._reduce_gradients(i == len(micro_batches) - 1)
            _accumulate(totals, self._forward_backward(micro_batch, loss))
        norm = grad_norm(self.model.parameters())
        learning_rate = self._optimizer_step(norm)
        totals = all_reduce(totals) | {"grad_norm": norm}
        metrics = dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True))  # the step's only read
        self._count_step(finite=math.isfinite(metrics["grad_norm"]))
        return metrics | {"learning_rate": learning_rate, "skipped_steps": self.skipped_steps}

    def _forward_backward(self, micro_batch: Batch, loss: Loss) -> dict[str, Tensor]:
        inputs = self._inputs(micro_batch)
        fields = active_fields(micro_batch, inputs, loss.fields, self.device)
        if self.head == "value":
            outputs = (self.model(inputs),)
            total = loss.per_token(*outputs, *fields).sum()
        else:
            total, *outputs = self.model(
                inputs, temperature=self.temperature, return_entropy=True, loss_fn=loss.per_token, per_token=fields
            )
        (total * get_world_size()).backward()  # FSDP averages gradients over ranks; the loss is a sum
        return loss.metrics(*(x.detach() for x in outputs), *fields) | {"loss": total.detach()}

    def _reduce_gradients(self, enabled: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)

    def _optimizer_step(self, norm: Tensor) -> float:
        """Clips and steps, unless the norm is not finite; that is decided on the device. Returns the learning rate."""
        assert self.optimizer is not None
        assert self.num_training_steps is not None
        factor = learning_rate_factor(self.step, self.config.optimizer, self.num_training_steps)
        learning_rate = self.config.optimizer.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        coefficient, found_inf = clip_coefficient(norm, self.config.optimizer.max_grad_norm)
        self.optimizer.step(coefficient=coefficient, found_inf=found_inf)
        self.optimizer.zero_grad(set_to_none=True)
        return learning_rate

    def _count_step(self, finite: bool) -> None:
        if finite:
            self.step += 1
        else:
            self.skipped_steps += 1

    # ---- weights and state --------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights one after the other, under the names of the Hugging Face model; tied ones once.

        Every rank must iterate to the end: each sharded weight is gathered by all.
        """
        module = self.model.model if isinstance(self.model, PolicyModel) else self.model
        for name, parameter in module.named_parameters():
            data = parameter.detach()
            yield name, data.full_tensor() if isinstance(data, DTensor) else data

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters and AdamW moments by name; they alias the engine's own (sharded) tensors."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        if self.optimizer is not None:
            self.optimizer.initialize_state()
            for name, parameter in self.model.named_parameters():
                moments = self.optimizer.state[parameter]
                state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return state

    def counters(self) -> dict[str, int]:
        return {"step": self.step, "skipped_steps": self.skipped_steps}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.step, self.skipped_steps = counters["step"], counters["skipped_steps"]


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the elements of its longest module list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _accumulate(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if name not in totals:
            totals[name] = value.float()
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value
