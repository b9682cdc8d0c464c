"""The benchmark of slow environments waits as long as it says, and its report adds up."""

import json
import random
import statistics

import pytest

from benchmarks.step.overlap import FIRST_ROW, Leg, Workload, ideal, run_apart, write_report
from benchmarks.step.slow_tool import SlowTool, draw_of, latency_s


def test_latencies():
    """Median and 99th percentile of the answers; an episode's own, whatever the policy says."""
    draw = random.Random(0)
    latencies = [latency_s(draw) for _ in range(50_000)]
    assert statistics.median(latencies) == pytest.approx(1.0, rel=0.02)
    assert statistics.quantiles(latencies, n=100)[-1] == pytest.approx(15.0, rel=0.05)
    tools = [SlowTool(calls=1) for _ in range(4)]
    for seed, tool in zip((7, 7, 7, 8), tools, strict=True):
        tool.reset(seed)
    drawn = {latency_s(tool.draw) for tool in tools}
    expected = {latency_s(draw_of(*episode)) for episode in ((7, 0), (7, 1), (7, 2), (8, 0))}
    assert drawn == expected
    assert tools[0].step({"content": "a"})[1:] == (0.0, False)
    assert tools[0].step({"content": "ab"}) == ([], 0.5, True)


def test_the_report_adds_up(tmp_path):
    """With S = 1, the third step begins with the end of the first, at 15 s; the update of the second ends at 25 s."""
    work, longest = Workload(measured=2, update_s=10.0), [5.0, 8.0, 6.0, 8.0]
    legs = [
        Leg(0, [10.0, 30.0], [15.0, 15.0], longest, {}),
        Leg(1, [12.0, 10.0], [1.0, 1.2], longest, {"seconds_sync": 9.0}),
    ]
    assert [ideal(leg, work) for leg in legs] == [17.0, 10.0]
    assert ideal(Leg(1, [], [], [5.0, 8.0, 16.0, 8.0], {}), work) == 13.0  # 6 s of 16 s show
    assert write_report(legs, work, tmp_path)
    assert not write_report([*legs, Leg(4, [9.0], [0.1], longest, {})], work, tmp_path)
    text = (tmp_path / "overlap.md").read_text()
    assert "| time of a step, S = 1 / S = 0     |     0.55 |   <= 0.6 |   pass |" in text
    assert "| time of a step, S = 4 / S = 0     |     0.45 |   <= 0.4 |   FAIL |" in text
    assert json.loads((tmp_path / "overlap.json").read_text())["legs"][1]["waited"] == [1.0, 1.2]


@pytest.mark.slow
def test_a_run():
    """Two steps of it. The first one waits for the longest latency of its episodes."""
    work = Workload(prompts=2, samples=2, update_s=0.5, steps=2, measured=2)
    leg = run_apart(work, 1)
    assert len(leg.seconds) == len(leg.waited) == 2
    assert min(leg.seconds) > 0.5
    longest = max(latency_s(draw_of(row, number)) for row in range(FIRST_ROW, FIRST_ROW + 4) for number in range(2))
    assert max(leg.longest) == longest
    assert sum(leg.waited) > 0.5 * longest
