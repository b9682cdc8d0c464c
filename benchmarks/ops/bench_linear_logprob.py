"""linear_logprob and linear_logprob_loss beside their peers and the bare GEMMs.

`suite` has every variant of every task. The report measures the variants at full size. The tests below time them at a
small size with pytest-benchmark, and check that all ways of a task agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from benchmarks.ops import ways
from benchmarks.ops.ways import DTYPE, OURS, Problem, Way
from benchmarks.support.harness import DEVICE, Results, Variant, clock, measured, reason

# T, D, V of SmolLM2-135M, and of Qwen3-8B
FULL_SHAPE = (2048, 576, 49152) if DEVICE.type == "cpu" else (8192, 4096, 151936)
SMALL_SHAPE = (256, 576, 49152)

# ---- tasks --------------------------------------------------------------------------------------------------------


def no_grad(way: Way, problem: Problem) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (way(problem.hidden_TD, problem.weight_VD, problem),)


def forward_backward(way: Way, problem: Problem) -> tuple[Tensor, ...]:
    logprob_T = way(problem.hidden_TD, problem.weight_VD, problem)
    return logprob_T, *torch.autograd.grad(logprob_T, (problem.hidden_TD, problem.weight_VD), problem.upstream_T)


def frozen(way: Way, problem: Problem) -> tuple[Tensor, ...]:
    logprob_T = way(problem.hidden_TD, problem.weight_VD.detach(), problem)
    return logprob_T, *torch.autograd.grad(logprob_T, problem.hidden_TD, problem.upstream_T)


def loss(way: Way, problem: Problem) -> tuple[Tensor, ...]:
    value = way(problem.hidden_TD, problem.weight_VD, problem)
    return value, *torch.autograd.grad(value, (problem.hidden_TD, problem.weight_VD))


Task = Callable[[Way, Problem], tuple[Tensor, ...]]
TASKS: dict[str, tuple[Task, dict[str, Callable[[], Way]]]] = {
    "no grad": (no_grad, ways.LOGPROB_WAYS),
    "entropy under a soft cap": (no_grad, ways.ENTROPY_WAYS),
    "forward + backward": (forward_backward, ways.TRAINING_WAYS),
    "frozen head": (frozen, ways.LOGPROB_WAYS),
    "PPO loss": (loss, ways.PPO_WAYS),
    "cross-entropy loss": (loss, ways.CROSS_ENTROPY_WAYS),
    "distillation loss": (loss, ways.DISTILLATION_WAYS),
}
# "half ignored" runs the ways that leave rows out. "flat logits" runs ours alone, to show that the data do not matter.
VARIATIONS: dict[str, tuple[Callable[[Problem, Problem], Problem], tuple[str, ...], tuple[str, ...]]] = {
    "half ignored": (
        lambda peaked, flat: ways.ignore_half(peaked),
        ("forward + backward", "PPO loss"),
        (OURS, "cut-cross-entropy"),
    ),
    "half of the gradient zero": (  # on a GPU the host does not know these rows, and all are multiplied
        lambda peaked, flat: ways.silence_half(peaked),
        ("forward + backward",),
        (OURS,),
    ),
    "bfloat16 over a float32 head": (  # TRL's default
        lambda peaked, flat: ways.narrow_hidden(peaked),
        ("forward + backward",),
        (OURS, "TRL chunked"),
    ),
    "flat logits": (lambda peaked, flat: flat, ("no grad", "forward + backward", "frozen head", "PPO loss"), (OURS,)),
}


def rows() -> Iterator[tuple[str, str, str | None]]:
    """(task, way, variation) of every variant."""
    for task, (_, loaders) in TASKS.items():
        yield from ((task, way, None) for way in loaders)
    for variation, (_, tasks, names) in VARIATIONS.items():
        yield from ((task, way, variation) for task in tasks for way in names)


def title(task: str, variation: str | None) -> str:
    return f"{task}, {variation}" if variation else task


def suite(shape: tuple[int, int, int]) -> tuple[list[Variant], dict[str, str]]:
    """Every variant that can be loaded, and for every other variant the reason by its name."""
    peaked, flat = (ways.make_problem(*shape, peaked=peaked) for peaked in (True, False))
    problems = {name: change(peaked, flat) for name, (change, _, _) in VARIATIONS.items()}
    variants, unavailable = [], {}
    for task, way, variation in rows():
        run, loaders = TASKS[task]
        variant = Variant(title(task, variation), way, lambda: None, peer=way not in (OURS, ways.KEEPING, ways.ROOMY))
        try:
            function = loaders[way]()
        except Exception as error:
            unavailable[variant.name] = reason(error)
            continue
        problem = problems[variation] if variation else peaked
        variants.append(replace(variant, run=partial(run, function, problem)))
    return variants, unavailable


# ---- floors: the GEMMs alone, into memory allocated before ----------------------------------------------------------

FLOORS = ("logits", "dX", "dW")


def floor_variants(shape: tuple[int, int, int], chunkings: dict[str, list[tuple[int, int]]]) -> list[Variant]:
    """The three GEMMs walked in chunks of (rows, columns) of the logits."""
    num_tokens, hidden_size, vocab = shape
    hidden, d_hidden = torch.randn(2, num_tokens, hidden_size, device=DEVICE).to(DTYPE)
    weight, d_weight = torch.randn(2, vocab, hidden_size, device=DEVICE).to(DTYPE)
    largest = max((min(r, num_tokens) * c for chunks in chunkings.values() for r, c in chunks), default=0)
    buffer = torch.randn(largest, device=DEVICE).to(DTYPE)

    def gemm(name: str, rows: int, columns: int) -> None:
        for r in range(0, num_tokens, rows):
            x, dx = hidden[r : r + rows], d_hidden[r : r + rows]
            for c in range(0, vocab, columns):
                w, dw = weight[c : c + columns], d_weight[c : c + columns]
                z = buffer[: len(x) * len(w)].view(len(x), len(w))
                if name == "logits":
                    torch.mm(x, w.T, out=z)
                elif name == "dX":
                    torch.addmm(dx, z, w, beta=min(c, 1), out=dx)
                else:
                    torch.addmm(dw, z.T, x, beta=min(r, 1), out=dw)

    return [
        Variant(f"floor {name}", f"{rows} x {columns}", partial(gemm, name, rows, columns))
        for name, chunks in chunkings.items()
        for rows, columns in chunks
    ]


def fastest_floors(shape: tuple[int, int, int]) -> tuple[list[Variant], Results]:
    """The two fastest chunkings of each GEMM, and the times of all chunkings.

    Two are kept because a short scan may err on a busy machine: the floor is the faster of the two in the measurement.
    """
    num_tokens, _, vocab = shape
    # All rows by tiles of columns, everything at once, and few rows at a time.
    columns = (1024, 2048, 4096) if DEVICE.type == "cpu" else (4096, 16384)
    few = 320 if DEVICE.type == "cpu" else 1024
    candidates = [*((num_tokens, c) for c in columns), (num_tokens, vocab), (few, vocab)]
    variants = floor_variants(shape, dict.fromkeys(FLOORS, candidates))
    scan = clock(variants, Results(), rounds=2)
    best = {}
    for name in FLOORS:
        fastest = list(scan.ways(f"floor {name}"))[:2]
        best[name] = [candidate for candidate in candidates if "{} x {}".format(*candidate) in fastest]
    return floor_variants(shape, best), scan


# ---- pytest-benchmark -----------------------------------------------------------------------------------------------


@cache
def _small_suite() -> tuple[dict[str, Variant], dict[str, str]]:
    variants, unavailable = suite(SMALL_SHAPE)
    return {variant.name: variant for variant in variants}, unavailable


@cache
def _expected(task: str) -> tuple[Tensor, ...]:
    return _small_suite()[0][f"{task} | {ways.EAGER}"].run()


@pytest.mark.parametrize(("task", "way", "variation"), list(rows()))
def test_linear_logprob(benchmark, task: str, way: str, variation: str | None) -> None:
    variants, unavailable = _small_suite()
    name = f"{title(task, variation)} | {way}"
    if name in unavailable:
        pytest.skip(unavailable[name])
    benchmark.group = title(task, variation)
    outputs = measured(benchmark, variants[name].run, rounds=2)
    if variation is None:
        for output, expected in zip(outputs, _expected(task), strict=True):
            assert (output - expected).norm() < (1e-4 if DEVICE.type == "cpu" else 2e-2) * expected.norm()


@pytest.mark.parametrize("name", FLOORS)
def test_floor(benchmark, name: str) -> None:
    benchmark.group = "floor"
    (variant,) = floor_variants(SMALL_SHAPE, {name: [(SMALL_SHAPE[0], 2048)]})
    measured(benchmark, variant.run, rounds=2)
