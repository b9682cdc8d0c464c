"""Log-probabilities straight from hidden states: the vocabulary projection without its logits.

The public face: checks, backends, and which of the algorithms of `tiled_logprob` and `tiled_loss` runs.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlft_fast.ops import reference
from rlft_fast.ops import tiled_logprob as tiled_logprob  # registers its ops
from rlft_fast.ops._library import has_cuda_kernels
from rlft_fast.ops.reference import LinearLogprob, LinearLogprobLoss, LossFunction
from rlft_fast.ops.tiled_loss import compiled_handle, loss_functions
from rlft_fast.ops.tiles import GPU_LOGIT_ROWS, rebase_targets


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
    active_index: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    backend: str = "auto",
    workspace_mib: int | None = None,
) -> LinearLogprob:
    """Log-probability of each target token under ``softmax(z)``, without materialising the logits.

    ``z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature``,
    ``logprob = z[target] - logsumexp(z)``, ``entropy = logsumexp(z) - sum(softmax(z) * z)``. Statistics are float32
    whatever the input dtype, and both results are differentiable in hidden, weight and bias. Under autocast the inputs
    are cast as ``torch.nn.functional.linear`` casts them.

    Args:
        hidden_TD: (T, D) final hidden states; float32, bfloat16 or float16.
        weight_VD: (V, D) projection, same dtype and device as ``hidden_TD``. If it needs no gradient, forward and
            backward together cost two GEMMs instead of four.
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
        active_index: (A,) int64 indices of the rows whose target is not ``ignore_index``, ascending. Known on the
            host it spares a device synchronisation; computed from ``target_T`` when None.
        vocab_group: process group whose ranks each hold consecutive rows of the whole projection, in rank order and as
            many as they like: ``weight_VD`` and ``bias_V`` are this rank's rows, ``target_T`` counts in the whole
            vocabulary. All else is equal on all ranks; so are the results and the gradient of ``hidden_TD``, which are
            reduced inside.
        backend: ``"native"`` (compiled), ``"triton"``, ``"reference"`` (plain PyTorch, all logits in memory), or
            ``"auto"`` for the fastest that is installed.
        workspace_mib: upper bound on the logits held at once, in MiB; None for 64 on the CPU and 256 on a GPU.

    Returns:
        :class:`LinearLogprob` of (T,) tensors, float32 (``top1``: bool), each None unless asked for.

    Raises:
        ValueError: shapes, devices or option values that do not fit.
        TypeError: unsupported or mixed dtypes.
    """
    hidden_TD, weight_VD, bias_V = _autocast(hidden_TD, weight_VD, bias_V)
    _check(hidden_TD, weight_VD, target_T, bias_V, temperature, softcap, active_index, workspace_mib)
    asked_for = {
        "return_entropy": return_entropy,
        "return_sum_prob_squared": return_sum_prob_squared,
        "return_top1": return_top1,
    }
    backend = _resolve_backend(backend, hidden_TD.device, vocab_group)
    if backend == "reference":
        _check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob(
            hidden_TD, weight_VD, target_T, bias_V=bias_V, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, ignore_index=ignore_index, **asked_for,
        )  # fmt: skip
    if workspace_mib is None:
        workspace_mib = 256 if hidden_TD.is_cuda else 64
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T = _local_targets(target_T, weight_VD, ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    needs_grad = _needs_grad(hidden_TD, weight_VD, bias_V)
    if backend == "triton" and not any(needs_grad):
        backend = "triton_fused"  # backward needs the logits of its own GEMM, or rounding errors do not cancel
    transform = (softcap or 0.0, logit_scale, backend)
    if needs_grad == [True, False, False] and not any(asked_for.values()) and vocab_group is None:
        logprob, _ = torch.ops.rlft_fast.linear_logprob_frozen(*inputs, *transform, workspace_mib)
        return LinearLogprob(logprob)
    group = "" if vocab_group is None else vocab_group.group_name
    logprob, *extras, _ = torch.ops.rlft_fast.linear_logprob(
        *inputs, *transform, group, workspace_mib, *asked_for.values()
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
        workspace_mib: see there; whole rows of logits must fit. None for 64 on the CPU; on a GPU for the
            dlogits of all rows, or as much as the float32 accumulator of dweight takes that is then not needed.

    Returns:
        ``LinearLogprobLoss(loss, logprob, entropy)``: the 0-d float32 sum over tokens, and detached (T,) statistics.

    Raises:
        ValueError: shapes, devices or option values that do not fit, or a ``loss_fn`` of the wrong output shape.
        TypeError: unsupported or mixed dtypes.
    """
    hidden_TD, weight_VD, bias_V = _autocast(hidden_TD, weight_VD, bias_V)
    _check(hidden_TD, weight_VD, target_T, bias_V, temperature, softcap, active_index, workspace_mib)
    for i, values in enumerate(per_token):
        if values.shape != target_T.shape or values.device != target_T.device:
            raise ValueError(
                f"per_token[{i}] must be a {tuple(target_T.shape)} tensor on {target_T.device} like target_T, "
                f"got {tuple(values.shape)} on {values.device}"
            )
    backend = _resolve_backend(backend, hidden_TD.device, vocab_group)
    if backend == "reference":
        _check_targets(target_T, weight_VD.shape[0], ignore_index)
        return reference.linear_logprob_loss(
            hidden_TD, weight_VD, target_T, loss_fn, *per_token, bias_V=bias_V, temperature=temperature,
            softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index, return_entropy=return_entropy,
        )  # fmt: skip
    if workspace_mib is None:
        workspace_mib = _loss_workspace_mib(hidden_TD, weight_VD)
    _check_row_fits(weight_VD, workspace_mib)
    active_index = _active_index(target_T, ignore_index, active_index)
    target_T = _local_targets(target_T, weight_VD, ignore_index, vocab_group)
    inputs = (hidden_TD, weight_VD, target_T, active_index, bias_V, _inverse(temperature, hidden_TD))
    group = "" if vocab_group is None else vocab_group.group_name
    options = (softcap or 0.0, logit_scale, backend, group, workspace_mib, return_entropy)
    needs_grad = _needs_grad(hidden_TD, weight_VD, bias_V)
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

