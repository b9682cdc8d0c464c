"""The benchmark of a cluster's driver sends every token once, and its report adds up."""

import json

from benchmarks.step.driver import DISPATCH, measure, write_report
from benchmarks.step.host import Workload


def test_the_report_adds_up(tmp_path):
    works = [Workload(num_tokens=60_000, num_samples=32, num_ranks=ranks) for ranks in (4, 16)]
    costs = measure(works)
    for cost in costs:
        assert cost.sent_bytes > 33 * 60_000  # ids, positions, masks, log-probabilities, advantages
        assert DISPATCH in cost.seconds_of
    assert costs[1].sent_bytes < 1.2 * costs[0].sent_bytes  # each token goes once, however many workers there are
    write_report(costs, tmp_path)
    assert "16 workers |" in (tmp_path / "driver.md").read_text()
    raw = json.loads((tmp_path / "driver.json").read_text())
    assert [cost["sent_bytes"] for cost in raw["costs"]] == [cost.sent_bytes for cost in costs]
