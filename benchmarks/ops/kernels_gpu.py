"""`python -m benchmarks.ops.kernels_gpu WHAT`: a GPU's limits, and how near each kernel comes.

    limits    TB/s of a copy, TFLOPS of the vendor's GEMMs at the head's shapes, TB/s of our kernels
    epilogues Triton's GEMMs of logits with their epilogues, beside the vendor's GEMM
    sweep     the loss and the backward pass of the head by rows of a chunk, columns of a tile, and workspace
    once      each kernel of the head once, for a profiler

Results are written after every task, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import ways
from benchmarks.ops.bench_linear_logprob import FULL_SHAPE, forward_backward, loss
from benchmarks.ops.problems import make_inputs
from benchmarks.ops.ways import DTYPE
from benchmarks.support.document import table
from benchmarks.support.harness import COPY, DEVICE, Results, Variant, clock, copy_of, environment
from rlft_fast.ops import FusedAdamW, grad_norm, linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import tiles, workspace
from rlft_fast.ops.logprob import triton as triton_kernels

NUM_ELEMENTS = 2**30  # of a copy, and of parameters
TILE_ROWS = (512, 1024, 2048)
CHUNK_ROWS, TILE_COLUMNS, WORKSPACE_MIB = (256, 512, 1024, 2048), (8192, 16384, 32768), (256, 512, 2048)
Task = tuple[str, dict[str, tuple[Callable[[], object], float]]]  # ways, each with the units of work of a run


# ---- limits ---------------------------------------------------------------------------------------------------------


def bandwidth_tasks(dim: int, vocab: int) -> Iterator[Task]:
    """A copy and each kernel, with the terabytes that a run moves."""
    source = torch.zeros(NUM_ELEMENTS, device=DEVICE)
    yield f"{COPY}, TB/s", {"float32": (copy_of(source), 8e-12 * NUM_ELEMENTS)}
    for rows in (TILE_ROWS[0], TILE_ROWS[-1]):
        for columns in (min(tiles.GPU_TILE_COLUMNS, vocab // 2), vocab):
            kernels = dict(kernel_runs(rows, dim, columns))
            found = {way: (run, 1e-12 * num_bytes) for way, (run, num_bytes) in kernels.items()}
            yield f"{rows} x {columns} logits, TB/s", found
    parameters = [torch.nn.Parameter(torch.zeros(NUM_ELEMENTS // 16, device=DEVICE)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    elements = sum(parameter.numel() for parameter in parameters)
    optimizer = FusedAdamW(parameters)
    yield (
        "parameters, TB/s",
        {
            "norm": (partial(grad_norm, parameters), 4e-12 * elements),
            "AdamW": (optimizer.step, 28e-12 * elements),
        },
    )


def kernel_runs(rows: int, dim: int, columns: int) -> Iterator[tuple[str, tuple[Callable[[], object], int]]]:
    """The kernels between the GEMMs of the head, on one tile of logits, with the bytes that they move."""
    logits = torch.randn(rows, columns, device=DEVICE)
    target = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    per_row = torch.ones(8, rows, device=DEVICE)
    accumulator, narrow = torch.zeros(rows, dim, device=DEVICE), torch.empty_like(logits, dtype=DTYPE)
    problem = (logits, target, 0, None, torch.ones(1, device=DEVICE), 0.0, 1.0)
    maximum, log_sum, upstream, *sums = per_row
    numel, beside = logits.numel(), accumulator.nbytes
    for backend, kernels in (("native", torch.ops.rlft_fast), ("triton", triton_kernels)):
        yield f"stats, {backend}", (
            partial(kernels.logprob_stats_, *problem, maximum, sums[0], None, None, sums[1]), 4 * numel
        )  # fmt: skip
        yield f"gradient, {backend}", (
            partial(kernels.logprob_grad_, *problem, maximum, log_sum, None, upstream, None, narrow), 6 * numel
        )  # fmt: skip
        frozen = partial(kernels.logprob_frozen_, *problem, maximum, *sums[:4], accumulator, narrow)
        yield f"frozen, {backend}", (frozen, 6 * numel + 2 * beside)


def gemm_tasks(dim: int, vocab: int) -> Iterator[Task]:
    """The three GEMMs of the head by rows, written in bfloat16 and in float32, with their teraflops."""
    weight = torch.randn(vocab, dim, device=DEVICE).to(DTYPE)
    for rows in TILE_ROWS:
        hidden = torch.randn(rows, dim, device=DEVICE).to(DTYPE)
        logits = torch.randn(rows, vocab, device=DEVICE).to(DTYPE)
        found = {}
        for name, (a, b) in {
            "logits": (hidden, weight.T), "dX": (logits, weight), "dW": (logits.T, hidden),
        }.items():  # fmt: skip
            for dtype in (DTYPE, torch.float32):
                out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=DEVICE)
                found[f"{name} in {dtype}".replace("torch.", "")] = (
                    partial(tiles.multiply, a, b, out), 2e-12 * rows * dim * vocab
                )  # fmt: skip
        yield f"{rows} x {dim} x {vocab}, TFLOPS", found


# ---- epilogues -------------------------------------------------------------------------------------------------------


def epilogue_tasks(num_tokens: int, dim: int, vocab: int) -> Iterator[Task]:
    """Milliseconds of the statistics of all tokens, and of the odds of a chunk, each beside its bare GEMM.

    In the last way of the statistics every block of rows has an unlikely target, so that all rows are computed twice.
    """
    likely, *others = make_inputs(num_tokens, dim, vocab, logits="peaked", dtype=DTYPE, device=DEVICE)[:3]
    unlikely = likely.clone()
    unlikely[::64] *= -100
    per_row = torch.ones(3, num_tokens, device=DEVICE)
    weight, target = others
    floor = torch.empty(num_tokens, -(-vocab // 16), dtype=DTYPE, device=DEVICE)

    def gemm() -> None:
        for part in weight.tensor_split(16):
            tiles.multiply(likely, part.T, floor[:, : len(part)])

    def statistics(hidden: Tensor, needs_maximum: bool) -> tuple[Callable[[], object], float]:
        arguments = (hidden, weight, target, torch.ones(1, device=DEVICE), 1.0, needs_maximum, *per_row)
        return partial(triton_kernels.fused_stats, *arguments), 1.0

    yield (
        f"statistics of {num_tokens} x {dim} x {vocab}, ms",
        {
            "bare GEMM": (gemm, 1.0),
            "against the target's logit": statistics(likely, False),
            "with a running maximum": statistics(likely, True),
            "against the target's logit, and again": statistics(unlikely, False),
        },
    )
    rows = min(num_tokens, 4096)
    odds = torch.empty(rows, tiles.padded_columns(vocab), dtype=DTYPE, device=DEVICE)[:, :vocab]
    problem = (likely[:rows], weight, target[:rows], torch.ones(1, device=DEVICE), 1.0)
    yield (
        f"odds of {rows} x {dim} x {vocab}, ms",
        {
            "bare GEMM": (partial(tiles.multiply, likely[:rows], weight.T, odds), 1.0),
            "odds": (partial(triton_kernels.fused_odds, *problem, False, odds), 1.0),
            "odds and entropy": (partial(triton_kernels.fused_odds, *problem, True, odds), 1.0),
        },
    )


# ---- sweep ----------------------------------------------------------------------------------------------------------


def sweep_tasks(shape: tuple[int, int, int]) -> Iterator[Task]:
    """Milliseconds by setting; the first way is the default setting."""
    problem = ways.make_problem(*shape, peaked=True)
    index = torch.arange(shape[0], device=DEVICE)

    def ppo(hidden: Tensor, weight: Tensor, problem: ways.Problem, **options: Any) -> Tensor:
        per_token = (problem.old_logprob_T, problem.advantage_T)
        options |= {"active_index": index}
        return linear_logprob_loss(hidden, weight, problem.target_T, ways.ppo_clip, *per_token, **options).loss

    def logprob(hidden: Tensor, weight: Tensor, problem: ways.Problem, **options: Any) -> Tensor:
        return linear_logprob(hidden, weight, problem.target_T, active_index=index, **options).logprob

    settings = [{}, *({"workspace_mib": mib} for mib in WORKSPACE_MIB)]
    for name, run, way in (("PPO loss", loss, ppo), ("forward + backward", forward_backward, logprob)):
        found = {"as it is": (partial(run, way, problem), 1.0)}
        for backend, options in product(ways.COMPARED_BACKENDS, settings):
            for rows, columns in [(None, None), *((r, None) for r in CHUNK_ROWS), *((None, c) for c in TILE_COLUMNS)]:
                options = options | {"backend": backend}
                label = ", ".join(f"{k} {v}" for k, v in (options | {"rows": rows, "columns": columns}).items() if v)
                found[label] = (
                    partial(_with_tiles, rows, columns, partial(run, partial(way, **options), problem)),
                    1.0,
                )
        yield f"{name}, ms", found


def _with_tiles(rows: int | None, columns: int | None, run: Callable[[], object]) -> object:
    with ExitStack() as stack:
        if rows is not None:
            stack.enter_context(_set(workspace, "gpu_logit_rows", lambda dim: rows))
        if columns is not None:
            stack.enter_context(_set(tiles, "GPU_TILE_COLUMNS", columns))
        return run()


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


# ---- writing --------------------------------------------------------------------------------------------------------


def measure(tasks: Iterator[Task], rounds: int, path: Path, title: str) -> None:
    """Measures one task after the other, and after each writes all results so far to PATH.json and PATH.md."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, runs in tasks:
        variants = [Variant(task, way, run, peer=True) for way, (run, _) in runs.items()]
        clock(variants, Results(), rounds=1)  # warms up
        results = clock(variants, Results(), rounds)
        found[task] = {
            way: {"seconds": m.median_s, "iqr": m.iqr_s, "rate": runs[way][1] / m.median_s}
            for way, m in results.ways(task).items()
        }
        is_time = task.endswith("ms")
        rows = [(way, f"{1e3 * m['seconds'] if is_time else m['rate']:.4g}") for way, m in found[task].items()]
        rows += [(name.split(" | ")[1], why) for name, why in results.unavailable.items()]
        print(table((task, "ms" if is_time else "rate"), rows), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = {"environment": environment(), "title": title, "tasks": found, "unavailable": results.unavailable}
        path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["limits", "epilogues", "sweep", "once"])
    parser.add_argument("--shape", type=int, nargs=3, default=FULL_SHAPE, metavar=("T", "D", "V"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    shape = tuple(args.shape)
    name = f"gpu-{args.what}-{'x'.join(map(str, shape))}"
    if args.what == "limits":
        tasks = (task for part in (bandwidth_tasks, gemm_tasks) for task in part(*shape[1:]))
        measure(tasks, args.rounds, args.output / name, f"Limits at {shape}")
    elif args.what == "epilogues":
        measure(epilogue_tasks(*shape), args.rounds, args.output / name, f"Epilogues at {shape}")
    elif args.what == "sweep":
        measure(sweep_tasks(shape), args.rounds, args.output / name, f"Sweep at {shape}")
    else:
        for run, _ in dict(kernel_runs(TILE_ROWS[0], shape[1], shape[2])).values():
            run()


if __name__ == "__main__":
    main()
