"""Counts multiplications by the log of the vendor's library.

A dispatch mode of torch does not see the calls of a custom op, and Python does not see the calls of a compiled op. MKL
and oneDNN log each call from any thread. Triton's interpreter multiplies tiles by NumPy.
"""

import ctypes
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

requires_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="reads what MKL says of its calls")


def multiplications(function: Callable[[], object], device: str = "cpu") -> int:
    """M N K, summed over the GEMMs that the function calls on the device.

    On a GPU PyTorch's profiler counts: our compiled code calls no GEMM there. Triton's kernels cannot be counted there.
    """
    if device == "cuda":
        return profiled_multiplications(function)
    with _interpreted_dots() as dots:
        return _of_mkl(function) + sum(dots)


def _of_mkl(function: Callable[[], object]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls"
        mkl, onednn = torch.backends.mkl, torch.backends.mkldnn
        with _stdout_to(file), mkl.verbose(mkl.VERBOSE_ON), onednn.verbose(onednn.VERBOSE_ON):
            function()
        lines = file.read_text().splitlines()
    mkl_calls = [re.match(r"MKL_VERBOSE SGEMM\(\w,\w,(\d+),(\d+),(\d+),", line) for line in lines if "GEM" in line]
    # m x k : k x n
    onednn_calls = [re.search(r",(\d+)x(\d+):\2x(\d+),", line) for line in lines if re.search("exec.*matmul", line)]
    assert None not in mkl_calls + onednn_calls, f"not counted, one of {lines}"
    return sum(math.prod(map(int, call.groups())) for call in mkl_calls + onednn_calls)


@contextmanager
def _stdout_to(file: Path) -> Iterator[None]:
    """Redirects the output of Python and of C."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    flush(None)
    before = os.dup(1)
    try:
        with file.open("w") as opened:
            os.dup2(opened.fileno(), 1)
            yield
    finally:
        flush(None)
        os.dup2(before, 1)
        os.close(before)


@contextmanager
def _interpreted_dots() -> Iterator[list[int]]:
    """M N K of every product of two tiles, masked rows and columns included."""
    dots: list[int] = []
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield dots
        return
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def record(self, a, b, *rest):
        dots.append(math.prod(a.data.shape) * b.data.shape[-1])
        return create_dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", record)
        yield dots


def profiled_multiplications(function: Callable[[], object]) -> int:
    """M N K by PyTorch's profiler: on any device, with batched products, without GEMMs that compiled code calls."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        function()
    first = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0}  # position of the first operand
    products = 0
    for event in profiler.events():
        if event.name in first and not _is_inside(event, first):  # an emulated GPU's products run on the CPU
            a, b = event.input_shapes[first[event.name] :][:2]
            products += torch.Size(a).numel() * b[-1]
    return products


def _is_inside(event: Any, names: Container[str]) -> bool:
    """Whether an event of one of these names encloses the event."""
    while (event := event.cpu_parent) is not None:
        if event.name in names:
            return True
    return False
