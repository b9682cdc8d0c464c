"""Which code computes: compiled kernels, Triton's kernels, or plain PyTorch; and how `auto` chooses.

Between compiled kernels and Triton's, measurements decide. `python -m benchmarks.ops.report --fastest FILE` writes them
into `fastest_backend.json` beside this file, one entry per device capability, dtype, kind of call and shape:

    {"device": "cuda 9.0", "dtype": "bfloat16", "kind": "no grad", "shape": [T, D, V],
     "milliseconds": {"native": ..., "triton": ...}}

The entry whose shape is nearest decides: least sum of |log(ratio)| of T, D and V. Where nothing was measured for a
device, dtype and kind, compiled kernels it is.
"""

import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlft_fast.ops.library import has_cuda_kernels

MEASUREMENTS = Path(__file__).with_name("fastest_backend.json")
KINDS = ("no grad", "forward + backward", "frozen head", "loss")
Shape = tuple[int, int, int]  # T, D, V
_CLEARLY = 0.97  # smaller differences are noise


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of measurements."""
    return json.loads(path.read_text(encoding="utf-8"))["measurements"]


_MEASURED = read_measurements(MEASUREMENTS)
_TRITON_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def resolve_backend(
    backend: str, device: torch.device, dtype: torch.dtype, kind: str, shape: Shape, sharded: bool
) -> str:
    """The backend that runs: "native", "triton" or "reference".

    Raises:
        ValueError: the backend is unknown, or this install, device or vocabulary sharding cannot have it.
        TypeError: float64 on a GPU, where only the reference has it.
    """
    if backend not in ("auto", "native", "triton", "reference"):
        raise ValueError(f"backend must be 'auto', 'native', 'triton' or 'reference', got {backend!r}")
    has_native = device.type in ("cpu", "meta") or (device.type == "cuda" and has_cuda_kernels)
    has_triton = _TRITON_INSTALLED and (device.type == "cuda" or _TRITON_INTERPRETED)
    if backend == "native" and not has_native:
        raise ValueError(
            f"linear_logprob has no compiled kernels for {device} in this install: build rlft_fast where nvcc is "
            "found, or use backend='auto'"
        )
    if backend == "triton" and not has_triton:
        raise ValueError(
            f"backend='triton' needs the package triton and a CUDA device (or TRITON_INTERPRET=1), got {device}: "
            "use backend='auto'"
        )
    if backend == "auto":
        backend = _automatic(has_native, has_triton, device, dtype, kind, shape)
    if backend == "reference" and sharded:
        raise ValueError(
            f"a vocabulary sharded by vocab_group needs kernels; on {device} with backend={backend!r} the reference "
            "would run: gather the weight first"
        )
    if dtype == torch.float64 and device.type == "cuda" and backend != "reference":
        raise TypeError("on a GPU float64 runs in plain PyTorch only: pass backend='reference', or float32 inputs")
    return backend


def _automatic(
    has_native: bool, has_triton: bool, device: torch.device, dtype: torch.dtype, kind: str, shape: Shape
) -> str:
    if device.type != "cuda":
        return "native" if has_native and dtype != torch.float64 else "reference"
    if dtype == torch.float64 or not (has_native or has_triton):
        return "reference"
    if has_native and has_triton:
        # A compiled graph serves any number of tokens, so there it must not decide.
        known = shape[1:] if torch.compiler.is_compiling() else shape
        return fastest(_MEASURED, device_name(device), dtype_name(dtype), kind, known) if _MEASURED else "native"
    return "native" if has_native else "triton"


# ---- measurements ---------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def device_name(device: torch.device) -> str:
    """As measurements are labelled: "cuda 9.0" for compute capability 9.0."""
    return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))


@torch.compiler.assume_constant_result
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fastest(measured: list[dict[str, Any]], device: str, dtype: str, kind: str, shape: Sequence[int]) -> str:
    """The backend that was fastest at the measured shape nearest to `shape`.

    Args:
        measured: entries, from `read_measurements`.
        device: `device_name`.
        dtype: `dtype_name`.
        kind: one of `KINDS`, or a kind that nothing measures.
        shape: (T, D, V) of the call, or (D, V).
    """
    best, least = "native", math.inf
    for entry in measured:  # nothing here that torch.compile could not trace
        if (entry["device"], entry["dtype"], entry["kind"]) == (device, dtype, kind):
            distance = _distance(entry["shape"][-len(shape) :], shape)
            if distance < least:
                times = entry["milliseconds"]
                best, least = "triton" if times["triton"] < _CLEARLY * times["native"] else "native", distance
    return best


def _distance(measured: Sequence[int], shape: Sequence[int]) -> float:
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(measured, shape, strict=True))
