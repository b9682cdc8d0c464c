import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.support.harness import NUM_THREADS


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(NUM_THREADS)


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(group_by: str) -> Iterator[None]:
    """Names each row of a task by its way, and adds the peak memory, for which pytest-benchmark has no column."""
    groups = yield
    for _, rows in groups:
        names = [_way(row) if group_by == "group" else row["name"] for row in rows]
        width = max(map(len, names))
        for row, name in zip(rows, names, strict=True):
            is_measured_now = row["path"] is None  # --benchmark-compare adds rows, whose memory is not handed over
            row["name"] = f"{name:{width}}{row['extra_info']['peak_mib']:9,.1f} MiB peak" if is_measured_now else name
    return groups


def _way(row: dict[str, Any]) -> str:
    return (row["params"] or {}).get("way") or row["param"] or row["name"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the reason of every skip."""
    skipped = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        skipped[report.longrepr[2].removeprefix("Skipped: ")].append(report.nodeid.rpartition("::")[2])
    if skipped:
        terminalreporter.section("not measured")
    for reason, names in skipped.items():
        text = f"{reason}: {', '.join(names)}"
        columns = shutil.get_terminal_size().columns
        terminalreporter.write_line(textwrap.fill(text, columns, subsequent_indent="    ", break_on_hyphens=False))
