"""Checks of the arguments of `linear_logprob`, its loss and `support_logprob`.

Shapes: T packed tokens, A active ones, D hidden, V vocabulary.
"""

import math
import os
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from rlft_fast.ops.library import check_dense
from rlft_fast.ops.logprob.problem import Problem

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST = torch.finfo(torch.float32).tiny  # of the numbers that kernels divide by: its inverse is finite
_RANGE = f"from {_SMALLEST:.1e} to {1 / _SMALLEST:.1e}"


def check_tensors(**tensors: Any) -> None:
    """Raises TypeError if an argument is no dense tensor, and ValueError if it is a DTensor."""
    check_dense(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor with placements {tensor.placements}, expected a plain tensor. Under FSDP2 call "
                "the head as a module, such as rlft_fast.models.LogprobHead or a model after rlft_fast.patch_lm_head: "
                "its weight is whole inside. Elsewhere pass full_tensor(), or to_local() of a weight that is sharded "
                "over its rows, with vocab_group."
            )


def check_problem(problem: Problem, temperature: float | Tensor, **others: Tensor | None) -> None:
    """Raises ValueError or TypeError where the parts of a problem do not fit each other.

    Where other ranks hold rows of the weight, `check_shards` looks for ranks without rows: the other ranks would wait
    for a rank that raises here.

    Args:
        problem: as the user gave it: ``active_index`` may be None, and ``backend`` anything.
        temperature: that `inverse_temperature` took.
        **others: further tensors by name, which have to be on the same device.
    """
    hidden, weight, target, bias = problem.hidden_TD, problem.weight_VD, problem.target_T, problem.bias_V
    optional = {"bias_V": bias, "threshold_T": problem.threshold_T, "active_index": problem.active_index, **others}
    if isinstance(temperature, Tensor):
        optional["temperature"] = temperature
    tensors = {"hidden_TD": hidden, "weight_VD": weight, "target_T": target}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_number("ignore_index", problem.ignore_index, Integral)
    check_number("logit_scale", problem.scale)
    if not abs(problem.scale) < math.inf:
        raise ValueError(f"logit_scale must be finite, got {problem.scale}")
    check_tensors(**tensors)
    _check_shapes(problem)
    if problem.vocab == 0 and not problem.group:
        raise ValueError("weight_VD has no rows: the vocabulary must hold at least one token")
    _check_dtypes(hidden, weight, target, bias)
    for name, tensor in tensors.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device} but hidden_TD is on {hidden.device}; move them together")
    if isinstance(temperature, Tensor):
        _check_temperatures(temperature, target, problem.ignore_index)
    if problem.workspace_mib is not None:
        check_number("workspace_mib", problem.workspace_mib, Integral)
        if problem.workspace_mib < 1:
            raise ValueError(f"workspace_mib must be at least 1, got {problem.workspace_mib}")
    check_threshold(problem.threshold_T, target)
    check_active_index(problem.active_index, target, problem.ignore_index)


def inverse_temperature(temperature: float | Tensor, device: torch.device) -> Tensor:
    """1 / temperature in float32: of a tensor its own shape, which `check_problem` looks at, of a number (1,).

    Raises:
        ValueError: the number is none, or outside the range of float32.
    """
    if isinstance(temperature, Tensor):
        check_tensors(temperature=temperature)
        return temperature.detach().to(torch.float32).reciprocal()
    check_number("temperature", temperature)
    if not _SMALLEST <= temperature <= 1 / _SMALLEST:
        raise ValueError(
            f"temperature must be positive, {_RANGE}, got {temperature}; greedy decoding has no log-probabilities"
        )
    return torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=device)


def softcap_or_0(softcap: float | None) -> float:
    """The soft cap, or 0 for none.

    Raises:
        ValueError: the soft cap is no number, or outside the range of float32.
    """
    if softcap is None:
        return 0.0
    check_number("softcap", softcap)
    if not _SMALLEST <= softcap <= 1 / _SMALLEST:
        raise ValueError(f"softcap must be {_RANGE}, or None for no soft-capping; got {softcap}")
    return softcap


