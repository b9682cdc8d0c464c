"""Log-probabilities straight from hidden states: the vocabulary projection without its logits.

The public face: checks, backends, and which of the four algorithms of `rlft_fast.ops.tiled_logprob` runs.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlft_fast.ops import reference
from rlft_fast.ops.reference import LinearLogprob, LinearLogprobLoss, LossFunction
from rlft_fast.ops.tiled_logprob import compiled_handle, loss_functions, rebase_targets


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
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int = 64,
) -> LinearLogprob:
    """Log-probability of each target token under ``softmax(z)``, without materialising the logits.

    ``z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature``,
    ``logprob = z[target] - logsumexp(z)``, ``entropy = logsumexp(z) - sum(softmax(z) * z)``. Statistics are float32
    whatever the input dtype, and both results are differentiable in hidden, weight and bias.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16.
        weight_VD: (V, D) projection, same dtype and device as ``hidden_TD``. If it needs no gradient, forward and
            backward together cost two GEMMs instead of four.
        target_T: (T,) int64 vocabulary ids. Rows equal to ``ignore_index`` give 0 and cost nothing.
        bias_V: (V,) projection bias.
        temperature: sampling temperature, one number or a (T,) tensor (not differentiated).
        softcap: logit soft-capping (Gemma), None for none.
        logit_scale: factor on the raw logits (Cohere, Granite).
        ignore_index: target value of the rows to leave out.
        return_entropy: also return the entropy of each row's distribution, in nats.
        active_index: (A,) int64 indices of the rows whose target is not ``ignore_index``, ascending. Known on the
            host it spares a device synchronisation; computed from ``target_T`` when None.
        vocab_group: process group whose ranks each hold consecutive rows of the whole projection, in rank order and as
            many as they like: ``weight_VD`` and ``bias_V`` are this rank's rows, ``target_T`` counts in the whole
            vocabulary. All else is equal on all ranks; so are the results and the gradient of ``hidden_TD``, which are
            reduced inside.
        backend: ``"native"`` (compiled), ``"reference"`` (plain PyTorch, all logits in memory) or ``"auto"``.
        workspace_mib: upper bound on the logits held at once, in MiB.

    Returns:
        ``LinearLogprob(logprob, entropy)``, each (T,) float32; ``entropy`` is None unless asked for.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported or mixed dtypes.
    """
    _check(hidden_TD, weight_VD, target_T, bias_V, temperature, softcap, active_index, workspace_mib)
    if _resolve_backend(backend, hidden_TD.device, vocab_group) == "reference":
        _check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob(
            hidden_TD, weight_VD, target_T, bias_V=bias_V, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, ignore_index=ignore_index, return_entropy=return_entropy,
        )  # fmt: skip
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T = _local_targets(target_T, weight_VD.shape[0], ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    transform = (softcap or 0.0, logit_scale)
    trains_head = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    frozen = torch.is_grad_enabled() and hidden_TD.requires_grad and not trains_head
    if frozen and not return_entropy and vocab_group is None:
        logprob, _ = torch.ops.rlft_fast.linear_logprob_frozen(*inputs, *transform, workspace_mib)
        return LinearLogprob(logprob, None)
    group = "" if vocab_group is None else vocab_group.group_name
    logprob, entropy, _ = torch.ops.rlft_fast.linear_logprob(*inputs, *transform, group, workspace_mib, return_entropy)
    return LinearLogprob(logprob, entropy if return_entropy else None)


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
    workspace_mib: int = 64,
) -> LinearLogprobLoss:
    """Sum of any per-token loss of the log-probabilities, in three GEMMs for forward and backward together.

    Each chunk of rows computes its statistics, calls ``loss_fn`` under autograd on those few numbers, turns its logits
    into their gradients in place and finishes its part of all gradients; the backward pass only scales them. Fits
    whatever is a function of one token's numbers: PPO, GRPO, CISPO, KL penalties, entropy bonuses. Losses that couple
    tokens (sequence-level ratios) use :func:`linear_logprob`.

    Args:
        hidden_TD: (T, D) final hidden states.
        weight_VD: (V, D) projection.
        target_T: (T,) int64 vocabulary ids; rows equal to ``ignore_index`` add nothing to the loss.
        loss_fn: ``loss_fn(logprob, entropy, *per_token) -> (R,)``, called once per chunk of R rows with the rows'
            float32 log-probabilities, entropies (None unless ``return_entropy``) and slices of ``per_token``. Plain
            PyTorch without side effects; gradients flow to ``logprob`` and ``entropy`` only.
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
        workspace_mib: see there.

    Returns:
        ``LinearLogprobLoss(loss, logprob, entropy)``: the 0-d float32 sum over tokens, and detached (T,) statistics.

    Raises:
        ValueError: shapes, devices or option values that do not fit, or a ``loss_fn`` of the wrong output shape.
        TypeError: unsupported or mixed dtypes.
    """
    _check(hidden_TD, weight_VD, target_T, bias_V, temperature, softcap, active_index, workspace_mib)
    for i, values in enumerate(per_token):
        if values.shape != target_T.shape or values.device != target_T.device:
            raise ValueError(
                f"per_token[{i}] must be a {tuple(target_T.shape)} tensor on {target_T.device} like target_T, "
                f"got {tuple(values.shape)} on {values.device}"
            )
    if _resolve_backend(backend, hidden_TD.device, vocab_group) == "reference":
        _check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob_loss(
            hidden_TD, weight_VD, target_T, loss_fn, *per_token, bias_V=bias_V, temperature=temperature,
            softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index, return_entropy=return_entropy,
        )  # fmt: skip
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T = _local_targets(target_T, weight_VD.shape[0], ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    group = "" if vocab_group is None else vocab_group.group_name
    options = (softcap or 0.0, logit_scale, group, workspace_mib, return_entropy)
    needs_grad = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden_TD, weight_VD, bias_V)
    )
    if torch.compiler.is_compiling():
        results = torch.ops.rlft_fast.linear_logprob_loss(
            *inputs, list(per_token), compiled_handle(loss_fn), *options, needs_grad
        )
    else:
        handle = id(loss_fn)
        loss_functions[handle] = loss_fn
        try:
            results = torch.ops.rlft_fast.linear_logprob_loss(*inputs, list(per_token), handle, *options, needs_grad)
        finally:
            del loss_functions[handle]
    loss, logprob, entropy = results[:3]
    return LinearLogprobLoss(loss, logprob.detach(), entropy.detach() if return_entropy else None)


# ---- checks and preparation ---------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(hidden, weight, target, bias, temperature, softcap, active_index, workspace_mib) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden_TD (T, D) and weight_VD (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}; "
            "flatten batched hidden states to two dimensions"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight_VD has no rows: the vocabulary must hold at least one token")
    if target.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected target_T of shape {tuple(hidden.shape[:1])} to match hidden_TD, got {tuple(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target_T must hold int64 vocabulary ids, got {target.dtype}")
    if hidden.dtype != weight.dtype or hidden.dtype not in (*_DTYPES, torch.float64):
        raise TypeError(
            f"hidden_TD and weight_VD must share one of float32, bfloat16, float16; "
            f"got {hidden.dtype} and {weight.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias_V of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(
                f"a temperature tensor must have one value per token {tuple(target.shape)}, "
                f"got {tuple(temperature.shape)}"
            )
    elif not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; greedy decoding has no log-probabilities")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no soft-capping; got {softcap}")
    if workspace_mib < 1:
        raise ValueError(f"workspace_mib must be at least 1, got {workspace_mib}")
    others = {"weight_VD": weight, "target_T": target, "bias_V": bias, "active_index": active_index}
    if isinstance(temperature, Tensor):
        others["temperature"] = temperature
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device} but hidden_TD is on {hidden.device}; move them together")


def _check_targets(target_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Only on the CPU, where looking costs nothing; a device would have to be waited for."""
    if target_T.device.type != "cpu" or torch.compiler.is_compiling() or target_T.numel() == 0:
        return
    known = target_T.where(target_T != ignore_index, 0)
    if known.min() < 0 or known.max() >= vocab:
        row = int(((known < 0) | (known >= vocab)).nonzero()[0])
        raise ValueError(
            f"target_T[{row}] is {int(target_T[row])}, outside the vocabulary of {vocab} tokens and not "
            f"ignore_index={ignore_index}"
        )


