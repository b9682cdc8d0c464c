"""The runs of tests in forked processes, `tests.support.machine.workers`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONFTEST = """
import os
import pytest
from tests.support.machine.workers import ForkedWorkers

def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2))

@pytest.fixture(scope="session")
def of_worker():
    yield os.getpid()
    print(f"a session of {os.getpid()} ends", file=open("ended", "a"))

@pytest.fixture(scope="module", autouse=True)
def of_file(request):
    yield
    print(f"{request.module.__name__} ends in {os.getpid()}", file=open("ended", "a"))
"""
TESTS = """
import os, signal, warnings
import pytest

PIDS = set()

def test_one(of_worker, tmp_path, capfd):
    PIDS.add(of_worker)
    os.system("echo written")
    assert (capfd.readouterr().out, of_worker, [*tmp_path.iterdir()]) == ("written\\n", os.getpid(), [])

def test_shares_fixtures(of_worker):
    assert of_worker in PIDS

def test_fails():
    print("a word before")
    assert 1 == 2

def test_warns():
    warnings.warn("a warning")

@pytest.mark.parametrize("signal", [signal.SIGKILL])
def test_dies(signal):
    os.kill(os.getpid(), signal)

def test_after_it(of_worker):
    assert of_worker not in PIDS

@pytest.mark.xfail
def test_expected():
    assert 0

def test_left_out():
    pytest.skip()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder / 'temporary'}", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def test_reports_are_those_of_one_process(folder):
    """A worker that dies fails its test alone, and another worker goes on."""
    result = run(folder)
    assert result.returncode == 1, result.stderr
    assert "6 failed, 12 passed, 3 skipped, 3 xfailed, 3 warnings" in result.stdout
    assert result.stdout.count("E       assert 1 == 2") == 3
    assert result.stdout.count("a word before") == 6  # beside its failure, in the source and as what was printed
    assert result.stdout.count("UserWarning: a warning") == 3
    assert result.stdout.count("the worker that ran this test has ended with SIGKILL") >= 3
    ended = (folder / "ended").read_text().splitlines()
    assert sorted(line.split()[0] for line in ended if "test_" in line) == ["test_a", "test_b", "test_c"]
    assert sum("a session" in line for line in ended) == 2


def test_the_first_failure_can_end_the_run(folder):
    result = run(folder, "-x", "-k", "fails or left_out")
    assert result.returncode == 1, result.stderr
    assert "stopping after 1 failures" in result.stdout


def test_files_that_cannot_be_collected_are_told(folder):
    (folder / "test_b.py").write_text("import nothing_of_this_name")
    result = run(folder)
    assert result.returncode == 2
    assert "No module named 'nothing_of_this_name'" in result.stdout
    assert "1 error" in result.stdout
