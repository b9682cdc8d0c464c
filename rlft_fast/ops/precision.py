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

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from rlft_fast.ops import library

__all__ = [
    "bfloat16_speedup", "has_fast_bfloat16", "kernel_speedup", "rounding_speedup", "rounds_in_kernel",
    "sums_in_float32",
]  # fmt: skip

# How many times as fast bfloat16 must be. A Xeon with AMX rounds and multiplies float32 operands 2.6 to 3.2 times as
# fast, and 0.9 to 1.0 times with oneDNN held below AMX. An EPYC with AVX512-BF16 has 1.1, 2.1 with operands of
# bfloat16, and 1.8 to 2.0 by the project's own kernel (csrc/cpu/rounded_gemm.cpp).
_WORTHWHILE = 1.5


class _Flags:
    """Holds flags of torch at the strictest values that any thread inside asks for.

    Torch has one state for all threads. The first thread that comes in changes it, and the last thread that leaves puts
    it back; otherwise a thread could take the changed state for the one to put back.
    """

    def __init__(self, flags: Any, parent: Any, *values: Mapping[str, Any]) -> None:
        """``flags`` takes fp32_precision from ``parent`` where it has none of its own; the strictest values first."""
        self._flags, self._parent, self._values = flags, parent, values
        self._found: dict[str, Any] = {}
        self._lock, self._num_inside = RLock(), [0] * len(values)

    def change(self, rank: int, by: int) -> None:
        """One thread more, or less, asks for the values of this rank."""
        with self._lock:
            if not any(self._num_inside):
                self._found = {name: self._read(name) for name in self._values[rank]}
            self._num_inside[rank] += by
            asked = (values for values, num in zip(self._values, self._num_inside, strict=True) if num)
            for name, value in next(asked, self._found).items():
                setattr(self._flags, name, value)

    def _read(self, name: str) -> Any:
        value = getattr(self._flags, name)
        # An inherited value reads like an own one. Put back as an own one, it would no longer follow the parent.
        inherited = name == "fp32_precision" and value == self._parent.fp32_precision
        return "none" if inherited else value


class _Held:
    """A context in which flags have the values of a rank, or stricter ones."""

    def __init__(self, flags: _Flags, rank: int = 0) -> None:
        self._flags, self._rank = flags, rank

    def __enter__(self) -> None:
        self._flags.change(self._rank, 1)

    def __exit__(self, *_: object) -> None:
        self._flags.change(self._rank, -1)


_onednn: Any = torch.backends.mkldnn
_cpu = _Flags(_onednn.matmul, _onednn, {"fp32_precision": "ieee"}, {"fp32_precision": "bf16"})
_cuda = torch.backends.cuda.matmul, torch.backends.cudnn  # cudnn.fp32_precision covers all operators on CUDA
_ROUNDED = _Held(_cpu, 1)
_EXACT = {
    ("cpu", torch.float32): _Held(_cpu),
    ("cuda", torch.float32): _Held(_Flags(*_cuda, {"fp32_precision": "ieee"})),
    ("cuda", torch.bfloat16): _Held(_Flags(*_cuda, {"allow_bf16_reduced_precision_reduction": False})),
    ("cuda", torch.float16): _Held(
        _Flags(*_cuda, {"allow_fp16_reduced_precision_reduction": False, "allow_fp16_accumulation": False})
    ),
}


def sums_in_float32(operand: Tensor, rounded_to: torch.dtype | None = None) -> AbstractContextManager[None]:
    """A context in which GEMMs of such operands multiply all their bits, or those of a dtype, and add in float32.

    Torch's flags belong to the process: while a thread is inside, GEMMs of other threads are as exact, and
    ``torch.backends.cuda.matmul.allow_tf32`` raises where the old functions had set it.

    Args:
        operand: of the GEMMs.
        rounded_to: a narrower dtype to which float32 operands may be rounded, or to which they have been rounded. If it
            is bfloat16, CPUs that are fast at it multiply in it, and the result is still float32, as torch's GEMM of
            bfloat16 tensors cannot return it. Float32 GEMMs of other threads are then rounded, too, unless a thread is
            inside that asks for all bits of float32.
    """
    kind = (operand.device.type, operand.dtype)
    if kind == ("cpu", torch.float32) and rounded_to == torch.bfloat16 and rounding_speedup() >= _WORTHWHILE:
        return _ROUNDED
    return _EXACT.get(kind) or nullcontext()


