"""Seconds and imbalance of `plan_micro_batches`, including the Python side.

Two bars hold: 100,000 sequences take less than 0.2 s on one core, and every rank's cost is within 1 % of the mean.
`waiting` is the time lost because ranks wait for each other at every step: the sum over steps of the costliest
micro-batch, relative to a perfect split.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from benchmarks.support.harness import Variant, measured
from rlft_fast.data import plan_micro_batches

Cost = tuple[float, float]
TOKENS: Cost = (1.0, 0.0)
QWEN3_8B: Cost = (6 * 4096.0, 1.0)
MAX_SECONDS, MAX_IMBALANCE = 0.2, 0.01
REPORTED = {"count": 100_000, "median": 400, "max_tokens": 32768, "world_size": 8}


def draw_lengths(count: int, median: int, max_tokens: int) -> np.ndarray:
    """Log-normal lengths, like those of responses."""
    draws = np.random.default_rng(0).lognormal(math.log(median), 0.8, count)
    return draws.astype(np.int64).clip(1, max_tokens)


def quality(plan, lengths: np.ndarray, max_tokens: int, world_size: int, cost: Cost) -> dict[str, float]:
    """How far the plan is from a perfect plan."""
    cost_B = cost[0] * lengths + cost[1] * lengths.astype(np.float64) ** 2
    cumulative = np.concatenate([[0.0], cost_B[plan.indices].cumsum()])
    tokens = np.concatenate([[0], lengths[plan.indices].cumsum()])
    costs = np.diff(cumulative[plan.offsets]).reshape(world_size, -1)  # (ranks, micro-batches of each)
    mean = costs.sum() / world_size
    return {
        "micro_batches_per_rank": plan.num_micro_batches,
        "fill": lengths.sum() / (max_tokens * world_size * plan.num_micro_batches),
        "largest": np.diff(tokens[plan.offsets]).max() / max_tokens,
        "rank_imbalance": abs(costs.sum(1) / mean - 1).max(),
        "waiting": costs.max(0).sum() / mean - 1,
    }


def suite() -> list[Variant]:
    """The size that the bars name, by both cost models."""
    lengths = draw_lengths(REPORTED["count"], REPORTED["median"], REPORTED["max_tokens"])
    call = partial(plan_micro_batches, lengths, REPORTED["max_tokens"], world_size=REPORTED["world_size"])
    return [Variant("plan", way, partial(call, cost=cost)) for way, cost in (("tokens", TOKENS), ("flops", QWEN3_8B))]


def reported_quality(cost: Cost) -> dict[str, float]:
    """`quality` at the size that the bars name."""
    lengths = draw_lengths(REPORTED["count"], REPORTED["median"], REPORTED["max_tokens"])
    limits = {"max_tokens": REPORTED["max_tokens"], "world_size": REPORTED["world_size"], "cost": cost}
    return quality(plan_micro_batches(lengths, **limits), lengths, **limits)


@pytest.mark.parametrize(
    ("count", "median", "max_tokens", "world_size"),
    [
        pytest.param(*REPORTED.values(), id="100k"),
        pytest.param(100_000, 400, 32768, 64, id="100k-64-ranks"),
        pytest.param(512, 400, 16384, 8, id="grpo-step"),
        pytest.param(512, 6000, 32768, 8, id="long-context"),
        pytest.param(64, 40, 2048, 2, id="demo"),
    ],
)
@pytest.mark.parametrize("cost", [pytest.param(TOKENS, id="tokens"), pytest.param(QWEN3_8B, id="qwen3-8b")])
def test_plan_micro_batches(benchmark, count: int, median: int, max_tokens: int, world_size: int, cost: Cost) -> None:
    lengths = draw_lengths(count, median, max_tokens)
    benchmark.group = "plan"
    run = partial(plan_micro_batches, lengths, max_tokens, world_size=world_size, cost=cost)
    plan = measured(benchmark, run, rounds=10)
    benchmark.extra_info |= quality(plan, lengths, max_tokens, world_size, cost)
    assert benchmark.extra_info["rank_imbalance"] < MAX_IMBALANCE
    assert benchmark.extra_info["largest"] <= 1
