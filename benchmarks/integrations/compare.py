"""`python -m benchmarks.integrations.compare`: trainers with and without the fused head; writes results/integrations.*.

`workload` defines the passes. All heads of all trainers take turns in one process, which `support.harness` weighs and
times. Run it on a machine that does nothing else, with 10 GiB free.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.integrations.comparison import Agreement, Comparison
from benchmarks.integrations.workload import OURS, THEIRS, TRAINERS, Task, Workload, make_task
from benchmarks.support.harness import NUM_THREADS, Variant, clock, fresh_memory, weigh
from benchmarks.support.sides import ROOT

TOLERANCE = 1e-5


def compare(folder: str, work: Workload, rounds: int) -> Comparison:
    """Checks, weighs and times every trainer.

    Raises:
        RuntimeError: both heads of a trainer disagree, or a pass did not run the head that it was made for.
    """
    with tempfile.TemporaryDirectory() as output:
        tasks = [make_task(name, folder, work, output) for name in TRAINERS]
    comparison = Comparison(agreement={task.name: check(task) for task in tasks})
    variants = [Variant(task.name, way, run) for task in tasks for way, run in task.runs.items()]
    with fresh_memory():  # pieces that malloc keeps would hide 100 MiB of a pass
        weigh(variants, comparison.results)
    clock(variants, comparison.results, rounds=rounds)
    return comparison


def check(task: Task) -> Agreement:
    """Runs both heads once."""
    ours, our_gradients = _run_alone(task, OURS)
    theirs, their_gradients = _run_alone(task, THEIRS)
    differences = [a - b for a, b in zip(our_gradients, their_gradients, strict=True)]
    agreement = Agreement(
        float((ours - theirs).abs() / theirs.abs().clamp(min=1)), _norm(differences) / _norm(their_gradients)
    )
    if not (agreement.loss <= TOLERANCE and agreement.gradient <= TOLERANCE):  # nan is no agreement either
        raise RuntimeError(f"the heads of {task.name} disagree: {agreement}, expected at most {TOLERANCE:g}")
    return agreement


def _run_alone(task: Task, way: str) -> tuple[Tensor, list[Tensor]]:
    """The loss of one pass, and its gradients. The operators that ran tell which head it was."""
    for parameter in task.parameters[way]:
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = task.runs[way]()
    fused = any(event.key.startswith("rlft_fast::linear_logprob") for event in profiler.key_averages())
    theirs = any("ChunkedLogProb" in event.key or "nll_loss" in event.key for event in profiler.key_averages())
    if (fused, theirs) != (way == OURS, way == THEIRS):
        raise RuntimeError(f"{task.name} with {way} ran our head: {fused}, its own head: {theirs}")
    return loss, [parameter.grad for parameter in task.parameters[way] if parameter.grad is not None]


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def main() -> int:
    from benchmarks.integrations.report import write_report
    from rlft_fast.demo import smollm2_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=NUM_THREADS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    work = Workload()
    comparison = compare(str(smollm2_folder()), work, args.rounds)
    return 0 if write_report(comparison, work, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
