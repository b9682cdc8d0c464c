"""`rlft-fast bench` runs every file called bench_*, so each of them, and no other, holds a benchmark."""

import ast
import re
from pathlib import Path

from rlft_fast.cli.commands.bench import benchmark_files

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def times_something(path: Path) -> bool:
    """Whether a test in the file takes pytest-benchmark's fixture."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return any(f.name.startswith("test_") and "benchmark" in {arg.arg for arg in f.args.args} for f in functions)


def test_every_bench_file_holds_a_benchmark_and_no_other_does():
    files = {path.relative_to(BENCHMARKS) for path in benchmark_files()}
    assert files == {path.relative_to(BENCHMARKS) for path in BENCHMARKS.rglob("*.py") if times_something(path)}
    assert len(files) > 1


def test_the_map_names_every_room_and_benchmark():
    text = (BENCHMARKS / "README.md").read_text()
    rooms = {path.parent for path in BENCHMARKS.glob("*/*.py")}
    for path in (*rooms, *benchmark_files()):
        assert f"]({path.relative_to(BENCHMARKS)})" in text


def test_every_report_is_in_the_map_and_in_the_site():
    """The H100's report links those of its single shapes."""
    maps = (BENCHMARKS / "README.md").read_text() + (BENCHMARKS / "results" / "h100.md").read_text()
    linked = {link.removeprefix("results/") for link in re.findall(r"\]\(([\w/-]+\.md)\)", maps)}
    site = (BENCHMARKS.parent / "mkdocs.yml").read_text()
    reports = {path.name for path in (BENCHMARKS / "results").glob("*.md")}
    assert reports <= linked
    assert {name for name in reports if f": benchmarks/results/{name}\n" not in site} == set()
