"""GEMMs that multiply and add in float32, whatever shortcuts torch's flags allow to the rest of the program.

fp32_precision (allow_tf32, torch.set_float32_matmul_precision)
    TF32 keeps 10 of the 23 bits of a float32 operand, so that logits are off by 3e-4. oneDNN's bfloat16, on CPUs
    that have it, keeps 7 bits.
allow_bf16_reduced_precision_reduction, allow_fp16_reduced_precision_reduction (on by default)
    Where cuBLAS cuts the summed dimension into parts, it rounds each part to the dtype of the result before it adds
    the parts. dhidden sums over the whole vocabulary, so cuBLAS has a reason to cut.
allow_fp16_accumulation
    cuBLAS sums in float16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor

__all__ = ["sums_in_float32"]


class _ExactFlags:
    """Holds flags of torch at their exact values while any thread is inside.

    Torch has one state for all threads. The first thread that comes in changes it, and the last thread that leaves puts
    it back; otherwise a thread could take the changed state for the one to put back.
    """

    def __init__(self, flags: Any, parent: Any, **exact: Any) -> None:
        """``flags`` takes fp32_precision from ``parent`` where it has none of its own."""
        self._flags, self._parent, self._exact = flags, parent, exact
        self._found: dict[str, Any] = {}
        self._lock, self._num_inside = RLock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._found = {name: self._read(name) for name in self._exact}
                self._write(self._exact)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._write(self._found)

    def _read(self, name: str) -> Any:
        value = getattr(self._flags, name)
        # An inherited value reads like an own one. Put back as an own one, it would no longer follow the parent.
        inherited = name == "fp32_precision" and value == self._parent.fp32_precision
        return "none" if inherited else value

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._flags, name, value)


_onednn: Any = torch.backends.mkldnn
_cpu = _onednn.matmul, _onednn
_cuda = torch.backends.cuda.matmul, torch.backends.cudnn  # cudnn.fp32_precision covers all operators on CUDA
_EXACT = {
    ("cpu", torch.float32): _ExactFlags(*_cpu, fp32_precision="ieee"),
    ("cuda", torch.float32): _ExactFlags(*_cuda, fp32_precision="ieee"),
    ("cuda", torch.bfloat16): _ExactFlags(*_cuda, allow_bf16_reduced_precision_reduction=False),
    ("cuda", torch.float16): _ExactFlags(
        *_cuda, allow_fp16_reduced_precision_reduction=False, allow_fp16_accumulation=False
    ),
}


def sums_in_float32(operand: Tensor) -> AbstractContextManager[None]:
    """A context in which GEMMs of such operands multiply all their bits and add in float32.

    Torch's flags belong to the process: while a thread is inside, GEMMs of other threads are as exact, and
    ``torch.backends.cuda.matmul.allow_tf32`` raises where the old functions had set it.
    """
    return _EXACT.get((operand.device.type, operand.dtype)) or nullcontext()