def rounds_in_kernel(device_type: str, rounded_to: torch.dtype | None) -> bool:
    """Whether ``multiply_rounded_`` is the fastest way to multiply operands that may be rounded to this dtype.

    Args:
        device_type: where the operands are.
        rounded_to: see `sums_in_float32`.
    """
    is_meant = device_type == "cpu" and rounded_to == torch.bfloat16
    return is_meant and kernel_speedup() >= max(rounding_speedup(), _WORTHWHILE)


# ---- what a CPU multiplies fast --------------------------------------------------------------------------------------


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices much faster than float32 matrices (AMX, AVX512-BF16)."""
    return bfloat16_speedup() >= _WORTHWHILE


# Flags of the CPU do not tell: the vendor's library may lack the kernels, or be told not to use them. Without AMX,
# oneDNN's bfloat16 takes twice as long as MKL's float32 on a Xeon with AVX512-BF16.


@functools.cache
def bfloat16_speedup() -> float:
    """How many times as fast a GEMM of bfloat16 tensors is on this CPU as a GEMM of float32 tensors.

    Measured once per process, in a few ms; in a quarter of a second on a CPU that has no instructions for bfloat16.
    """
    return _beside(partial(_measured_speedup, partial(_multiply, _Held(_cpu)), torch.bfloat16))


@functools.cache
def rounding_speedup() -> float:
    """How many times as fast a GEMM of float32 tensors is on this CPU where the library may round them to bfloat16.

    Measured once per process, in a few ms. `sums_in_float32` takes this GEMM, whose result is float32.
    """
    return _beside(partial(_measured_speedup, partial(_multiply, _ROUNDED), torch.float32))


@functools.cache
def kernel_speedup() -> float:
    """How many times as fast ``multiply_rounded_`` is on this CPU as a GEMM of float32 tensors.

    Measured once per process, in a few ms; 0 on a CPU without AVX512-BF16. The project's own kernel does what
    `rounding_speedup` measures of the library.
    """
    if not library.has_rounded_gemm:
        return 0.0
    return _beside(partial(_measured_speedup, _multiply_in_kernel, torch.float32))


def _beside(function: Callable[[], float]) -> float:
    """Calls in a thread of its own, which has no autocast, and no mode that records calls."""
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(function).result()


def _measured_speedup(multiply: Callable[[Tensor, Tensor, Tensor], Any], dtype: torch.dtype) -> float:
    """On one thread, in its own seconds: whatever else runs on the machine hardly changes the quotient.

    Args:
        multiply: writes ``a @ b`` into ``out``, which is compared with an exact GEMM of float32.
        dtype: of its tensors.
    """
    exact = [torch.ones(size, dtype=torch.float32) for size in ((128, 576), (576, 576), (128, 576))]
    other = [matrix.to(dtype) for matrix in exact]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exactly = partial(_multiply, _Held(_cpu))
        seconds = [(_seconds(exactly, *exact), _seconds(multiply, *other)) for _ in range(8)]
    finally:
        torch.set_num_threads(num_threads)
    least = [*map(min, zip(*seconds, strict=True))]
    return least[0] / least[1]


def _seconds(multiply: Callable[[Tensor, Tensor, Tensor], Any], a: Tensor, b: Tensor, out: Tensor) -> float:
    started = time.thread_time()
    multiply(a, b, out)
    return time.thread_time() - started


def _multiply(way: _Held, a: Tensor, b: Tensor, out: Tensor) -> None:
    with way:
        torch.mm(a, b, out=out)


def _multiply_in_kernel(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.ops.rlft_fast.multiply_rounded_(a, b, out, False)
