"""linear_logprob and its loss on one thread and two, and in bfloat16, beside the bare GEMMs on as many threads (CPU).

A quarter of the rows of the full comparison is enough for GEMMs at full speed. Torch has no CPU GEMM from bfloat16 to
float32, so the ops multiply bfloat16 in float32, and both dtypes have the same floor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.ops import ways
from benchmarks.ops.bench_linear_logprob import FLOORS, TASKS, floor_variants
from benchmarks.ops.ways import OURS, Problem
from benchmarks.support.harness import NUM_THREADS, Variant

SHAPE = (512, 576, 49152)
THREADS = (1, NUM_THREADS)
TASKS_BY_DTYPE = {
    torch.float32: ("forward + backward", "PPO loss"),
    torch.bfloat16: ("no grad", "forward + backward", "frozen head", "PPO loss"),
}


def title(task: str, dtype: torch.dtype, threads: int) -> str:
    return f"{task}, {str(dtype).removeprefix('torch.')}, {threads} thread{'s' if threads > 1 else ''}"


def floor_title(name: str, threads: int) -> str:
    return f"floor {name}, {threads}"


def suite(shape: tuple[int, int, int] = SHAPE) -> list[Variant]:
    """Our ways by dtype and threads, and every GEMM of the floors in three chunkings by threads."""
    problem = ways.make_problem(*shape, peaked=True)
    variants = []
    for threads in THREADS:
        for dtype, tasks in TASKS_BY_DTYPE.items():
            for task in tasks:
                run, loaders = TASKS[task]
                once = partial(run, loaders[OURS](), _in_dtype(problem, dtype))
                variants.append(Variant(title(task, dtype, threads), OURS, partial(_on_threads, threads, once)))
        chunkings = {name: [(shape[0], columns) for columns in (1024, 2048, 4096)] for name in FLOORS}
        for floor in floor_variants(shape, chunkings):
            name = floor_title(floor.task.removeprefix("floor "), threads)
            variants.append(Variant(name, floor.way, partial(_on_threads, threads, floor.run)))
    return variants


def _in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (problem.hidden_TD, problem.weight_VD))
    return problem._replace(hidden_TD=hidden, weight_VD=weight)


def _on_threads(threads: int, run: Callable[[], object]) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)