def _local_targets(target_T: Tensor, vocab: int, ignore_index: int, group: ProcessGroup | None) -> Tensor:
    """Targets as rows of this rank's weight, checked."""
    if group is None:
        _check_targets(target_T, vocab, ignore_index)
        return target_T
    local_T, whole_vocab = rebase_targets(target_T, vocab, group)
    if target_T.device.type == "cpu":
        _check_targets(target_T, int(whole_vocab), ignore_index)
    return local_T


def _resolve_backend(backend: str, device: torch.device, group: ProcessGroup | None) -> str:
    if backend not in ("auto", "native", "reference"):
        raise ValueError(f"backend must be 'auto', 'native' or 'reference', got {backend!r}")
    has_native = device.type in ("cpu", "meta")
    if backend == "native" and not has_native:
        raise ValueError(f"linear_logprob has no compiled kernels for {device} yet: use backend='auto' or 'reference'")
    chosen = backend if backend != "auto" else "native" if has_native else "reference"
    if chosen == "reference" and group is not None:
        raise ValueError(
            f"a vocabulary sharded by vocab_group needs compiled kernels; on {device} with backend={backend!r} the "
            "reference would run: gather the weight first"
        )
    return chosen


def _inverse(temperature: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(torch.float32).reciprocal()
    return torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=like.device)


def _active_index(target_T: Tensor, ignore_index: int, active_index: Tensor | None) -> Tensor:
    return active_index if active_index is not None else (target_T != ignore_index).nonzero().squeeze(-1)
