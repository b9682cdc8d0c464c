"""The benchmark of a step on the host runs a small step, and its report adds up."""

import json

import pytest
import torch

from benchmarks.step.host import STAGES, WHOLE, Step, Workload, draw_rollout, measure, write_report

WORK = Workload(num_tokens=60_000, num_samples=32, num_ranks=4)


def test_the_stages_are_a_step():
    step = Step(WORK, draw_rollout(WORK))
    for name, stage in STAGES.items():
        step.make_ready(name)
        stage(step)
    assert WORK.num_tokens - WORK.num_samples <= step.batch.num_tokens <= WORK.num_tokens
    assert step.samples.row_B.tolist() == sorted(step.samples.row_B.tolist())
    assert sorted(step.plan.indices.tolist()) == list(range(WORK.num_samples))
    assert torch.equal(step.batch.logprob_T, step.batch.rollout_logprob_T)  # back in the order of the batch
    assert step.metrics["mismatch_max"] == 0
    assert step.metrics["zero_std_group_share"] == 1 - len(step.with_signal) / 4
    own = step.plan.micro_batches(0)
    assert len(step.layouts) == len(own)
    assert sum(len(layout.row_T) for layout in step.layouts) == step.batch.lengths[step.plan.rank_indices(0)].sum()


@pytest.mark.slow
def test_the_report_adds_up(tmp_path):
    costs = measure([WORK, Workload(num_tokens=120_000, num_samples=64, num_ranks=4)], rounds=2)
    for cost in costs:
        assert max(cost.bytes_of.values()) > 10 * cost.work.num_tokens
        by_stage = [cost.seconds_per_million_of(stage) for stage in STAGES]
        assert cost.seconds_per_million == pytest.approx(sum(by_stage), rel=0.5)  # medians of two rounds each
    write_report(costs, 2, tmp_path)
    text = (tmp_path / "host.md").read_text()
    assert f"| {WHOLE} " in text
    assert "| 0.12 M tokens |" in text
    raw = json.loads((tmp_path / "host.json").read_text())
    assert [cost["work"]["num_tokens"] for cost in raw["costs"]] == [60_000, 120_000]
    assert raw["costs"][1]["bytes_of"] == costs[1].bytes_of
