"""Log-probabilities straight from hidden states: the vocabulary projection without its logits.

The public face: checks, backends, and which of the algorithms of `recompute`, `frozen` and `loss` runs.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlft_fast.ops.backends import resolve_backend
from rlft_fast.ops.logprob import recompute as recompute  # registers its ops
from rlft_fast.ops.logprob import reference
from rlft_fast.ops.logprob.checks import (
    check_active_index,
    check_inputs,
    check_no_tangent,
    check_number,
    check_per_token,
    check_shards,
    check_targets,
    check_threshold,
    looks_at,
)
from rlft_fast.ops.logprob.loss import hold, release
from rlft_fast.ops.logprob.reference import LinearLogprob, LinearLogprobLoss, LossFunction
from rlft_fast.ops.logprob.tiles import rebase_targets

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
    threshold_T: Tensor | None = None,
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int | None = None,
) -> LinearLogprob:
    """Log-probability of each target token under ``softmax(z)``, without materialising the logits.

    ``z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature``,
    ``logprob = z[target] - logsumexp(z)``, ``entropy = logsumexp(z) - sum(softmax(z) * z)``. Statistics are float32
    whatever the input dtype, and both results are differentiable in hidden, weight and bias. Under autocast the inputs
    are cast as ``torch.nn.functional.linear`` casts them. Float32 inputs are multiplied in float32 even where torch's
    flags allow TF32; ``backend="reference"`` follows the flags.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16 (float64: in plain PyTorch).
        weight_VD: (V, D) projection, same dtype and device as ``hidden_TD``. If it needs no gradient, forward and
            backward together cost two GEMMs instead of four; three with an entropy or another statistic,
            ``threshold_T`` or ``vocab_group``.
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0 and cost nothing. An id outside the
            vocabulary raises on the CPU; on a device, which would have to be waited for, its row gives nan, and raises
            with the environment variable ``RLFT_FAST_DEBUG=1``.
        bias_V: (V,) projection bias.
        temperature: sampling temperature, one number or a (T,) tensor (not differentiated).
        softcap: logit soft-capping (Gemma), None for none.
        logit_scale: factor on the raw logits (Cohere, Granite).
        ignore_index: target value of the rows to leave out.
        return_entropy: also return the entropy of each row's distribution, in nats.
        return_sum_prob_squared: also return ``sum(softmax(z)^2)``, not differentiable (optimal-token baselines).
        return_top1: also return whether the target is the most probable token.
        threshold_T: (T,) leaves the tokens with ``z`` below it out of the softmax: see :func:`support_logprob`.
        active_index: (A,) int64 indices of the rows whose target is not ``ignore_index``, ascending. Known on the
            host it spares a device synchronisation; computed from ``target_T`` when None.
        vocab_group: process group whose ranks each hold consecutive rows of the whole projection, in rank order and as
            many as they like: ``weight_VD`` and ``bias_V`` are this rank's rows, ``target_T`` counts in the whole
            vocabulary. All else is equal on all ranks; so are the results and the gradient of ``hidden_TD``, which are
            reduced inside.
        backend: ``"native"`` (compiled), ``"triton"``, ``"reference"`` (plain PyTorch, all logits in memory), or
            ``"auto"`` for the fastest: the compiled one, unless measurements on this kind of GPU say otherwise. On a
            GPU, backends and Triton's two passes with and without gradient agree to rounding only.
        workspace_mib: upper bound on the logits held at once, in MiB; None for 64 on the CPU and 256 on a GPU. Where
            those of all T rows fit they are kept for backward, and forward and backward take three GEMMs instead of
            four (not under ``torch.compile``, nor with ``threshold_T``).

    Returns:
        :class:`LinearLogprob` of (T,) tensors, float32 (``top1``: bool), each None unless asked for.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported or mixed dtypes.
    """
    hidden_TD, weight_VD, bias_V = autocast_inputs(hidden_TD, weight_VD, bias_V)
    check_inputs(
        hidden_TD, weight_VD, target_T, bias_V, temperature, softcap, ignore_index, workspace_mib,
        sharded=vocab_group is not None, threshold_T=threshold_T, active_index=active_index,
    )  # fmt: skip
    check_number("logit_scale", logit_scale)
    check_threshold(threshold_T, target_T)
    check_active_index(active_index, target_T, ignore_index)
    asked_for = {
        "return_entropy": return_entropy,
        "return_sum_prob_squared": return_sum_prob_squared,
        "return_top1": return_top1,
    }
    needs_grad = _needs_grad(hidden_TD, weight_VD, bias_V)
    only_hidden = needs_grad == [True, False, False] and not any(asked_for.values())
    freezes = only_hidden and vocab_group is None and threshold_T is None
    kind = "no grad" if not any(needs_grad) else "frozen head" if freezes else "forward + backward"
    shape = (len(target_T), weight_VD.shape[1], weight_VD.shape[0] if vocab_group is None else _SHARDED_VOCAB)
    backend = resolve_backend(backend, hidden_TD.device, hidden_TD.dtype, kind, shape, vocab_group)
    if backend == "reference":
        check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob(
            hidden_TD, weight_VD, target_T, bias_V=bias_V, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, ignore_index=ignore_index, threshold_T=threshold_T, **asked_for,
        )  # fmt: skip
    check_no_tangent(hidden_TD, weight_VD, bias_V)
    if workspace_mib is None:
        workspace_mib = 256 if hidden_TD.is_cuda else 64
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T, _ = _local_targets(target_T, weight_VD, ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    if backend == "triton" and kind == "no grad" and threshold_T is None:
        backend = "triton_fused"  # backward needs the logits of its own GEMM, or rounding errors do not cancel
    transform = (softcap or 0.0, logit_scale, backend)
    if freezes:
        logprob, _ = torch.ops.rlft_fast.linear_logprob_frozen(*inputs, *transform, workspace_mib)
        return LinearLogprob(logprob)
    group = "" if vocab_group is None else vocab_group.group_name
    # A compiled graph serves any number of tokens, and theirs decides whether logits fit.
    keep_logits = any(needs_grad) and threshold_T is None and not torch.compiler.is_compiling()
    logprob, *extras, _, _ = torch.ops.rlft_fast.linear_logprob(
        *inputs, threshold_T, *transform, group, workspace_mib, keep_logits, *asked_for.values()
    )
    return LinearLogprob(logprob, *(x if asked else None for x, asked in zip(extras, asked_for.values(), strict=True)))


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
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int | None = None,
) -> LinearLogprobLoss:
    """Sum of any per-token loss of the log-probabilities, in three GEMMs for forward and backward together.

    Two GEMMs, if the weight needs no gradient. Each chunk of rows computes its statistics, calls ``loss_fn`` under
    autograd on those few numbers, turns its logits into their gradients in place and finishes its part of all
    gradients; the backward pass only scales them, in place, so that a second one raises. Fits whatever is a function of
    one token's numbers: PPO, GRPO, CISPO, KL penalties, entropy bonuses. Losses that couple tokens (sequence-level
    ratios), and float16 with a loss scale, which would come after the gradients are rounded, use
    :func:`linear_logprob`.

    Args:
        hidden_TD: (T, D) final hidden states.
        weight_VD: (V, D) projection.
        target_T: (T,) int64 vocabulary ids; rows equal to ``ignore_index`` add nothing to the loss.
        loss_fn: ``loss_fn(logprob, entropy, *per_token) -> (R,)``, called once per chunk of R rows with the rows'
            float32 log-probabilities, entropies (None unless ``return_entropy``) and slices of ``per_token``. Plain
            PyTorch without side effects; gradients flow to ``logprob`` and ``entropy`` only: ``per_token`` and what
            ``loss_fn`` closes over get none. Under ``torch.compile`` a function or, from torch 2.13, a callable
            object; another one compiles again, so numbers that change are better in ``per_token``.
        *per_token: (T,) tensors handed to ``loss_fn`` in slices.
        bias_V: as in :func:`linear_logprob`, like all options below.
        temperature: see there.
        softcap: see there.
        logit_scale: see there.
        ignore_index: see there.
        return_entropy: hand entropies to ``loss_fn`` and return them.
        active_index: see there.
        vocab_group: see there.
        backend: see there.
        workspace_mib: see there; whole rows of logits must fit. None on the CPU for the logits of 480
            rows, but no less than 64; on a GPU for the dlogits of all rows, or as much as the float32 accumulator of
            dweight takes that is then not needed, but no less than a GiB.

    Returns:
        ``LinearLogprobLoss(loss, logprob, entropy)``: the 0-d float32 sum over tokens, and detached (T,) statistics.

    Raises:
        ValueError: shapes, devices or option values that do not fit, or a ``loss_fn`` of the wrong output shape.
        TypeError: unsupported or mixed dtypes.
    """
    hidden_TD, weight_VD, bias_V = autocast_inputs(hidden_TD, weight_VD, bias_V)
    check_inputs(
        hidden_TD,
        weight_VD,
        target_T,
        bias_V,
        temperature,
        softcap,
        ignore_index,
        workspace_mib,
        sharded=vocab_group is not None,
        active_index=active_index,
    )
    check_active_index(active_index, target_T, ignore_index)
    check_number("logit_scale", logit_scale)
    check_per_token(per_token, target_T)
    shape = (len(target_T), weight_VD.shape[1], weight_VD.shape[0] if vocab_group is None else _SHARDED_VOCAB)
    backend = resolve_backend(backend, hidden_TD.device, hidden_TD.dtype, "loss", shape, vocab_group)
    if backend == "reference":
        check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob_loss(
            hidden_TD, weight_VD, target_T, loss_fn, *per_token, bias_V=bias_V, temperature=temperature,
            softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index, return_entropy=return_entropy,
        )  # fmt: skip
    check_no_tangent(hidden_TD, weight_VD, bias_V)
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T, shards = _local_targets(target_T, weight_VD, ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    group = "" if vocab_group is None else vocab_group.group_name
    options = (softcap or 0.0, logit_scale, backend, group, shards, workspace_mib, return_entropy)
    needs_grad = _needs_grad(hidden_TD, weight_VD, bias_V)
    handle = hold(loss_fn)
    try:
        results = torch.ops.rlft_fast.linear_logprob_loss(*inputs, list(per_token), handle, *options, needs_grad)
    finally:
        release(handle)
    loss, logprob, entropy = results[:3]
    return LinearLogprobLoss(loss, logprob.detach(), entropy.detach() if return_entropy else None)


# ---- preparation ----------------------------------------------------------------------------------------------------


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts them as autocast, where it is on, would cast those of a linear layer."""
    device = hidden.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _needs_grad(*inputs: Tensor | None) -> list[bool]:
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def _local_targets(
    target_T: Tensor, weight_VD: Tensor, ignore_index: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    """Targets as rows of this rank's weight, checked, and [V, D, T] of all ranks."""
    if group is None:
        check_targets(target_T, weight_VD.shape[0], ignore_index)
        return target_T, None
    local_T, shards = rebase_targets(target_T, weight_VD, group)
    if looks_at(target_T):
        check_shards(shards.tolist())
        check_targets(target_T, int(shards[:, 0].sum()), ignore_index)
    return local_T, shards


def _inverse(temperature: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(torch.float32).reciprocal()
    return torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=like.device)


def _active_index(target_T: Tensor, ignore_index: int, active_index: Tensor | None) -> Tensor:
    return active_index if active_index is not None else (target_T != ignore_index).nonzero().squeeze(-1)
