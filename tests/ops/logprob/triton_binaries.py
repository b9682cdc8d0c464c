"""Compiles the Triton kernels for GPUs that this machine lacks, with the arguments of real calls.

`python -m tests.ops.logprob.triton_binaries 80 90` prints the resources of each binary for sm_80 and sm_90, one JSON
object a line. TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from rlft_fast.ops.logprob import triton as kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Bytes of shared memory that a block may have, by compute capability.
SHARED_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
BINARIES: list[tuple[str, object]] = []  # (kernel, binary) of all launches


class Driver:
    """The methods of a driver that Triton calls before a launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_instead_of_launch(kernel: JITFunction, grid: tuple[int, ...]):
    return lambda *args, **options: BINARIES.append(
        (kernel.__name__, kernel.run(*args, grid=grid, warmup=True, **options))
    )


def call_all(dtype: torch.dtype, everything: bool, dim: int) -> None:
    """Calls each wrapper once, with every option or with none."""
    rows, columns = 300, 4096
    logits, results = torch.zeros(rows, columns), torch.zeros(rows, columns, dtype=dtype)
    hidden, weight = torch.zeros(rows, dim, dtype=dtype), torch.zeros(columns, dim, dtype=dtype)
    target = torch.zeros(rows, dtype=torch.int64)
    maximum, sum_exp, a, b, target_logit, inv_temperature = torch.zeros(6, rows)
    shift, squares = (a, b) if everything else (None, None)
    options = (torch.zeros(columns) if everything else None, inv_temperature, 5.0 if everything else 0.0, 1.0)
    problem = (logits, target, 0, *options)
    sum_logits = torch.zeros(rows, dtype=torch.float64) if everything else None
    kernels.logprob_stats_(*problem, maximum, sum_exp, shift, squares, target_logit, sum_logits)
    kernels.logprob_grad_(*problem, maximum, sum_exp, shift, a, shift, results)
    kernels.logprob_frozen_(*problem, maximum, sum_exp, target_logit, a, b, torch.zeros(rows, 128), results)
    kernels.fused_stats(hidden, weight, target, inv_temperature, 1.0, everything, maximum, sum_exp, target_logit)
    kernels.fused_grad(hidden, weight, target, 0, inv_temperature, 1.0, maximum, sum_exp, shift, a, shift, results)
    if dtype == torch.bfloat16:  # the other dtype is for CPUs
        kernels.fused_odds(hidden, weight, target, inv_temperature, 1.0, everything, results)


def resources(binary) -> dict[str, int]:
    """Registers per thread, bytes of stack with local memory, bytes of shared memory per block, any use of TF32.

    And the machine's instructions for each exponential, see `instructions_per_exponential`.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        printed, sass = (
            subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", printed)}
    return {
        "registers": used["REG"], "stack": used["STACK"] + used["LOCAL"],
        "shared": used["SHARED"] + binary.metadata.shared, "tf32": "tf32" in binary.asm["ptx"],
        "instructions": instructions_per_exponential(sass),
    }  # fmt: skip


def instructions_per_exponential(sass: str) -> float | None:
    """Fewest of any stretch without a jump that has 32 exponentials or more; None if there is none.

    A tile of 128 x 256 logits has 128 for each of 256 threads, and loops over logits are unrolled.
    """
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    targets = set(re.findall(r"\bBRA\b.*\b0x([0-9a-f]+)", sass))
    stretches: list[list[str]] = [[]]
    for address, instruction in lines:
        if address.lstrip("0") in targets:
            stretches.append([])
        stretches[-1].append(instruction)
        if re.search(r"\b(BRA|EXIT)\b", instruction):
            stretches.append([])
    exponentials = [(len(x), sum("MUFU.EX2" in instruction for instruction in x)) for x in stretches]
    return min((count / found for count, found in exponentials if found >= 32), default=None)


if __name__ == "__main__":
    JITFunction.__getitem__ = compile_instead_of_launch
    for capability in map(int, sys.argv[1:]):
        driver.set_active(Driver(capability))
        kernels.is_hopper = lambda device, capability=capability: capability == 90
        limit = {"capability": capability, "shared_limit": SHARED_LIMITS[capability]}
        dims = (128, 100) if capability == 90 else (128,)  # where an uneven depth has another tile
        for dtype, everything, dim in product((torch.bfloat16, torch.float32), (False, True), dims):
            call_all(dtype, everything, dim)
            for kernel, binary in BINARIES:
                large = dtype == torch.bfloat16 and dim == 128 and capability == 90
                what = {"kernel": kernel, "dtype": str(dtype), "everything": everything, "dim": dim, "large": large}
                print(json.dumps({**limit, **what, **resources(binary)}))
            BINARIES.clear()