_TRITON_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _needs_grad(*inputs: Tensor | None) -> list[bool]:
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def _loss_workspace_mib(hidden: Tensor, weight: Tensor) -> int:
    """On a GPU dlogits of all rows, or as many as take the memory of the accumulator that those of all rows spare."""
    if not hidden.is_cuda:
        return 64
    chunk_bytes = 4 * GPU_LOGIT_ROWS * weight.shape[0]
    grad_bytes = hidden.dtype.itemsize * hidden.shape[0] * weight.shape[0]
    return -(-(chunk_bytes + min(grad_bytes, 4 * weight.numel())) // 2**20)


def _check_row_fits(weight: Tensor, workspace_mib: int) -> None:
    row_bytes = 4 * weight.shape[0]
    if row_bytes > workspace_mib * 2**20:
        raise ValueError(
            f"workspace_mib={workspace_mib} cannot hold one row of logits ({weight.shape[0]} float32, {row_bytes} "
            f"bytes): pass at least {-(-row_bytes // 2**20)}"
        )


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
    if workspace_mib is not None and workspace_mib < 1:
        raise ValueError(f"workspace_mib must be at least 1, got {workspace_mib}")
    others = {"weight_VD": weight, "target_T": target, "bias_V": bias, "active_index": active_index}
    if isinstance(temperature, Tensor):
        others["temperature"] = temperature
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device} but hidden_TD is on {hidden.device}; move them together")


def _check_targets(target_T: Tensor, vocab: int, ignore_index: int) -> None:
    """On the CPU, where looking costs nothing; a device would have to be waited for."""
    if torch.compiler.is_compiling() or target_T.numel() == 0 or not _may_wait(target_T):
        return
    known = target_T.where(target_T != ignore_index, 0)
    if known.min() < 0 or known.max() >= vocab:
        row = int(((known < 0) | (known >= vocab)).nonzero()[0])
        raise ValueError(
            f"target_T[{row}] is {int(target_T[row])}, outside the vocabulary of {vocab} tokens and not "
            f"ignore_index={ignore_index}"
        )


def _may_wait(x: Tensor) -> bool:
    return x.device.type == "cpu" or (x.is_cuda and os.environ.get("RLFT_FAST_DEBUG") == "1")


def _local_targets(target_T: Tensor, weight_VD: Tensor, ignore_index: int, group: ProcessGroup | None) -> Tensor:
    """Targets as rows of this rank's weight, checked."""
    if group is None:
        _check_targets(target_T, weight_VD.shape[0], ignore_index)
        return target_T
    local_T, shapes = rebase_targets(target_T, weight_VD, group)
    if _may_wait(target_T):
        if (shapes[:, 1:] != shapes[0, 1:]).any():
            raise ValueError(
                f"the ranks of vocab_group disagree: their (V, D) shards and T are {shapes.tolist()} as [V, D, T]; all "
                "need the same hidden size and the same tokens"
            )
        _check_targets(target_T, int(shapes[:, 0].sum()), ignore_index)
    return local_T


def _resolve_backend(backend: str, device: torch.device, group: ProcessGroup | None) -> str:
    if backend not in ("auto", "native", "triton", "reference"):
        raise ValueError(f"backend must be 'auto', 'native', 'triton' or 'reference', got {backend!r}")
    has_native = device.type in ("cpu", "meta") or (device.type == "cuda" and has_cuda_kernels)
    if backend == "native" and not has_native:
        raise ValueError(
            f"linear_logprob has no compiled kernels for {device} in this install: build rlft_fast where nvcc is "
            "found, or use backend='auto'"
        )
    if backend == "triton" and not _has_triton(device):
        raise ValueError(
            f"backend='triton' needs the package triton and a CUDA device (or TRITON_INTERPRET=1), got {device}: "
            "use backend='auto'"
        )
    if backend == "auto":
        has_triton = device.type == "cuda" and _has_triton(device)
        backend = "native" if has_native else "triton" if has_triton else "reference"
    if backend == "reference" and group is not None:
        raise ValueError(
            f"a vocabulary sharded by vocab_group needs kernels; on {device} with backend={backend!r} the reference "
            "would run: gather the weight first"
        )
    return backend


def _has_triton(device: torch.device) -> bool:
    return _TRITON_INSTALLED and (device.type == "cuda" or _TRITON_INTERPRETED)


def _inverse(temperature: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(torch.float32).reciprocal()
    return torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=like.device)


def _active_index(target_T: Tensor, ignore_index: int, active_index: Tensor | None) -> Tensor:
    return active_index if active_index is not None else (target_T != ignore_index).nonzero().squeeze(-1)
