"""`python -m benchmarks.ops.report`: measures every op, compares it with the bars, and writes results/NAME.*."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.ops import (
    bench_adamw,
    bench_grad_norm,
    bench_linear_logprob,
    bench_packing,
    bench_planning,
    fastest,
    scaling,
)
from benchmarks.ops.bench_linear_logprob import FLOORS, FULL_SHAPE, TASKS
from benchmarks.ops.plot import save_plot
from benchmarks.ops.ways import DTYPE, EAGER, OURS, ROOMY
from benchmarks.support.document import Bar, bar_table, fill, table, versions, write_files
from benchmarks.support.harness import (
    COPY,
    DEVICE,
    NUM_THREADS,
    Measurement,
    Results,
    Variant,
    clock,
    environment,
    weigh,
)
from rlft_fast.ops.backends import device_name, dtype_name

RESULTS = Path(__file__).parents[1] / "results"
MAX_EXTRA_MIB = 96

METHOD = """\
All variants run in one process on {threads} threads, interleaved: every round runs each variant once ({rounds} rounds;
peers take part in {peer_rounds} rounds){by_task}. A time is the median, and ± is the interquartile range (the full
range of fewer than four samples). Caches are cold. {device_method} Extra memory is the peak of a variant's second run,
less the memory allocated before the run, less the outputs (log-probabilities, loss, dX and dW). The floor of a task is
the sum of its bare GEMMs. Each GEMM runs in its fastest chunks, into memory allocated before. `no grad` and `entropy
under a soft cap` have one GEMM, the logits. `forward + backward` has the logits twice, dX and dW, although ways that
keep the logits multiply them once. `frozen head` has logits and dX. The losses have logits, dX and dW.

Hidden states, weights and the upstream gradient are random. Logits are peaked (the target holds most of the
probability), except where they are called flat. Our ops are given the indices of the rows that count. On the CPU,
threads and bfloat16 are compared at a quarter of the rows. Each is compared with the bare float32 GEMMs on as many
threads, because bfloat16 is multiplied in float32 there. `pytest benchmarks` checks that all ways of a task compute
the same numbers. Packing and the norm are compared with a copy of as many bytes, and clipping and AdamW with torch's
`clip_grad_norm_` and fused `AdamW`."""

DEVICE_METHOD = {
    "cpu": "Times are taken in recycled memory: malloc hands out memory freed before, because page faults would "
    "measure the system. Memory is the peak of the resident set in fresh memory (`VmHWM`, reset before each run).",
    "cuda": "Times are measured on the device by events, while the host is ahead. Inputs are bfloat16, and the bare "
    "GEMMs write bfloat16. Memory is counted by torch's allocator.",
}

# How many GEMMs of each kind (logits, dX, dW) make the floor of a task; below, the bars on time / floor.
FLOOR_COUNTS: dict[str, tuple[int, int, int]] = {
    "no grad": (1, 0, 0),
    "entropy under a soft cap": (1, 0, 0),
    "forward + backward": (2, 1, 1),
    "frozen head": (1, 1, 0),
    "PPO loss": (1, 1, 1),
    "cross-entropy loss": (1, 1, 1),
    "distillation loss": (1, 1, 1),
}
MAX_RATIO = {"no grad": 1.12} if DEVICE.type == "cpu" else {"no grad": 1.10, "forward + backward": 1.12}
MAX_RATIO |= {"distillation loss": 1.35}  # with the products of 64 ids
DEFAULT_MAX_RATIO = 1.15
SMALL_DIM, SMALL_DIM_MAX_RATIO = 1536, 1.35  # there, GPU GEMMs are so fast that the work between them decides
SMALL_SUITES = [bench_packing.suite, bench_grad_norm.suite, bench_adamw.suite]
SMALL_ROUNDS = 21 if DEVICE.type == "cpu" else 9  # times of a few milliseconds spread more
if DEVICE.type == "cpu":
    SMALL_SUITES.append(bench_planning.suite)  # the host's work, on any machine


# ---- measuring ------------------------------------------------------------------------------------------------------


def run_linear_logprob(
    shape: tuple[int, int, int], rounds: int, peer_rounds: int, deadline: float
) -> Iterator[tuple[Results, Results]]:
    """Yields, after each group of variants, all results so far and the scan for the floors' chunks."""
    variants, unavailable = bench_linear_logprob.suite(shape)
    results, floors, scan = Results(unavailable=unavailable), [], Results()
    for group in groups(variants):
        if floors and time.monotonic() > deadline:
            print(f"out of time before {group[0].name}", flush=True)
            break
        weigh(group, results)
        if not floors:
            floors, scan = bench_linear_logprob.fastest_floors(shape)
        clock([*floors, *group], results, rounds, peer_rounds, deadline)
        yield results, scan


