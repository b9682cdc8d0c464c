"""Checks of what `FusedAdamW` is given: settings, gradients and state. None of them waits for a device in a step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from rlft_fast.ops.library import check_device
from rlft_fast.ops.optim.eight_bits import CODE_OF, CODES, MOMENTS, SCALES, is_coded
from rlft_fast.ops.optim.memory_order import overlaps

NARROW = (torch.float16, torch.bfloat16)
WIDE = {torch.float64: torch.float64} | dict.fromkeys(
    (torch.float32, *NARROW), torch.float32
)  # the dtype of the master
_NOT_OFFERED = ("amsgrad", "maximize", "differentiable")  # options of torch.optim.AdamW that would change the formula
_MOST_STEPS = 2**24  # at which adding 1 to a float32 stops changing it


def is_number_in(value: Any, end: float) -> bool:
    """Whether a value is a number in [0, end)."""
    if isinstance(value, str):
        return False
    try:
        return bool(0 <= value < end)
    except (TypeError, ValueError, RuntimeError):  # no number, several of them, or a complex one
        return False


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return f"{value!r:.60}"


def check_settings(group: dict[str, Any], waits: bool = True) -> None:
    """Raises ValueError for a setting out of range. Unless it ``waits``, a learning rate on a device is not read."""
    if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
        raise ValueError(f"a parameter group has no {', '.join(missing)}: this state dict is not AdamW's.")
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr has shape {tuple(lr.shape)}, expected a number: pass a float or a 0-d tensor.")
    is_read = waits or not isinstance(lr, Tensor) or lr.is_cpu
    if is_read and not is_number_in(lr, math.inf):
        raise ValueError(f"lr is {_shown(lr)}, expected a finite number, 0 or more.")
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(is_number_in(beta, 1) for beta in betas)):
        raise ValueError(f"betas are {_shown(betas)}, expected two numbers in [0, 1), such as (0.9, 0.999).")
    for key in ("eps", "weight_decay"):
        if not is_number_in(group[key], math.inf):
            raise ValueError(f"{key} is {_shown(group[key])}, expected a finite number, 0 or more.")
    check_offered(group)
    if not group.get("decoupled_weight_decay", True):
        raise ValueError(
            "decoupled_weight_decay is False: this is the state dict of Adam, whose weight decay is part of its "
            "gradient. Set weight_decay to 0 and decoupled_weight_decay to True in its groups, or use torch.optim.Adam."
        )


def check_offered(options: dict[str, Any]) -> None:
    if asked := [key for key in _NOT_OFFERED if options.get(key)]:
        raise ValueError(f"{asked[0]} is on, which FusedAdamW does not offer: turn it off, or use torch.optim.AdamW.")


def check_parameter(parameter: Tensor) -> None:
    name = f"a parameter of shape {tuple(parameter.shape)}"
    if parameter.dtype not in WIDE:
        raise TypeError(
            f"{name} is {parameter.dtype}, expected float64, float32, float16 or bfloat16: "
            "leave it to another optimizer."
        )
    local = local_part(parameter)
    if overlaps(local):
        raise ValueError(
            f"{name} has strides {local.stride()}, with which its elements share memory: make it contiguous()."
        )
    check_device(local.device)


def check_gradient(index: int, gradient: Tensor, parameter: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise ValueError(f"gradient {index} has layout {gradient.layout}, expected a dense one: use sparse=False.")
    if WIDE.get(gradient.dtype, gradient.dtype) != WIDE.get(parameter.dtype):
        expected = "float64" if parameter.dtype == torch.float64 else "float32, float16 or bfloat16"
        raise TypeError(f"gradient {index} is {gradient.dtype}, expected {expected} for a {parameter.dtype} parameter.")
    if isinstance(parameter, DTensor) or isinstance(gradient, DTensor):
        _check_placements(index, gradient, parameter)


def _check_placements(index: int, gradient: Tensor, parameter: Tensor) -> None:
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        names = type(gradient).__name__, type(parameter).__name__
        raise ValueError(f"gradient {index} is a {names[0]}, its parameter a {names[1]}: both or neither are DTensors.")
    if gradient.placements != parameter.placements or gradient.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"gradient {index} of shape {tuple(gradient.shape)} has placements {gradient.placements} on "
            f"{gradient.device_mesh}, its parameter {parameter.placements} on {parameter.device_mesh}: "
            "redistribute the gradient."
        )


def check_scalar(name: str, scalar: Tensor | None, device: torch.device) -> None:
    if scalar is None:
        return
    if not isinstance(scalar, Tensor) or scalar.dtype != torch.float32 or scalar.numel() != 1:
        got = f"{scalar.dtype} of shape {tuple(scalar.shape)}" if isinstance(scalar, Tensor) else repr(scalar)
        raise TypeError(f"{name} is {got}, expected a 0-d float32 tensor: take it from clip_coefficient.")
    if scalar.device != device:
        raise ValueError(f"{name} is on {scalar.device}, parameters are on {device}: pass {name}.to({str(device)!r}).")


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- state ---------------------------------------------------------------------------------------------------------


def state_dtypes(parameter: Tensor, moment_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of a parameter's moments, or of their codes and scales, and of the master of a narrow parameter."""
    wide = WIDE[parameter.dtype]
    if moment_dtype != torch.int8 or wide == torch.float64:
        dtypes = dict.fromkeys(MOMENTS, wide if wide == torch.float64 else moment_dtype)
    elif is_coded(parameter):
        codes = {key: CODE_OF[name].dtype for key, name in zip(CODES, MOMENTS, strict=True)}
        dtypes = codes | dict.fromkeys(SCALES, torch.float32)
    else:
        dtypes = dict.fromkeys(MOMENTS, torch.float32)
    return dtypes | {"master": wide} if parameter.dtype in NARROW else dtypes


