"""A suite runs if a change can have broken it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import suites
from tests.suites import COMMON, NIGHTLY, ROOT, SUITES, Suite
from tests.support.machine.processes import assert_ends

TWO = {"ops": Suite(("csrc",), "THIN=6"), "runs": Suite(("runs", "one.py"), "KILLS=15")}


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def root(tmp_path) -> Path:
    for name in ("csrc/a.cpp", "runs/b.py", "one.py", "other.py", "Makefile", "tests/passed.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}" if name.endswith("json") else name)
    (tmp_path / ".gitignore").write_text("*.so\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def pass_all(root: Path) -> None:
    for name, suite in TWO.items():
        suites.write_passed(name, suites.inputs_hash(suite, root), root)


def changed(root: Path) -> set[str]:
    return {name for name, reason in suites.due(TWO, root).items() if "changed" in reason}


def test_what_has_never_passed_runs(root):
    assert changed(root) == {"ops", "runs"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("other.py", "new", set()),
        ("csrc/a.cpp", "new", {"ops"}),
        ("csrc/new.cpp", "", {"ops"}),
        ("csrc/built.so", "", set()),
        ("one.py", "new", {"runs"}),
        ("Makefile", "new", {"ops", "runs"}),
        ("csrc/a.cpp", None, {"ops"}),
        ("tests/passed.json", None, {"ops", "runs"}),
    ],
)
@pytest.mark.parametrize("commits", [False, True])
def test_what_changed_since_it_passed_runs(commits, name, text, expected, root):
    pass_all(root)
    assert changed(root) == set()
    (root / name).unlink() if text is None else (root / name).write_text(text)
    if commits:
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert changed(root) == expected


def test_the_same_files_in_another_order_of_commits_are_no_change(root, tmp_path_factory):
    pass_all(root)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "passed")
    clone = tmp_path_factory.mktemp("clones") / "clone"
    subprocess.run(["git", "clone", "--quiet", root, clone], check=True)
    assert changed(clone) == set()


def test_one_that_is_left_out_is_drawn_by_the_commit(root):
    pass_all(root)
    drawn = set()
    for i in range(12):
        git(root, "commit", "--quiet", "--allow-empty", "--message", f"{i}")
        reasons = suites.due(TWO, root)
        assert len(reasons) == 1
        assert suites.due(TWO, root) == reasons
        drawn |= reasons.keys()
    assert drawn == {"ops", "runs"}


def test_outside_of_a_checkout_all_run(tmp_path):
    assert suites.due(TWO, tmp_path).keys() == TWO.keys()


@pytest.mark.parametrize(
    ("suite", "given", "counts"),
    [
        ("ops", {"THIN": ""}, True),
        ("ops", {"THIN": "6"}, True),
        ("ops", {"THIN": "7"}, False),
        ("runs", {"THIN": "2"}, False),
        ("runs", {"KILLS": "50"}, True),
        ("runs", {"KILLS": "14"}, False),
    ],
)
def test_a_pass_of_less_than_ci_runs_does_not_count(suite, given, counts):
    assert suites.is_as_strict(TWO[suite], given) == counts


def test_the_nightly_run_gets_old(root, monkeypatch):
    monkeypatch.setattr(suites, "MOST_COMMITS", 3)
    assert "never" in str(suites.nightly_warning(root))
    suites.write_passed(NIGHTLY, git(root, "rev-parse", "HEAD").strip(), root)
    for number in range(3):
        assert suites.nightly_warning(root) is None
        git(root, "commit", "--quiet", "--allow-empty", "--message", f"{number}")
    assert suites.nightly_warning(root) == "make nightly passed last 3 commits ago: run it"
    suites.write_passed(NIGHTLY, "0" * 40, root)
    assert "does not have" in str(suites.nightly_warning(root))


def test_all_inputs_exist_and_every_room_is_one():
    inputs = {path for suite in SUITES.values() for path in (*COMMON, *suite.inputs)}
    assert [path for path in inputs if not (ROOT / path).exists()] == []
    rooms = [path for path in (ROOT / "rlft_fast").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert [room.name for room in rooms if str(room.relative_to(ROOT)) not in inputs] == []


def nightly(environment: str) -> subprocess.CompletedProcess[str]:
    """What make nightly would run, given THIN and KILLS, with the Python of an environment."""
    command = ["make", "--dry-run", "nightly", f"VENV={environment}", "THIN=8", "KILLS=1"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_nightly_runs_every_suite_at_full_length():
    done = nightly(sys.prefix)
    assert done.returncode == 0, done.stderr
    for name in SUITES:
        assert f"-m tests.suites passed {name} THIN= KILLS=50\n" in done.stdout
    assert "--keep-going" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_nightly_fails_where_its_suites_cannot_be_listed(tmp_path):
    assert nightly(str(tmp_path)).returncode != 0


@pytest.fixture
def ci_run(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs .ci/run with a make that prints its arguments, and then runs the shell's code in the given variables."""
    for name in (".ci/run", "tests/suites.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in ("make", "chromium"):
        (tmp_path / "bin" / name).write_text('#!/bin/bash\necho "make $*"\nname=${1//-/_}\neval "${!name:-}"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin/python3").symlink_to(sys.executable)

    def start(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | variables
        return subprocess.run(
            [tmp_path / ".ci/run"], env=environment, capture_output=True, text=True, timeout=100,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("minutes", "options", "is_run"), [(0, "THIN=2\n", True), (46, "THIN=2 THIN=100 KILLS=3\n", True), (71, "", False)]
)
def test_a_late_suite_is_thinned_or_left_by_name(minutes, options, is_run, ci_run):
    done = ci_run(SECONDS=str(60 * minutes))
    assert done.returncode == 0, done.stderr
    assert "make test\n" in done.stdout
    assert (f"vllm: make test-vllm {options}" in done.stdout) == is_run
    assert (done.stdout.count("== test-vllm is NOT RUN") == 2) != is_run  # when it is left, and at the end


def test_a_red_lane_ends_the_other_whose_lines_are_printed(ci_run, tmp_path):
    """The other lane is in a suite that would take a minute."""
    pid = tmp_path / "waiting.pid"
    waiting = f"echo $$ > {pid}; echo $name waits; sleep 60"
    done = ci_run(test_vllm=waiting, test_ray=f"until [ -s {pid} ]; do sleep 0.1; done; echo red; exit 7")
    assert done.returncode != 0
    assert "\nray: red\n" in done.stdout
    assert "\nvllm: test_vllm waits\n" in done.stdout
    assert_ends([int(pid.read_text())])
    assert "== done" not in done.stdout