def groups(variants: list[Variant]) -> list[list[Variant]]:
    """The groups of variants that are interleaved: on a CPU one group; on a GPU one group per task.

    On a GPU, a group of peers beside ours follows after our ways of all tasks. A run that ends early has then measured
    the most telling part.
    """
    if DEVICE.type == "cpu":
        return [variants]
    by_task: dict[str, list[Variant]] = {}
    for variant in variants:
        by_task.setdefault(variant.task, []).append(variant)
    ours = [[v for v in ways if v.way.startswith((OURS, EAGER))] for ways in by_task.values()]
    peers = [[v for v in ways if v.way == OURS or not v.way.startswith((OURS, EAGER))] for ways in by_task.values()]
    return ours + [group for group in peers if len(group) > 1]


def floor_s(results: Results, task: str, title: Callable[[str], str] = "floor {}".format) -> float:
    """Seconds of a task's bare GEMMs in their fastest chunks. `title` gives the name of a GEMM in the results."""
    gemms = [next(iter(results.ways(title(name)).values())).median_s for name in FLOORS]
    return sum(count * seconds for count, seconds in zip(FLOOR_COUNTS[task], gemms, strict=True))


# ---- bars -----------------------------------------------------------------------------------------------------------


def linear_logprob_bars(results: Results, shape: tuple[int, int, int]) -> Iterator[Bar]:
    limits = MAX_RATIO
    if DEVICE.type == "cuda" and shape[1] <= SMALL_DIM:
        limits = dict.fromkeys(TASKS, SMALL_DIM_MAX_RATIO)
    for task in TASKS:
        for case in (task, f"{task}, flat logits"):
            if ours := results.ways(case).get(OURS):
                ratio = ours.median_s / floor_s(results, task)
                yield Bar(f"{case}: time / floor", ratio, limits.get(task, DEFAULT_MAX_RATIO))
    for task in ("PPO loss", "cross-entropy loss", "distillation loss"):
        ways = results.ways(task)
        if peers := [(name, m) for name, m in ways.items() if not name.startswith(OURS)]:
            name, peer = peers[0]
            outer = inputs_outputs_mib(shape)
            for way in (OURS, ROOMY):
                if ours := ways.get(way):
                    memory = (outer + ours.extra_mib) / (outer + peer.extra_mib)
                    yield Bar(f"{task}: fastest peer ({name}) / {way}", peer.median_s / ours.median_s, 1, at_most=False)
                    yield Bar(f"{task}: memory in all of {way} / that peer's", memory, 1)
    for task in ("forward + backward", "PPO loss"):
        half, full = (results.ways(case).get(OURS) for case in (f"{task}, half ignored", task))
        if half and full:
            yield Bar(f"{task}: half ignored / all", half.median_s / full.median_s, 0.55)
    if DEVICE.type == "cuda":
        yield from gpu_bars(results, shape)
        return
    largest = max((m.extra_mib, name) for name, m in results.measured.items() if name.endswith(f"| {OURS}"))
    yield Bar(f"largest extra memory ({largest[1].split(' | ')[0]})", largest[0], MAX_EXTRA_MIB, unit=" MiB")


def gpu_bars(results: Results, shape: tuple[int, int, int]) -> Iterator[Bar]:
    ours = results.ways("PPO loss").get(OURS)
    if ours and shape == bench_linear_logprob.FULL_SHAPE:
        yield Bar("PPO loss", 1e3 * ours.median_s, 60, unit=" ms")
        memory_gib = (inputs_outputs_mib(shape) + ours.extra_mib) / 1024
        yield Bar("PPO loss: memory in all", memory_gib, 6, unit=" GiB")


