"""Loads the compiled extension. Importing this module is enough to register every operator of `torch.ops.rlft_fast`."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

if find_spec("rlft_fast._C") is None:
    raise ImportError(
        "rlft_fast._C is not built: run `pip install --no-build-isolation -e .` in the source tree "
        "(or `python setup.py build_ext --inplace`), with a C++20 compiler on PATH."
    )
import_module("rlft_fast._C")

# A CUDA torch without the CUDA half is a legitimate install (no nvcc where it was built): CPU tensors still work.
has_cuda_kernels = torch.version.cuda is not None and find_spec("rlft_fast._C_cuda") is not None
if has_cuda_kernels:
    import_module("rlft_fast._C_cuda")
# Whether this CPU runs multiply_rounded_.
has_rounded_gemm: bool = torch.ops.rlft_fast.has_rounded_gemm()


def check_dense(tensors: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that is no tensor, or a tensor without strides, which kernels cannot read."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"{name} is a {kind} tensor, expected a dense one, such as {name}.to_dense() of a sparse one"
            )


def check_device(device: torch.device) -> None:
    """Raises ValueError where `device` has no compiled kernels in this install.

    Args:
        device: device of the tensors that an operator is about to get.
    """
    if device.type == "cuda" and not has_cuda_kernels:
        raise ValueError(
            f"got tensors on {device}, but rlft_fast is here without its CUDA kernels: "
            "install the wheel of rlft_fast-cuda (RLFT_FAST_CUDA_ONLY=1 make wheel builds it), or install the CUDA "
            "toolkit (nvcc), then build rlft_fast again."
        )
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"got tensors on {device}, expected cpu or cuda: move them to one of those.")
