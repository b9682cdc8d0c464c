import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

import rlft_fast
from rlft_fast.cli import main
from rlft_fast.cli.commands.doctor import linear_logprob_error, why_no_cuda_kernels


@pytest.fixture(scope="module")
def report() -> dict[str, tuple[str, str]]:
    """The output of ``rlft-fast doctor``: name -> (yes or no, detail)."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "250")
        assert main(["doctor"]) == 0
    lines = [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in shown.getvalue().splitlines()]
    return {line[0]: (line[1], line[2]) for line in lines if len(line) == 3}


def test_versions(report):
    for name in ("torch", "transformers"):
        assert report[name] == ("yes", metadata.version(name))


def test_the_machine_and_what_is_installed(report):
    assert report["rlft_fast"][1].startswith(f"{rlft_fast.__version__} in ")
    cores, memory = re.match(r"(\d+) of \d+ cores, ([\d.]+) GB of memory", report["machine"][1]).groups()
    assert int(cores) == psutil.Process().cpu_affinity().__len__()
    assert float(memory) == pytest.approx(psutil.virtual_memory().total / 1e9, abs=0.06)


def _is_installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def test_extras_have_versions_or_say_what_they_lack(report):
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {f"extra {name}" for name in extras} - {"extra dev"} == {
        name for name in report if name.startswith("extra ")
    }
    for name, packages in extras.items():
        missing = [package for package in packages if not _is_installed(re.split(r"[^\w-]", package)[0])]
        if name != "dev":
            status, detail = report[f"extra {name}"]
            assert (status == "no") == bool(missing)
            assert all(package in detail for package in missing)
    assert f"transformers {metadata.version('transformers')}" in report["extra train"][1]


def test_vllm_is_reported_whatever_its_distribution_is_called(report):
    assert report["vllm"][0] == ("no" if find_spec("vllm") is None else "yes")


def test_every_part_is_reported(report):
    assert {
        "python",
        "GPU",
        "triton",
        "vllm",
        "rlft_fast._C",
        "rlft_fast._C_cuda",
        "rlft_fast._planner",
        "nvcc",
    } <= set(report)


def test_compiled_parts_that_the_ops_need_are_loaded(report):
    assert report["rlft_fast._C"][0] == report["rlft_fast._planner"][0] == "yes"


def test_backends_are_measured(report):
    triton = "triton, cuda" if torch.cuda.is_available() else "triton, cpu"  # in its interpreter
    for backend in ("reference, cpu", "native, cpu", triton):
        status, detail = report[backend]
        assert status == "yes"
        assert float(detail.split()[2]) < 1e-4


def test_what_does_not_work_says_why(report):
    assert all(len(detail) > 10 for status, detail in report.values() if status == "no")
    if not torch.cuda.is_available():
        assert report["GPU"][0] == "no"


def test_cuda_kernels_are_advised_to_a_torch_that_loads_them():
    assert "wheel of rlft_fast-cuda" in why_no_cuda_kernels("13.0")
    assert "rlft_fast-cuda" not in why_no_cuda_kernels(None)
    assert "install a torch built with CUDA, then pip install" in why_no_cuda_kernels(None)


def test_a_torch_that_does_not_load_is_one_row_among_others(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "250"}
    command = [sys.executable, "-m", "rlft_fast", "doctor"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr  # no backend works
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["python", "yes"] in [row[:2] for row in rows]
    assert f"{metadata.version('torch')} is installed, but torch does not load: libcudart.so.12" in done.stdout
    assert all(row[1] == "no" for row in rows if row and row[0] in ("torch", "GPU", "native", "rlft_fast._C"))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend"):
        linear_logprob_error("quantum", "cpu")