def inputs_outputs_mib(shape: tuple[int, int, int]) -> float:
    """MiB of a loss's inputs and outputs: hidden states, weight, and the gradients of both."""
    num_tokens, dim, vocab = shape
    return 2 * DTYPE.itemsize * dim * (num_tokens + vocab) / 2**20


def bandwidth_bars(results: Results) -> Iterator[Bar]:
    tasks, least = bench_packing.OPERATORS, 0.7
    if DEVICE.type == "cuda":
        tasks, least = (*bench_packing.OPERATORS, bench_grad_norm.TASK), 0.85
    for task in tasks:
        if not (ways := results.ways(task)):
            continue
        share = ways[COPY].median_s / ways[OURS].median_s
        yield Bar(f"{task}: share of memcpy's bandwidth", share, least, at_most=False)


def planning_bars(results: Results) -> Iterator[Bar]:
    if not results.ways("plan"):
        return
    slowest = max(m.median_s for m in results.ways("plan").values())
    yield Bar("plan of 100,000 sequences", slowest, bench_planning.MAX_SECONDS, unit=" s")
    qualities = [bench_planning.reported_quality(cost) for cost in (bench_planning.TOKENS, bench_planning.QWEN3_8B)]
    imbalance = max(float(q["rank_imbalance"]) for q in qualities)
    yield Bar("plan: imbalance of ranks", 100 * imbalance, 100 * bench_planning.MAX_IMBALANCE, unit=" %")
    fullest = max(float(q["largest"]) for q in qualities)
    yield Bar("plan: fullest micro-batch / token cap", fullest, 1)


def adamw_bars(results: Results) -> Iterator[Bar]:
    for task in bench_adamw.MODELS:
        if not (ways := results.ways(task)):
            continue
        speedup = ways[bench_adamw.FUSED].median_s / ways[OURS].median_s
        yield Bar(f"{task}: torch's fused / ours", speedup, 1 if DEVICE.type == "cpu" else 1.2, at_most=False)


# ---- writing --------------------------------------------------------------------------------------------------------


UNIT, UNITS_PER_SECOND, DECIMALS = ("s", 1, 3) if DEVICE.type == "cpu" else ("ms", 1e3, 2)


def duration(m: Measurement) -> str:
    return f"{UNITS_PER_SECOND * m.median_s:.{DECIMALS}f} ± {UNITS_PER_SECOND * m.iqr_s:.{DECIMALS}f}"


def task_table(results: Results, task: str) -> str:
    """All ways of one task, fastest first, beside ours and the floor."""
    ways, floor = results.ways(task), floor_s(results, task.split(",")[0])
    ours = ways.get(OURS, next(iter(ways.values())))
    rows = [
        (
            way, duration(m), f"{m.median_s / floor:.2f}", f"{m.median_s / ours.median_s:.2f}",
            f"{m.extra_mib:.0f}", f"{m.extra_mib / ours.extra_mib:.1f}",
        )
        for way, m in ways.items()
    ]  # fmt: skip
    missing = {n.split(" | ")[1]: why for n, why in results.unavailable.items() if n.split(" | ")[0] == task}
    rows += [(way, f"not available: {why}", "", "", "", "") for way, why in missing.items()]
    return table(("way", f"time, {UNIT}", "time / floor", "time / ours", "extra, MiB", "extra / ours"), rows)


def scan_table(scan: Results) -> str:
    chunks = list(scan.ways("floor logits"))
    rows = [(way, *(duration(scan[f"floor {name} | {way}"]) for name in FLOORS)) for way in sorted(chunks)]
    return table(("rows x columns", *(f"{name}, {UNIT}" for name in FLOORS)), rows)


def scaling_table(results: Results) -> str:
    """Times on one thread and on several, beside the GEMMs on as many threads."""
    rows = []
    for dtype, tasks in scaling.TASKS_BY_DTYPE.items():
        for task in tasks:
            alone = results[f"{scaling.title(task, dtype, 1)} | {OURS}"]
            for threads in scaling.THREADS:
                name = scaling.title(task, dtype, threads)
                ours = results[f"{name} | {OURS}"]
                floor = floor_s(results, task, partial(scaling.floor_title, threads=threads))
                ratios = f"{ours.median_s / floor:.2f}", f"{alone.median_s / ours.median_s:.2f}"
                rows.append((name, duration(ours), f"{UNITS_PER_SECOND * floor:.{DECIMALS}f}", *ratios))
    return table(("what", f"time, {UNIT}", f"floor, {UNIT}", "time / floor", "speed-up"), rows)


