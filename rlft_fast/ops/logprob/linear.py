"""Log-probabilities straight from hidden states: the vocabulary projection without its logits.

The public face: it checks, finds the backend, and calls one of the ways `recompute`, `frozen` and `loss`.

Shapes: T packed tokens, A active ones, D hidden, V vocabulary, E trained columns of an adapter.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlft_fast.ops.backends import resolve_backend
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.checks import (
    check_adapter,
    check_ids,
    check_no_tangent,
    check_per_token,
    check_problem,
    check_shards,
    check_targets,
    check_tensors,
    inverse_temperature,
    looks_at,
    softcap_or_0,
)
from rlft_fast.ops.logprob.frozen import FROZEN
from rlft_fast.ops.logprob.loss import LOSS, hold, release
from rlft_fast.ops.logprob.odds import has_odds
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.recompute import RECOMPUTE, Asked, is_plain, logits_fit
from rlft_fast.ops.logprob.reference import LinearLogprob, LinearLogprobLoss, LossFunction
from rlft_fast.ops.logprob.statistics import rebase_targets
from rlft_fast.ops.logprob.workspace import default_tile_mib

# What "auto" looks up where the vocabulary is sharded: backends reduce at different points, and V differs among ranks.
_SHARDED_VOCAB = 2**17


def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_sum_prob_squared: bool = False,
    return_top1: bool = False,
    return_mean_logits: bool = False,
    threshold_T: Tensor | None = None,
    adapter_VE: Tensor | None = None,
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int | None = None,
) -> LinearLogprob:
    """Log-probability of each target token under ``softmax(z)``, without materialising the logits.

    ``z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature``,
    ``logprob = z[target] - logsumexp(z)``, ``entropy = logsumexp(z) - sum(softmax(z) * z)``. Statistics are float32
    whatever the input dtype, and both results are differentiable in hidden, weight, bias and adapter.

    The weight is rounded to the dtype of the hidden states, and under autocast both are rounded to autocast's dtype.
    They are rounded tile by tile, and no copy of the weight is made. The bias is added in float32. Each gradient has
    the dtype of its input and is rounded to no other: a float32 weight gets a float32 gradient. Float32 operands are
    multiplied in float32 even where torch's flags allow TF32; ``backend="reference"`` follows the flags.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16 (float64: in plain PyTorch).
        weight_VD: (V, D) projection on the device of ``hidden_TD``; float32, bfloat16 or float16, also another one than
            the hidden states have. If it needs no gradient, forward and backward together cost two GEMMs instead of
            four; three with an entropy or another statistic, ``threshold_T`` or ``vocab_group``. With ``adapter_VE`` it
            is (V, D - E).
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0 and cost nothing. An id outside the
            vocabulary raises on the CPU; on a device, which would have to be waited for, its row gives nan, and raises
            with the environment variable ``RLFT_FAST_DEBUG=1``. Under ``torch.compile`` its row gives nan.
        bias_V: (V,) projection bias.
        temperature: sampling temperature, one number or a (T,) tensor (not differentiated).
        softcap: logit soft-capping (Gemma), None for none.
        logit_scale: factor on the raw logits (Cohere, Granite).
        ignore_index: target value of the rows to leave out.
        return_entropy: also return the entropy of each row's distribution, in nats.
        return_sum_prob_squared: also return ``sum(softmax(z)^2)``, not differentiable (optimal-token baselines).
        return_top1: also return whether the target is the most probable token.
        return_mean_logits: also return ``mean(z)`` over the vocabulary, not differentiable; not with ``threshold_T``.
        threshold_T: (T,) leaves the tokens with ``z`` below it out of the softmax: see :func:`support_logprob`.
        adapter_VE: (V, E) trained columns beside a ``weight_VD`` that needs no gradient, as a low-rank adapter has
            them. The last E columns of ``hidden_TD`` multiply them. The gradient of the other columns is not computed:
            forward and backward together cost 3 + E / D GEMMs. The compiled kernels of CPUs copy both beside each
            other tile by tile. Triton and GPUs copy the whole projection once, in the dtype that is multiplied.
        active_index: (A,) int64 indices of the rows whose target is not ``ignore_index``, ascending. Known on the
            host it spares a device synchronisation; computed from ``target_T`` when None.
        vocab_group: process group whose ranks each hold consecutive rows of the whole projection, in rank order and as
            many as they like: ``weight_VD`` and ``bias_V`` are this rank's rows, ``target_T`` counts in the whole
            vocabulary. All else is equal on all ranks; so are the results and the gradient of ``hidden_TD``, which are
            reduced inside.
        backend: ``"native"`` (compiled), ``"triton"``, ``"reference"`` (plain PyTorch, all logits in memory), or
            ``"auto"`` for the fastest: the compiled one, unless measurements on this kind of GPU say otherwise. On a
            GPU, backends agree only up to rounding. Triton's own paths also agree only up to rounding: with and without
            kept logits, with a frozen weight, and in :func:`linear_logprob_loss`.
        workspace_mib: upper bound on the logits held at once, in MiB; None for 64 on the CPU and 256 on a GPU, 1,024
            where Triton computes a frozen head there. Where the logits of all T rows fit they are kept for backward,
            and forward and backward take three GEMMs instead of four (not under ``torch.compile``, nor with
            ``threshold_T``).

    Returns:
        :class:`LinearLogprob` of (T,) tensors, float32 (``top1``: bool), each None unless asked for.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported dtypes, no tensors, or no process group.
    """
    problem = checked_problem(
        hidden_TD, weight_VD, target_T, temperature, softcap, adapter_VE=adapter_VE, vocab_group=vocab_group,
        active_index=active_index, bias_V=bias_V, threshold_T=threshold_T, scale=logit_scale, backend=backend,
        workspace_mib=workspace_mib, ignore_index=ignore_index,
    )  # fmt: skip
    if return_mean_logits and threshold_T is not None:
        raise ValueError(
            "return_mean_logits does not go with threshold_T, because the logits below a threshold are -inf, and their "
            "mean would be, too: leave one of them out"
        )
    asked = Asked(return_entropy, return_sum_prob_squared, return_top1, return_mean_logits)
    needs_grad = _needs_grad(problem)
    only_hidden = needs_grad == [True, False, False] and not any(asked)
    freezes = only_hidden and vocab_group is None and threshold_T is None
    kind = "no grad" if not any(needs_grad) else "frozen head" if freezes else "forward + backward"
    if not freezes and not is_plain(problem, asked):
        kind = f"{kind}, other statistics"  # which nothing measures: Triton's large tile has no registers for them
    problem = _with_backend(problem, kind)
    if problem.backend == "reference":
        check_targets(target_T, problem.vocab, ignore_index)
        return reference.linear_logprob(
            *reference.rounded_inputs(hidden_TD, weight_VD, adapter_VE, problem.dtype), target_T, bias_V=bias_V,
            temperature=temperature, softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index,
            threshold_T=threshold_T, return_entropy=return_entropy,
            return_sum_prob_squared=return_sum_prob_squared, return_top1=return_top1,
            return_mean_logits=return_mean_logits,
        )  # fmt: skip
    problem, shards = _localize(problem, vocab_group)
    if workspace_mib is None:
        problem = replace(problem, workspace_mib=default_tile_mib(problem.device_type, freezes and has_odds(problem)))
    if freezes:
        logprob, _ = FROZEN(problem)
        return LinearLogprob(logprob)
    # A compiled graph serves any number of tokens, and their number decides whether the logits fit.
    keeps_logits = any(needs_grad) and threshold_T is None and not torch.compiler.is_compiling()
    if keeps_logits and shards is not None:  # all ranks keep logits or none does: so they reduce equally often
        keeps_logits = logits_fit(problem, int(shards[:, 0].max()))
    logprob, *extras, _, _ = RECOMPUTE(problem, keeps_logits, *asked)
    return LinearLogprob(logprob, *(x if wanted else None for x, wanted in zip(extras, asked, strict=True)))


def linear_logprob_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    loss_fn: LossFunction,
    *per_token: Tensor,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    ids_TK: Tensor | None = None,
    adapter_VE: Tensor | None = None,
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int | None = None,
) -> LinearLogprobLoss:
    """Sum of any per-token loss of the log-probabilities, in three GEMMs for forward and backward together.

    A frozen weight takes two GEMMs, and an adapter of E columns beside it E / D more. With ``backend="triton"``, a loss
    that depends on the entropy takes one more, for the logits. Each chunk of rows computes its
    statistics, calls ``loss_fn`` under autograd on these few numbers, turns its logits into their gradients in place
    and finishes its part of all gradients. The backward pass only scales the gradients, in place, so that a second
    backward pass raises. The op fits every loss that is a function of one token's numbers: PPO, GRPO, CISPO, KL
    penalties, entropy bonuses. Two kinds of losses use :func:`linear_logprob` instead: losses that couple tokens
    (sequence-level ratios), and float16 with a loss scale, which would be applied after the gradients are rounded.

    Args:
        hidden_TD: (T, D) final hidden states.
        weight_VD: (V, D) projection.
        target_T: (T,) int64 vocabulary ids; rows equal to ``ignore_index`` add nothing to the loss.
        loss_fn: ``loss_fn(logprob, entropy, *per_token) -> (R,)``, called once per chunk of R rows with the rows'
            float32 log-probabilities, entropies (None unless ``return_entropy``) and slices of ``per_token``. With
            ``ids_TK``, (R, K) log-probabilities of the ids stand between ``entropy`` and ``per_token``. Plain PyTorch
            without side effects; gradients flow to the log-probabilities and ``entropy`` only: ``per_token`` and what
            ``loss_fn`` closes over get none. Under ``torch.compile`` a function or, from torch 2.13, a callable
            object; another one compiles again, so numbers that change are better in ``per_token``.
        *per_token: (T,) or (T, K) tensors handed to ``loss_fn`` in slices of rows.
        bias_V: as in :func:`linear_logprob`, like all options below.
        temperature: see there.
        softcap: see there.
        logit_scale: see there.
        ignore_index: see there.
        return_entropy: hand entropies to ``loss_fn`` and return them.
        ids_TK: (T, K) int64 further vocabulary ids of each row, whose log-probabilities under the softmax over the
            whole vocabulary ``loss_fn`` reads, too, as the loss of a distillation does. They cost T K D multiplications
            with gathered rows of the projection in the forward, and twice as many for the gradients. Not with
            ``vocab_group``.
        adapter_VE: see there.
        active_index: see there.
        vocab_group: see there.
        backend: see there.
        workspace_mib: see there; whole rows of logits must fit. None on the CPU: the logits of 480 rows, at least
            64 MiB. None on a GPU: the dlogits of all rows, at most the size of a float32 dweight (which is then not
            needed) or 1 GiB, whichever is larger.

    Returns:
        ``LinearLogprobLoss(loss, logprob, entropy, ids_logprob)``: the 0-d float32 sum over tokens, and detached (T,)
        and (T, K) statistics.

    Raises:
        ValueError: shapes, devices or option values that do not fit, or a ``loss_fn`` of the wrong output shape.
        TypeError: unsupported dtypes, no tensors, or no process group.
    """
    problem = checked_problem(
        hidden_TD, weight_VD, target_T, temperature, softcap, adapter_VE=adapter_VE, vocab_group=vocab_group,
        active_index=active_index, bias_V=bias_V, scale=logit_scale, backend=backend,
        workspace_mib=workspace_mib, ignore_index=ignore_index,
    )  # fmt: skip
    check_per_token(per_token, target_T)
    if ids_TK is not None:
        check_ids(ids_TK, problem)
    problem = _with_backend(problem, "loss")
    if problem.backend == "reference":
        check_targets(target_T, problem.vocab, ignore_index)
        return reference.linear_logprob_loss(
            *reference.rounded_inputs(hidden_TD, weight_VD, adapter_VE, problem.dtype), target_T, loss_fn, *per_token,
            bias_V=bias_V, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
            ignore_index=ignore_index, return_entropy=return_entropy, ids_TK=ids_TK,
        )  # fmt: skip
    problem, shards = _localize(problem, vocab_group)
    handle = hold(loss_fn)
    try:
        results = LOSS(problem, list(per_token), handle, shards, ids_TK, return_entropy, _needs_grad(problem))
    finally:
        release(handle)
    loss, logprob, entropy, ids_logprob = results[:4]
    return LinearLogprobLoss(
        loss, logprob.detach(), entropy.detach() if return_entropy else None,
        None if ids_TK is None else ids_logprob.detach(),
    )  # fmt: skip


# ---- preparation ----------------------------------------------------------------------------------------------------


def checked_problem(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature: float | Tensor, softcap: float | None, *,
    adapter_VE: Tensor | None = None, vocab_group: ProcessGroup | None = None, support_TK: Tensor | None = None,
    **fields: Any,
) -> Problem:  # fmt: skip
    """The problem of a call: arguments as the user gave them, and the other fields of `Problem`.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported dtypes, no tensors, or no process group.
    """
    optional = {"adapter_VE": adapter_VE, "support_TK": support_TK}
    given = {name: x for name, x in optional.items() if x is not None}
    check_tensors(hidden_TD=hidden_TD, weight_VD=weight_VD, target_T=target_T, **given)
    if adapter_VE is not None:
        check_adapter(hidden_TD, weight_VD, adapter_VE)
    problem = Problem(
        hidden_TD=hidden_TD, weight_VD=weight_VD, target_T=target_T,
        adapter_VE=adapter_VE, inv_temperature=inverse_temperature(temperature, hidden_TD.device),
        softcap=softcap_or_0(softcap), group=_group_name(vocab_group), dtype=_compute_dtype(hidden_TD), **fields,
    )  # fmt: skip
    check_problem(problem, temperature, support_TK=support_TK)
    return problem


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a product with the hidden states: their own or, where autocast is on, a linear layer's."""
    device = hidden.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden.dtype
    return torch.get_autocast_dtype(device)


