"""``rlft-fast bench``: the benchmarks of a source checkout."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import rlft_fast
from rlft_fast.cli.parser import Parser

_MAX_COLUMNS = 120  # headers and warnings of pytest fill a wider terminal
_OPTIONS = ("--benchmark-only", "--benchmark-columns=median,iqr,rounds", "--disable-warnings", "--no-header")


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast bench",
        usage="rlft-fast bench [PYTEST OPTIONS]\n       rlft-fast bench --predict DEVICE [T,D,V ...] [--output FOLDER]",
        description="Run the benchmarks of a source checkout with pytest-benchmark: time, and peak memory beyond "
        "inputs and outputs. Options go to pytest: -k planning picks some, --benchmark-json=FILE keeps the numbers. "
        "--predict counts what the head's ways do on a GPU that is not here, and predicts their time.",
        allow_abbrev=False,
    )
    parser.add_argument("--predict", metavar="DEVICE", help="h100 or h200")
    args, pytest_options = parser.parse_known_args(arguments)
    files = benchmark_files()
    if args.predict is not None:
        folder = next(file.parent for file in files[0].parents if file.name == "benchmarks")
        command = [sys.executable, "-m", "benchmarks.prediction.report", args.predict, *pytest_options]
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if find_spec("pytest") is None or find_spec("pytest_benchmark") is None:
        raise ImportError("the benchmarks need pytest and pytest-benchmark: pip install pytest pytest-benchmark")
    import pytest

    os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, _MAX_COLUMNS))
    return int(pytest.main([*map(str, files), *_OPTIONS, *pytest_options]))


def benchmark_files() -> list[Path]:
    """The ``bench_*.py`` files beside the package, or those in the working directory.

    Raises:
        FileNotFoundError: neither place has any.
    """
    folders = [Path(rlft_fast.__file__).parents[1] / "benchmarks", Path.cwd() / "benchmarks"]
    for folder in folders:
        if files := sorted(folder.rglob("bench_*.py")):
            return files
    raise FileNotFoundError(
        f"no benchmarks in {' or '.join(map(str, folders))}: they come with the source; run this in a checkout"
    )