def check_adapter(hidden: Tensor, weight: Tensor, adapter: Tensor) -> None:
    """Raises TypeError or ValueError unless an adapter's columns fit beside a frozen weight's."""
    if not (adapter.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"adapter_VE and weight_VD must be floating point, got {adapter.dtype} and {weight.dtype}")
    if adapter.device != weight.device:
        raise ValueError(f"adapter_VE is on {adapter.device} but weight_VD is on {weight.device}; move them together")
    shapes = [tuple(x.shape) for x in (hidden, weight, adapter)]
    if any(len(shape) != 2 for shape in shapes) or shapes[1][0] != shapes[2][0] or not shapes[2][1]:
        raise ValueError(
            "expected hidden_TD (T, D), weight_VD (V, D - E) and adapter_VE (V, E) with at least one column, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if shapes[0][1] != shapes[1][1] + shapes[2][1]:
        raise ValueError(
            f"hidden_TD has {shapes[0][1]} columns, expected the {shapes[1][1]} of weight_VD and then the "
            f"{shapes[2][1]} of adapter_VE: append those that multiply the adapter, scale * hidden @ A.T of a low-rank "
            "adapter"
        )
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(
            "weight_VD needs a gradient, and adapter_VE goes with a frozen weight: freeze it by requires_grad_(False), "
            "or pass one weight, torch.cat([weight_VD, adapter_VE], dim=-1)"
        )


def check_number(name: str, value: Any, kind: type = Real) -> None:
    """Raises ValueError if a value is no number; with ``Integral``, no int."""
    symbolic = (torch.SymInt,) if kind is Integral else (torch.SymInt, torch.SymFloat)
    if not isinstance(value, (kind, *symbolic)):
        expected = "an int" if kind is Integral else "a number"
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_per_token(per_token: tuple[Any, ...], target_T: Tensor) -> None:
    """Raises TypeError for what is no tensor, and ValueError for a tensor that is not a row per token."""
    for i, values in enumerate(per_token):
        expected = f"per_token[{i}] must have {len(target_T)} rows, one per token, on {target_T.device} like target_T"
        if not isinstance(values, Tensor):
            raise TypeError(f"{expected}, got {type(values).__name__}")
        check_tensors(**{f"per_token[{i}]": values})
        if values.shape[:1] != target_T.shape or values.device != target_T.device:
            raise ValueError(f"{expected}, got {tuple(values.shape)} on {values.device}")


def check_ids(ids_TK: Any, problem: Problem) -> None:
    """Raises ValueError or TypeError unless there are ids of the vocabulary for each token."""
    check_tensors(ids_TK=ids_TK)
    target_T = problem.target_T
    if problem.group:
        raise ValueError("ids_TK does not go with vocab_group, whose ranks lack rows of the weight: leave one out")
    if ids_TK.dtype != torch.int64:
        raise TypeError(f"ids_TK must hold int64 vocabulary ids, got {ids_TK.dtype}")
    if ids_TK.dim() != 2 or ids_TK.shape[:1] != target_T.shape or ids_TK.device != target_T.device:
        raise ValueError(
            f"expected ids_TK ({len(target_T)}, K) on {target_T.device} like target_T, got {tuple(ids_TK.shape)} on "
            f"{ids_TK.device}"
        )
    if not ids_TK.numel() or not looks_at(ids_TK):
        return
    read = ids_TK[target_T != problem.ignore_index]
    if read.numel() and not (read.min() >= 0 and read.max() < problem.vocab):
        raise ValueError(
            f"ids_TK holds ids from {int(read.min())} to {int(read.max())}, outside the vocabulary of {problem.vocab} "
            "tokens"
        )


def check_losses(loss: Any, logprob: Tensor) -> None:
    """Raises ValueError unless ``loss_fn`` returned one loss per token, and TypeError unless it has a gradient."""
    got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    if got != tuple(logprob.shape):
        raise ValueError(
            f"loss_fn must return one loss per token, a {tuple(logprob.shape)} tensor; got {got}: do not reduce "
            "inside it"
        )
    if not loss.is_floating_point():
        raise TypeError(f"loss_fn must return floating-point losses, got {loss.dtype}, through which no gradient flows")


def check_no_tangent(*tensors: Tensor | None) -> None:
    """Raises ValueError in forward-mode differentiation, which would treat the result as a constant."""
    for tensor in () if torch.compiler.is_compiling() else tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"the {tuple(tensor.shape)} input carries a tangent, and the fused ops have no forward-mode "
                "derivative: use backward, or backend='reference'"
            )


