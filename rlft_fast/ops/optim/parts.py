"""What a step of AdamW takes of a parameter: this rank's tensors, in one memory order."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlft_fast.ops.optim.checks import check_parameter, local_part
from rlft_fast.ops.optim.eight_bits import CODES, MOMENTS, SCALES, row_numbers_of
from rlft_fast.ops.optim.memory_order import in_order_of


class Parts(NamedTuple):
    """This rank's tensors of one parameter, contiguous in one memory order; all but the gradient are views."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor
    """The parameter itself where it is float32 or float64."""
    step: Tensor
    exp_avg_scale: Tensor | None = None
    """Scales of moments that are codes, as `exp_avg_sq_scale`."""
    exp_avg_sq_scale: Tensor | None = None
    row_numbers: Tensor | None = None
    """Of codes, see `row_numbers_of`."""


STEPPED = Parts._fields[:6]  # the kernel takes them


def parts_of(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Parts:
    """The parts of a parameter. State in another memory order is copied into that of the parameter first."""
    parts = _local_parts(parameter, gradient, state)
    if all(getattr(parts, name).is_contiguous() for name in STEPPED):
        return parts
    check_parameter(parameter)
    _follow_layout(parameter, state)
    parts = _local_parts(parameter, gradient, state)
    tensors = {key: in_order_of(parts.parameter, getattr(parts, key)) for key in STEPPED if key != "step"}
    return parts._replace(**tensors)


def _local_parts(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Parts:
    master = state.get("master", parameter)
    first, second = CODES if CODES[0] in state else MOMENTS
    scale, scale_sq = map(state.get, SCALES)
    parts = Parts(parameter, gradient, state[first], state[second], master, state["step"], scale, scale_sq)
    if not isinstance(parameter, DTensor):
        return parts
    own = {name: local_part(x) for name, x in parts._asdict().items() if x is not None}
    return Parts(**own, row_numbers=None if scale is None else row_numbers_of(parameter))


def _follow_layout(parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Copies the state into the parameter's memory order.

    The orders differ where the state was loaded, or was made before the parameter became channels-last.
    """
    for key, tensor in state.items():
        if key != "step" and key not in SCALES and tensor.stride() != parameter.stride():
            state[key] = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
