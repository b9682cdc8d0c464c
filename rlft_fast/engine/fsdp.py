"""``FSDPEngine``: one class for actor, reference, critic and reward model: a model, a head, an optimizer if it trains.

Every rank is given the same whole batch on the CPU; ranks split only the compute. Each plans the batch alone (the plan
is a pure function), runs its own micro-batches, and results are gathered. Or a driver has planned the batch, and every
rank is given its `Share`. Losses are plain sums of weighted tokens, so the gradient does not depend on micro-batches,
their order, or the number of ranks.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlft_fast.data import Batch, Share, plan_batch
from rlft_fast.engine.facts import EngineFacts, facts_of
from rlft_fast.engine.forward import (
    active_fields,
    check_batch,
    gather_outputs,
    positional,
    prepare_experts,
    prepare_micro_batches,
    prepare_model_inputs,
    prepare_model_outputs,
    sequence_mean,
    sum_over_rows,
)
from rlft_fast.engine.loss import (
    IDS_LOGPROB,
    LOSS_READS,
    OF_TOP,
    OUTPUTS,
    TRAINED,
    Loss,
    Output,
    couples,
    ids_field,
    weighted,
)
from rlft_fast.engine.protocol import Future
from rlft_fast.engine.routing import PassRouting, agreement_share
from rlft_fast.engine.sharding import discard_gradients, hand_over_gradients, reduce_gradients, reshard
from rlft_fast.engine.state import EngineState
from rlft_fast.engine.step import MicroBatchOutputs, OpenStep, RankWork
from rlft_fast.models import ModelInputs
from rlft_fast.ops import clip_coefficient, grad_norm
from rlft_fast.world import STOP, accumulate


class FSDPEngine(EngineState):
    """A model sharded by FSDP2 (a single process holds it whole), with its optimizer.

    Args:
        path: folder of the model's configuration and weights.
        config: dtypes, sharding, token cap and optimizer.
        head: "logprob" for a policy or reference, "value" for a critic, "score" for a reward model.
        num_training_steps: optimizer steps of the whole run, for the schedule; None: the model is frozen.
        temperature: sampling temperature of the log-probabilities.
        top_k: K of the outputs "top_ids" and "top_logprob"; None: the engine does not give them.
        world: the processes that share the model; None: `World.current()`.

    Attributes:
        device: the world's device of this process.
        step: optimizer steps taken.
        skipped_steps: steps left out because the gradient norm was not finite.
        units: a table of the FSDP units; empty where a single process needs none.
    """

    _open: OpenStep | None = None  # begun by `forward_backward`

    @cached_property
    def facts(self) -> EngineFacts:
        """What stays as it is while the engine works."""
        return facts_of(self)

    # ---- inference ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self, batch: Batch | Share, outputs: Sequence[Output]) -> dict[Output, Tensor]:
        """Runs the model over the batch without gradients.

        Args:
            batch: the whole batch, the same on every rank, on the CPU; or this rank's share. Its ``loss_weight_T`` does
                not matter.
            outputs: "logprob", "entropy" and "sum_prob_squared" of a policy, "value" of a critic, "score" of a reward
                model. "top_ids" and "top_logprob" are the K most likely next tokens of a policy, which go with
                "logprob" alone. "routed_experts" are the experts that the routers of a policy chose.

        Returns:
            For each output a (T,) float32 tensor on the CPU in the order of the batch or the share, 0 outside
            ``loss_mask_T``; "top_ids" is (T, K) int32 and "top_logprob" (T, K). "routed_experts" is
            `Batch.routed_experts_TK`, 0 for tokens that do not run.

        Raises:
            ValueError: a sequence is longer than the token cap, the batch has images that the model cannot take (see
                `check_batch`), or the head does not give an output.
        """
        self._check_outputs(outputs)
        work = self._work(batch.unweighted())
        done: list[MicroBatchOutputs] = []
        with self.eval_mode():
            try:
                for micro_batch in work.micro_batches:
                    STOP.leave_together(self.world)
                    inputs = self._inputs(micro_batch.replace(routed_experts_TK=None))
                    found = self._forward(inputs, outputs)
                    done.append(MicroBatchOutputs(found, micro_batch, inputs.output_index_A, inputs.row_T))
            finally:
                reshard(self.model)
        return {name: self._gather(done, name, work) for name in outputs}

    def submit_infer(self, batch: Batch | Share, outputs: Sequence[Output]) -> Future[dict[Output, Tensor]]:
        """`infer` at once, and its result as a `Future`, see `Engine`."""
        found = self.infer(batch, outputs)
        return Future(lambda: found)

    def _gather(self, done: list[MicroBatchOutputs], name: Output, work: RankWork) -> Tensor:
        """(T,) on the CPU in the order of the batch, from what every rank has done. All ranks must call it."""
        own = [self._at_tokens(x, name) for x in done]
        found_T = sum_over_rows(torch.cat(own), self.sequence_group)
        if work.whole is not None:
            found_T = gather_outputs(found_T, *work.whole, self.world, self.sequence_group)
        return found_T.view(self.routers.dtype) if name == "routed_experts" else found_T

    def _at_tokens(self, done: MicroBatchOutputs, name: Output) -> Tensor:
        if name != "routed_experts":
            return prepare_model_outputs(done.outputs[name], done.micro_batch, done.output_index_A)
        assert done.row_T is not None
        return prepare_experts(done.outputs[name], done.row_T)

    def _forward(self, inputs: ModelInputs, outputs: Sequence[Output]) -> dict[str, Tensor]:
        if "routed_experts" not in outputs:
            return self._forward_head(inputs, outputs)
        passed = PassRouting.of(inputs)
        with self.routers.following(passed.routing):
            found = self._forward_head(inputs, outputs)
        return found | {"routed_experts": self.routers.encoded(passed.routing)}

    def _forward_head(self, inputs: ModelInputs, outputs: Sequence[Output]) -> dict[str, Tensor]:
        if any(name in OF_TOP for name in outputs):
            logprob, ids, top_logprob = self.model(inputs, temperature=self.temperature, top_k=self.top_k)
            return {"logprob": logprob, "top_ids": ids.int(), "top_logprob": top_logprob}
        if self.require_head() == "logprob":
            asked = {f"return_{name}": name in outputs for name in ("entropy", "sum_prob_squared")}
            return self.model(inputs, temperature=self.temperature, **asked)._asdict()
        return {self.require_head(): self.model(inputs)}

    def score(self, batch: Batch | Share) -> Tensor:
        """Rewards of whole sequences by a reward model: what it says at each sequence's last token.

        As in transformers, it is the last token that is not `EngineFacts.padding_id`, which may also end texts.

        Args:
            batch: the whole batch, the same on every rank, on the CPU; or this rank's share. Its masks do not matter.

        Returns:
            (B,) float32 on the CPU.

        Raises:
            ValueError: the head is not "score", or a sequence does not fit under the token cap with one token more.
        """
        is_share = isinstance(batch, Share)
        asking = (batch.batch if is_share else batch).asking_at_the_end(self.facts.padding_id)
        scores_T = self.infer(Share(asking, batch.offsets) if is_share else asking, ("score",))["score"]
        return scores_T[asking.loss_mask_T]

    def _work(self, batch: Batch | Share) -> RankWork:
        self.require_head()
        if isinstance(batch, Share):
            check_batch(batch.batch, self.model.backbone, padded=self.is_padded)
            return RankWork(batch.micro_batches(), None)
        check_batch(batch, self.model.backbone, padded=self.is_padded)
        num_shares = self.world.size // self.config.sequence_parallel
        plan = plan_batch(
            batch, self.config.max_tokens, num_shares, micro_batch_size=self.config.micro_batch_size,
            padded=self.is_padded,
        )  # fmt: skip
        return RankWork(prepare_micro_batches(batch, plan, self._data_rank), (batch, plan))

    @property
    def _data_rank(self) -> int:
        """This rank's place in the plan; the ranks of a sequence group have the same."""
        return self.world.rank // self.config.sequence_parallel

    def _inputs(self, micro_batch: Batch) -> ModelInputs:
        if self.require_head() != "logprob":
            micro_batch = micro_batch.replace(support_TK=None, routed_experts_TK=None)
        return prepare_model_inputs(
            micro_batch, self.device, backbone=self.model.backbone, sequence_group=self.sequence_group,
            padded=self.is_padded, in_buckets=self.config.cuda_graphs,
        )  # fmt: skip

    def _check_outputs(self, outputs: Sequence[Output]) -> None:
        possible = OUTPUTS[self.require_head()]
        if unknown := [name for name in outputs if name not in possible]:
            raise ValueError(f"a {self.require_head()} head gives {', '.join(possible)}, not {', '.join(unknown)}")
        if not any(name in OF_TOP for name in outputs):
            return
        if self.top_k is None:
            raise ValueError("this engine was made without top_k: pass the number of ids that it is to give")
        if unfit := [name for name in outputs if name not in ("logprob", *OF_TOP)]:
            raise ValueError(f"top_ids and top_logprob go with logprob alone, not with {', '.join(unfit)}: infer twice")

    # ---- training -----------------------------------------------------------------------------------------------

    def train_step(
        self, batch: Batch | Share, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer step on the whole batch: `zero_grad`, `forward_backward` and `optimizer_step`.

        plan -> forward and backward per micro-batch, gradients reduced with the last -> global norm -> AdamW, which
        clips. The host waits for the device once, at the end, for the metrics.

        Args:
            batch: the batch of this step, see `forward_backward`.
            loss: per-token loss.
            outputs: filled with the outputs of the forward passes of this step, see `forward_backward`.
            schedule_step: see `optimizer_step`.

        Returns:
            The metrics of `optimizer_step`.

        Raises:
            ValueError: see `forward_backward`.
        """
        self.zero_grad()
        self.forward_backward(batch, loss, outputs=outputs)
        return self.optimizer_step(schedule_step)

    def submit_train_step(
        self, batch: Batch | Share, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> Future[dict[str, float]]:  # fmt: skip
        """`train_step` at once, and its metrics as a `Future`, see `Engine`."""
        metrics = self.train_step(batch, loss, outputs=outputs, schedule_step=schedule_step)
        return Future(lambda: metrics)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Backward of a loss that `model` has computed, for a module and a loss of one's own. See `from_module`.

        ``loss = loss_of(engine.model(...)); engine.backward(loss); engine.optimizer_step()``. Gradients of several
        calls add up until the step, as those of `forward_backward`. Over ranks they are averaged, as DDP and FSDP do:
        each rank gives the mean over its own data. With `offload_between_phases` the forward needs `train_mode`.

        Args:
            loss: 0-d, with a graph.
            is_last: whether to reduce gradients over the ranks. A call before the last one saves the communication
                with False.

        Raises:
            ValueError: the engine is frozen, or the loss is no number with a graph.
        """
        self._require_optimizer()
        if loss.dim() or not loss.requires_grad:
            found = f"has shape {tuple(loss.shape)}" if loss.dim() else "needs no gradient"
            raise ValueError(f"the loss {found}, expected a 0-d tensor that engine.model has computed")
        step = self._opened()
        with self._dropping():
            STOP.leave_together(self.world)
            reduce_gradients(self.model, is_last, self.config.reduce_every_micro_batch is True)
            loss.backward()
            step.add({"loss": loss.detach().float() / self.world.size}, is_last)

    def zero_grad(self) -> None:
        """Drops all gradients, and the step that `forward_backward` has begun. Every rank must call it."""
        self._require_optimizer()
        if self._open is None:
            self.model.zero_grad(set_to_none=True)
            return
        step, self._open = self._open, None
        discard_gradients(self.model)  # also gradients that FSDP has not reduced
        step.phase.close()

    def forward_backward(
        self, batch: Batch | Share, loss: Loss, *, is_last: bool = True, outputs: dict[Output, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Forward and backward over a batch, in micro-batches. Gradients of several calls add up until the step.

        The first call opens `train_mode` until the step, unless it is open. `infer` may run between two calls. A call
        that fails drops the gradients of all calls. In bfloat16 a single process keeps the gradients beside the
        parameters, and `optimizer_step` sets ``grad``.

        Args:
            batch: the same on every rank, on the CPU, with the fields that the loss reads. Without ``loss_weight_T``
                the denominators are those of this batch. With it the batch is a piece of a larger whole: the loss is
                the sum of weighted tokens as it stands, so the weights are `rlft_fast.rl.loss_weights` of the whole,
                times its `loss_scale`. A share always has the weights of the whole.
            loss: per-token loss; it may be another one in every call.
            is_last: whether to reduce gradients over the ranks. A call before the last one saves the communication
                with False.
            outputs: filled by `optimizer_step` with the outputs of the forward passes, as `infer` returns them:
                "logprob" and "entropy" of a policy, "value" of a critic, "score" of a reward model. Tokens of weight 0
                have 0, as have tokens without an advantage where the loss `needs_advantage`.

        Returns:
            Sums over this rank's tokens, 0-d tensors on the device: the loss's metrics, and ``loss``.

        Raises:
            ValueError: the engine is frozen, a field is missing, a sequence is longer than the token cap, or the batch
                has images that the model cannot take.
        """
        self._require_optimizer()
        step = self._opened()
        with self._dropping():
            self._check_couples(loss)
            batch, scale = _with_weights(batch, loss)
            work = self._work(batch)
            self._check_experts(work.micro_batches)
            metrics, done = self._accumulate_gradients(work.micro_batches, loss, scale, is_last)
            step.add(metrics, is_last)
            if outputs is not None:
                step.outputs.append((outputs, done, work))
        return metrics

    def _opened(self) -> OpenStep:
        """The step under way, which opens `train_mode` until it ends."""
        if self._open is None:
            self._open = OpenStep()
            self._open.phase.enter_context(self.train_mode())
        return self._open

    def optimizer_step(self, schedule_step: int | None = None) -> dict[str, float]:
        """Global norm, clipping, AdamW and schedule, with the gradients of all calls of `forward_backward`.

        A gradient norm that is not finite skips the step: parameters and moments stay as they are.

        Args:
            schedule_step: number of this step in the schedule of the learning rate, in [0, num_training_steps). None:
                the number of steps taken so far, so that a skipped step does not count.

        Returns:
            The metrics of the calls, added up over calls and ranks (names that end in "_max": the maximum), with
            ``grad_norm``, ``learning_rate`` and ``skipped_steps`` (in all).

        Raises:
            ValueError: no gradients have been reduced since the last step.
        """
        self._require_optimizer()
        if self._open is None or not self._open.is_reduced:
            found = "there was no forward_backward" if self._open is None else "the last one had is_last=False"
            raise ValueError(f"optimizer_step needs reduced gradients, but {found} since the last step")
        with self._dropping():
            STOP.leave_or_finish(self.world)
            hand_over_gradients(self.model)
        step, self._open = self._open, None
        with step.phase:
            norm = grad_norm(self.model.parameters())
            learning_rate = self._step_optimizer(norm, self.step if schedule_step is None else schedule_step)
        totals = self.world.all_reduce(step.totals) | {"grad_norm": norm.to(self.device)}
        metrics = dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True))  # the step's only read
        self._count_step(finite=math.isfinite(metrics["grad_norm"]))
        for outputs, done, work in step.outputs:
            outputs |= {name: self._gather(done, name, work) for name in TRAINED[self.require_head()]}
        return agreement_share(metrics) | {"learning_rate": learning_rate, "skipped_steps": self.skipped_steps}

    def _check_couples(self, loss: Loss) -> None:
        if couples(loss) and self.config.sequence_parallel > 1:
            raise ValueError(
                f"the loss reads {', '.join(loss.fields)}: it couples sequences, which ranks share where "
                f"sequence_parallel is {self.config.sequence_parallel}; set it to 1"
            )

    def _check_experts(self, micro_batches: list[Batch]) -> None:
        experts_TK = micro_batches[0].routed_experts_TK if micro_batches else None
        if experts_TK is not None and self.require_head() == "logprob":
            self.routers.check(experts_TK)

    def _require_optimizer(self) -> None:
        if self.optimizer is None:
            raise ValueError("this engine is frozen: give it num_training_steps to train it")

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drops the step if the work inside fails: its gradients must not enter the next step."""
        try:
            yield
        except BaseException:
            self.zero_grad()
            raise

    def _accumulate_gradients(
        self, micro_batches: list[Batch], loss: Loss, scale: float, is_last: bool
    ) -> tuple[dict[str, Tensor], list[MicroBatchOutputs]]:
        """Forward and backward of this rank's micro-batches: its sums of the metrics, and its outputs."""
        totals: dict[str, Tensor] = {}
        done: list[MicroBatchOutputs] = []
        count_E = self._expert_counts(micro_batches) if self.config.router_aux_loss_coef else None
        for i, micro_batch in enumerate(micro_batches):
            STOP.leave_together(self.world)
            ends = is_last and i == len(micro_batches) - 1
            reduce_gradients(self.model, ends, self.config.reduce_every_micro_batch is True)
            metrics, results = self._forward_backward(micro_batch, loss, scale, count_E)
            accumulate(totals, metrics)
            done.append(results)
        return totals, done

    @torch.no_grad()
    def _expert_counts(self, micro_batches: list[Batch]) -> Tensor:
        """(E,) tokens of the whole batch that each expert gets."""
        counts: dict[str, Tensor] = {}
        for micro_batch in micro_batches:
            STOP.leave_together(self.world)
            inputs = self._inputs(micro_batch)
            passed = PassRouting.of(inputs)
            if inputs.routed_experts_UK is None:
                with self.routers.following(passed.routing):
                    self._forward_head(inputs, ())
            else:
                passed.routing.chosen[0] = inputs.routed_experts_UK.long()
            accumulate(counts, {str(e): count for e, count in enumerate(passed.counts(self.routers.num_experts))})
        reshard(self.model)
        return torch.stack([*self.world.all_reduce(counts).values()])

    def _forward_backward(
        self, micro_batch: Batch, loss: Loss, scale: float, count_E: Tensor | None
    ) -> tuple[dict[str, Tensor], MicroBatchOutputs]:
        """Of one micro-batch. The routers are followed where they replay, or have a loss."""
        inputs = self._inputs(micro_batch)
        if count_E is None and inputs.routed_experts_UK is None:
            total, metrics, outputs = self._loss_of(inputs, micro_batch, loss, scale)
            total.backward()
            return metrics, outputs
        passed = PassRouting.of(inputs)
        with self.routers.following(passed.routing):  # also in the backward, which may run blocks again
            total, metrics, outputs = self._loss_of(inputs, micro_batch, loss, scale)
            if count_E is not None:
                balance = passed.balance(count_E)
                total = total + self.config.router_aux_loss_coef * self.world.size * balance
                metrics["router_aux_loss"] = balance.detach()
            total.backward()
        return metrics if inputs.routed_experts_UK is None else metrics | passed.agreement(), outputs

    def _loss_of(
        self, inputs: ModelInputs, micro_batch: Batch, loss: Loss, scale: float
    ) -> tuple[Tensor, dict[str, Tensor], MicroBatchOutputs]:
        """The loss to differentiate, its metrics, and the outputs of the head."""
        fields = active_fields(micro_batch, inputs, loss.fields, self.device)
        names = LOSS_READS[self.require_head()]
        whole: dict[str, Any] = {}
        if loss.needs_sequences:
            whole = {"sequence_mean": sequence_mean(micro_batch, inputs, self.device)}
        ids = self._ids(micro_batch, inputs, loss)
        factor = scale * self.world.size  # FSDP averages gradients over ranks; the loss is a sum
        if self.require_head() != "logprob":
            outputs = (self.model(inputs),)
            total = factor * loss.per_token(dict(zip(names, outputs, strict=True)) | fields, **whole).sum()
        elif loss.needs_sequences or couples(loss):  # a chunk of rows may hold a part of a sequence only
            result = self.model(inputs, temperature=self.temperature, return_entropy=True)
            outputs = (result.logprob, result.entropy)
            total = factor * loss.per_token(dict(zip(names, outputs, strict=True)) | fields, **whole).sum()
        else:
            names = names if ids is None else (*names, IDS_LOGPROB)
            loss_fn = positional(loss.per_token, (*names, *fields), factor)  # in it, so that backward scales nothing
            total, *found = self.model(
                inputs, temperature=self.temperature, return_entropy=True, loss_fn=loss_fn,
                per_token=(*fields.values(),), ids=ids,
            )  # fmt: skip
            outputs = found[: len(names)]
        results = [x.detach() for x in outputs]
        metrics = loss.metrics(dict(zip(names, results, strict=True)) | fields, **whole)
        metrics["loss"] = total.detach() / self.world.size
        done: dict[str, Tensor] = dict(zip(TRAINED[self.require_head()], results, strict=False))
        return total, metrics, MicroBatchOutputs(done, micro_batch, inputs.output_index_A, inputs.row_T)

    def _ids(self, micro_batch: Batch, inputs: ModelInputs, loss: Loss) -> Tensor | None:
        """(A, K) int64 ids whose log-probabilities the loss reads."""
        if (name := ids_field(loss)) is None:
            return None
        if self.require_head() != "logprob" or loss.needs_sequences or couples(loss):
            raise ValueError(
                f"the loss reads log-probabilities of {name}, which a head of log-probabilities gives to a loss of "
                "single tokens alone"
            )
        return active_fields(micro_batch, inputs, (name,), self.device)[name].long()

    def _step_optimizer(self, norm: Tensor, schedule_step: int) -> float:
        """Clips and steps, unless the norm is not finite; that is decided on the device. Returns the learning rate."""
        assert self.optimizer is not None
        factor = self.schedule.factor(schedule_step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        coefficient, found_inf = clip_coefficient(norm.to(self._home), self.config.optimizer.max_grad_norm)
        self.optimizer.step(coefficient=coefficient, found_inf=found_inf)
        self.optimizer.zero_grad(set_to_none=True)
        return self.config.optimizer.learning_rate * factor

    def _count_step(self, finite: bool) -> None:
        if finite:
            self.step += 1
        else:
            self.skipped_steps += 1


def _with_weights(batch: Batch | Share, loss: Loss) -> tuple[Batch | Share, float]:
    if not isinstance(batch, Share):
        return weighted(batch, loss)
    if batch.batch.loss_weight_T is None:
        raise ValueError("a share needs loss_weight_T of the whole batch: cut what `rlft_fast.engine.weighted` returns")
    return batch, batch.scale
