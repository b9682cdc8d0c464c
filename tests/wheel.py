"""The wheels in dist/, in clean environments outside of the repository: `make test-wheel`.

PIP_TORCH holds pip's arguments for torch. A wheel whose Python is not installed is skipped.
"""

import json
import os
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import rlft_fast
from tests.trainer.toy import toy_values

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
WHEELS = sorted(DIST.glob(f"rlft_fast-{rlft_fast.__version__}-*.whl"))
assert WHEELS, f"there is no wheel of {rlft_fast.__version__} in {DIST}: make wheel"


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that does not see the environment of the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    result = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module", params=WHEELS, ids=lambda wheel: wheel.name)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the programs of an environment that has the wheel and torch alone."""
    major, minor = re.search(r"-cp(\d)(\d+)-", request.param.name).groups()
    python, folder = f"python{major}.{minor}", tmp_path_factory.mktemp("environment")
    if subprocess.run(f"{python} --version", shell=True, capture_output=True).returncode:
        pytest.skip(f"{python} is not installed")
    run(python, "-m", "venv", "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    install(programs, *shlex.split(os.environ.get("PIP_TORCH", "torch")))
    install(programs, request.param)
    return request.param, programs


def install(programs: Path, *arguments: str | Path) -> None:
    run(
        programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *arguments, cwd=programs
    )
    run(programs / "python", "-m", "pip", "check", cwd=programs)


def test_ops_with_torch_alone(environment, tmp_path):
    _, programs = environment
    assert run(programs / "rlft-fast", "--version", cwd=tmp_path) == f"rlft-fast {rlft_fast.__version__}\n"
    script = ROOT / "tests" / "support" / "ops_alone.py"
    assert run(programs / "python", script, cwd=tmp_path).endswith("the ops work\n")


def test_two_processes_train_with_the_extra(environment, tiny_model, tmp_path):
    """After the test above: the environment is the same."""
    wheel, programs = environment
    install(programs, f"{wheel}[train]")
    run(programs / "rlft-fast", "doctor", cwd=tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path, steps=1)))
    torchrun = (programs / "torchrun", "--nproc-per-node", "2", "-m", "rlft_fast")
    run(*torchrun, "train", config, cwd=tmp_path)
    (step,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(step)["step"] == 1


def test_the_source_distribution_is_the_repository():
    with tarfile.open(DIST / f"rlft_fast-{rlft_fast.__version__}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert set(tracked) - packed == set()