def _group_name(group: ProcessGroup | None) -> str:
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"vocab_group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}: take it from "
            "torch.distributed.new_group, or from a mesh by get_group"
        )
    return "" if group is None else group.group_name


def _needs_grad(problem: Problem) -> list[bool]:
    inputs = (problem.hidden_TD, problem.trained, problem.bias_V)
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def _with_backend(problem: Problem, kind: str) -> Problem:
    """The problem with the backend that runs in place of the backend in the call."""
    hidden = problem.hidden_TD
    shape = (hidden.shape[0], hidden.shape[1], _SHARDED_VOCAB if problem.group else problem.vocab)
    backend = resolve_backend(problem.backend, hidden.device, problem.dtype, kind, shape, bool(problem.group))
    return replace(problem, backend=backend)


def prepared(problem: Problem, kind: str) -> Problem:
    """The problem with the backend that runs, its active tokens, and an adapter where kernels read it."""
    return _localize(_with_backend(problem, kind), None)[0]


def _localize(problem: Problem, group: ProcessGroup | None) -> tuple[Problem, Tensor | None]:
    """The problem as operators take it, and all ranks' [V, D, T].

    Its active tokens are found, its targets are rows of this rank's weight, and an adapter is where kernels read it.
    """
    if problem.backend != "native" or problem.device_type != "cpu":
        problem = problem.joined()
    check_no_tangent(problem.hidden_TD, problem.trained, problem.bias_V)
    target_T, ignore_index = problem.target_T, problem.ignore_index
    active_index = problem.active_index
    if active_index is None:
        active_index = (target_T != ignore_index).nonzero().squeeze(-1)
    if group is None:
        check_targets(target_T, problem.vocab, ignore_index)
        return replace(problem, active_index=active_index), None
    local_T, shards = rebase_targets(target_T, problem.weight_VD, group)
    if looks_at(target_T):
        check_shards(shards.tolist())
        check_targets(target_T, int(shards[:, 0].sum()), ignore_index)
    return replace(problem, active_index=active_index, target_T=local_T), shards