def small_table(results: Results) -> str:
    rows = [
        (name.replace(" |", ":"), f"{1e3 * m.median_s:.3g} ± {1e3 * m.iqr_s:.2g}")
        for name, m in results.measured.items()
    ]
    return table(("what", "time, ms"), rows)


def sections(
    method: str, bars: list[Bar], results: Results, scan: Results, scaled: Results, small: Results
) -> list[str]:
    tasks = dict.fromkeys(n.split(" | ")[0] for n in results.measured if not n.startswith("floor"))
    parts = ["## Bars", bar_table(bars), "## Method", method]
    for task in tasks:
        parts += [f"## {task}", task_table(results, task)]
    if scaled.measured:
        parts += [f"## Threads and bfloat16, at {scaling.SHAPE}", scaling_table(scaled)]
    return [
        *parts,
        "## Floor: bare GEMMs by chunk",
        scan_table(scan),
        "## Other operators",
        small_table(small),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.report", description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=FULL_SHAPE, metavar=("T", "D", "V"))
    parser.add_argument("--rounds", type=int, default=5, help="samples of our variants and of the floors")
    parser.add_argument("--peer-rounds", type=int, default=3, help="samples of each peer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further round after so many seconds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument(
        "--fastest", type=Path, help="on a GPU: file to write the fastest backends to, for backend='auto'"
    )
    parser.add_argument("--name", default=DEVICE.type, help="the report is NAME.md, NAME.json and NAME.png")
    args = parser.parse_args()
    if args.fastest and DEVICE.type == "cpu":
        parser.error("--fastest compares the backends of a GPU, and this machine has no GPU")

    torch.set_num_threads(NUM_THREADS)
    shape = tuple(args.shape)
    facts = {"T, D, V": f"{shape}, {str(DTYPE).removeprefix('torch.')}"} | environment() | versions()
    deadline = time.monotonic() + args.seconds
    method = METHOD.format(
        threads=NUM_THREADS, rounds=args.rounds, peer_rounds=args.peer_rounds,
        device_method=DEVICE_METHOD[DEVICE.type], by_task="" if DEVICE.type == "cpu" else ", one task after the other",
    )  # fmt: skip
    subtitle = f"{facts.get('gpu', facts['cpu'])}, {facts['date']}, {shape}"

    def write(results: Results, scan: Results, scaled: Results, small: Results) -> str:
        bars = [
            *linear_logprob_bars(results, shape), *bandwidth_bars(small), *adamw_bars(small), *planning_bars(small)
        ]  # fmt: skip
        raw = {name: asdict(part) for name, part in (
            ("linear_logprob", results), ("floor_scan", scan), ("scaling", scaled), ("small", small)
        )}  # fmt: skip
        raw |= {"environment": facts, "bars": [bar._asdict() | {"holds": bar.holds} for bar in bars]}
        floors = {task: floor_s(results, task) for task in TASKS if results.ways(task)}
        if args.fastest:
            fastest.write(args.fastest, fastest.entries(results, device_name(DEVICE), dtype_name(DTYPE), shape))
        return write_files(
            args.output, args.name, f"Benchmarks on the {DEVICE.type.upper()}", facts,
            sections(fill(method), bars, results, scan, scaled, small), raw,
            lambda path: save_plot(results, floors, MAX_EXTRA_MIB, path, subtitle),
        )  # fmt: skip

    scaled, small, text = Results(), Results(), ""
    for results, scan in run_linear_logprob(shape, args.rounds, args.peer_rounds, deadline):
        text = write(results, scan, scaled, small)  # kept if the rest fails
        print(bar_table(list(linear_logprob_bars(results, shape))), flush=True)
    if DEVICE.type == "cpu":
        clock(scaling.suite(), scaled, args.rounds)
    for suite in SMALL_SUITES if time.monotonic() < deadline else ():
        clock(suite(), small, SMALL_ROUNDS)
        text = write(results, scan, scaled, small)
    print(text)


if __name__ == "__main__":
    main()