def check_state(
    parameter: Tensor, state: dict[str, Any], dtypes: dict[str, torch.dtype], *, offloads_moments: bool = False
) -> None:
    """Raises TypeError or ValueError for state that no step of this parameter has left."""
    if CODES[0] in state and CODES[0] not in dtypes and MOMENTS[0] not in state:
        raise ValueError(
            f"the moments of a parameter of shape {tuple(parameter.shape)} are codes of its rows, but it has strides "
            f"{local_part(parameter).stride()} now: make it contiguous()."
        )
    for key, dtype in dtypes.items():
        tensor = state.get(key)
        check_moment(key, tensor, parameter)
        assert isinstance(tensor, Tensor)
        device = torch.device("cpu") if offloads_moments and key != "master" else parameter.device
        if (tensor.dtype, local_part(tensor).device) != (dtype, device):
            raise TypeError(
                f"{key} is {tensor.dtype} on {local_part(tensor).device}, expected {dtype} on {device}: "
                "load the state by load_state_dict, which converts it."
            )
    step = state.get("step")
    if not isinstance(step, Tensor) or step.numel() != 1 or step.dtype != torch.float32:
        got = f"{step.dtype} of shape {tuple(step.shape)}" if isinstance(step, Tensor) else _shown(step)
        raise TypeError(f"step is {got}, expected a 0-d float32 tensor: load the state by load_state_dict.")
    if step.device != parameter.device:
        raise ValueError(f"step is on {step.device}, its parameter on {parameter.device}: move them together.")
    if step.is_cpu:
        check_count(step)


def check_moment(key: str, tensor: Any, parameter: Tensor) -> None:
    """Raises TypeError or ValueError unless a moment, its codes or a master is a dense tensor as its parameter.

    Scales have one number for each row of the parameter.
    """
    expected = (*parameter.shape[:-1], 1) if key in SCALES else tuple(parameter.shape)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{key} is a {type(tensor).__name__}, expected a tensor of shape {expected}.")
    if tensor.layout != torch.strided or not (tensor.is_floating_point() or key in CODES):
        raise TypeError(f"{key} is {tensor.dtype} of layout {tensor.layout}, expected dense floating-point numbers.")
    if tuple(tensor.shape) != expected:
        of_rows = " and rows" if key in SCALES else ""
        raise ValueError(f"{key} has shape {tuple(tensor.shape)}, its parameter{of_rows} {expected}.")
    if isinstance(tensor, DTensor) != isinstance(parameter, DTensor):
        raise ValueError(
            f"{key} is a {type(tensor).__name__}, its parameter a {type(parameter).__name__}: "
            "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )


def check_count(step: Any) -> None:
    """Raises ValueError unless a step count is one that adding 1 in float32 reaches. Waits for the count's device."""
    if isinstance(step, FakeTensor) or (isinstance(step, Tensor) and step.is_meta):  # there is no value
        return
    if not is_number_in(step, _MOST_STEPS + 1) or step != int(step):
        raise ValueError(f"step is {_shown(step)}, expected a count of steps, a whole number from 0 to {_MOST_STEPS}.")