def _check_shapes(problem: Problem) -> None:
    hidden, weight, target, bias = problem.hidden_TD, problem.weight_VD, problem.target_T, problem.bias_V
    is_alone = problem.adapter_VE is None  # else `check_adapter` has compared the columns
    if is_alone and (hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]):
        raise ValueError(
            f"expected hidden_TD (T, D) and weight_VD (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}; "
            "flatten batched hidden states to two dimensions"
        )
    if target.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected target_T of shape {tuple(hidden.shape[:1])} to match hidden_TD, got {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias_V of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")


def _check_dtypes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if target.dtype != torch.int64:
        raise TypeError(f"target_T must hold int64 vocabulary ids, got {target.dtype}")
    allowed = (*_DTYPES, torch.float64)
    if hidden.dtype not in allowed or weight.dtype not in allowed:
        raise TypeError(
            f"hidden_TD and weight_VD must be float32, bfloat16 or float16, got {hidden.dtype} and {weight.dtype}"
        )
    if weight.dtype == torch.float64 and hidden.dtype != torch.float64:
        raise TypeError(
            f"weight_VD is float64 but hidden_TD is {hidden.dtype}, which would be multiplied in its own dtype: pass "
            "hidden_TD in float64, or a float32 weight"
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias_V must be floating point, got {bias.dtype}")


def _check_temperatures(temperature: Tensor, target: Tensor, ignore_index: int) -> None:
    if temperature.shape != target.shape:
        raise ValueError(
            f"a temperature tensor must have one value per token {tuple(target.shape)}, got "
            f"{tuple(temperature.shape)}; one for all is a float"
        )
    if not looks_at(temperature):
        return
    good = ((temperature >= _SMALLEST) & (temperature <= 1 / _SMALLEST)) | (target == ignore_index)
    if not good.all():
        row = int(good.logical_not().nonzero()[0])
        raise ValueError(f"temperature must be positive, {_RANGE}, got {float(temperature[row])} in row {row}")


def check_shards(shapes: list[list[int]]) -> None:
    """Raises ValueError, on all ranks alike, where the shards do not form one vocabulary.

    Args:
        shapes: [V, D, T] of every rank, in rank order.
    """
    if any(shape[1:] != shapes[0][1:] for shape in shapes):
        raise ValueError(
            f"the ranks of vocab_group disagree: their (V, D) shards and T are {shapes} as [V, D, T]; all need the "
            "same hidden size and the same tokens"
        )
    if not all(vocab for vocab, *_ in shapes):
        raise ValueError(
            f"a rank of vocab_group has no rows of the weight: they hold {[vocab for vocab, *_ in shapes]}, and each "
            "needs at least one"
        )


def check_row_fits(vocab: int, workspace_mib: int) -> None:
    """Raises ValueError where one row of float32 logits is larger than the workspace."""
    row_bytes = 4 * vocab
    if row_bytes > workspace_mib * 2**20:
        raise ValueError(
            f"workspace_mib={workspace_mib} cannot hold one row of logits ({vocab} float32, {row_bytes} "
            f"bytes): pass at least {-(-row_bytes // 2**20)}"
        )


def check_targets(target_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Raises ValueError for a target outside the vocabulary, where `looks_at` allows to read the targets."""
    if target_T.numel() == 0 or not looks_at(target_T):
        return
    known = target_T.where(target_T != ignore_index, 0)
    if known.min() < 0 or known.max() >= vocab:
        row = int(((known < 0) | (known >= vocab)).nonzero()[0])
        raise ValueError(
            f"target_T[{row}] is {int(target_T[row])}, outside the vocabulary of {vocab} tokens and not "
            f"ignore_index={ignore_index}"
        )


def check_active_index(active_index: Tensor | None, target_T: Tensor, ignore_index: int) -> None:
    """Raises ValueError or TypeError unless the indices are the rows with a target."""
    if active_index is None:
        return
    if active_index.dtype != torch.int64:
        raise TypeError(f"active_index must hold int64 row numbers, got {active_index.dtype}")
    if active_index.dim() != 1:
        raise ValueError(f"active_index must have one dimension, got shape {tuple(active_index.shape)}")
    if looks_at(target_T) and not torch.equal(active_index, (target_T != ignore_index).nonzero().squeeze(-1)):
        raise ValueError(
            f"active_index does not match target_T: expected the {int((target_T != ignore_index).sum())} rows whose "
            f"target is not ignore_index={ignore_index}, ascending, got {len(active_index)} rows; leave it out to have "
            "them found"
        )


def check_threshold(threshold_T: Tensor | None, target_T: Tensor) -> None:
    """Raises ValueError or TypeError unless there is one threshold per token, or none at all."""
    if threshold_T is None:
        return
    if threshold_T.shape != target_T.shape:
        raise ValueError(
            f"threshold_T must have one value per token {tuple(target_T.shape)}, got {tuple(threshold_T.shape)}"
        )
    if not threshold_T.is_floating_point():
        raise TypeError(f"threshold_T must be floating point, in units of the logits; got {threshold_T.dtype}")


def looks_at(x: Tensor) -> bool:
    """Whether values are checked: on the CPU always, on a GPU, where the host would wait, with RLFT_FAST_DEBUG=1."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):  # there are no values
        return False
    return x.device.type == "cpu" or (x.is_cuda and os.environ.get("RLFT_FAST_DEBUG") == "1")
