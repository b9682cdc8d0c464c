"""Tensors travel as buffers: Ray hands arrays over without a pickle of their elements."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def send_tensors_as_buffers() -> None:
    """Lets Ray serialize this process's tensors as arrays. Receivers need no preparation."""
    import ray.util

    ray.util.register_serializer(Tensor, serializer=to_array, deserializer=from_array)


def to_array(tensor: Tensor) -> tuple[np.ndarray, torch.dtype]:
    """The elements on the CPU, as bytes where numpy has no such dtype."""
    tensor = tensor.detach().cpu().contiguous()
    dtype = tensor.dtype
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.uint8)
    return tensor.numpy(), dtype


def from_array(sent: tuple[Any, torch.dtype]) -> Tensor:
    """A tensor of its own: what Ray hands over lies in memory that must not be written."""
    array, dtype = sent
    return torch.from_numpy(np.array(array)).view(dtype)
