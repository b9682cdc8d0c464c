"""benchmarks/gpu.sh from end to end where there is no GPU: every part leaves its results (`make gpu-rehearsal`)."""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rlft_fast.ops.backends import KINDS, MEASUREMENTS, read_measurements

ROOT = Path(__file__).parents[2]
_SANITIZERS = ":".join(
    subprocess.check_output(["g++", f"-print-file-name={name}.so"], text=True).strip()
    for name in ("libasan", "libubsan")
)
REHEARSED = (
    f"env LD_PRELOAD={_SANITIZERS} ASAN_OPTIONS=detect_leaks=0 {sys.executable} -m tests.cuda_emulator.rehearsal"
)
SHAPES = ["16x24x64", "24x8x64", "16x16x80"]
WAYS = ("rlft_fast", "rlft_fast, native", "rlft_fast, triton", "eager PyTorch")
BARS = {
    "no grad: time / floor", "forward + backward: time / floor", "frozen head: time / floor", "PPO loss: time / floor",
    "cross-entropy loss: time / floor", "PPO loss: fastest peer (eager PyTorch) / rlft_fast",
    "PPO loss: memory in all of rlft_fast / that peer's", "forward + backward: half ignored / all",
    "PPO loss: half ignored / all",
    "unpad: share of memcpy's bandwidth", "pad: share of memcpy's bandwidth",
    "norm of 2,000 gradients: share of memcpy's bandwidth", "clip + AdamW, 0.5 B parameters: torch's fused / ours",
}  # fmt: skip
# Stand-ins for the tools of a GPU machine. Each one checks its own arguments.
TOOLS = {
    "nvidia-smi": 'case "$*" in *compute_cap*noheader*) echo 9.0 ;; *memory.total*nounits*) echo 81559 ;; '
    '*) echo "name, compute_cap"; echo "emulated, 9.0" ;; esac',
    "compute-sanitizer": '[[ "$1 $3 $4" == "--tool --error-exitcode 1" && $PYTORCH_NO_CUDA_MEMORY_CACHING == 1 ]] '
    '|| exit 9; shift 4; exec "$@"',
    "ncu": '[[ "$*" == *"--log-file "*" --kernel-name regex:stats|grad|frozen "* ]] || exit 9; shift 7; exec "$@"',
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    for name, script in TOOLS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def gpu_sh(tools, tmp_path):
    def start(part: str, python: str = REHEARSED) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}", "SHAPES": " ".join(SHAPES), "ENGINE_SHAPES": "tiny",
            "PYTHON": python,
            "REHEARSED_BUILD": str(ROOT / "build" / "rehearsal"),
        }  # fmt: skip
        result = subprocess.run(
            ["benchmarks/gpu.sh", part, str(tmp_path)], cwd=ROOT, env=os.environ | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(result.stdout)
        return result

    return start


def packed(folder: Path, part: int) -> dict[str, bytes]:
    """Content of the one archive that a part leaves, by file name."""
    with tarfile.open(folder / f"part-{part}.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {Path(member.name).name: archive.extractfile(member).read() for member in files}


def measured_here(folder: Path) -> list[dict[str, Any]]:
    """The entries that a report added to a copy of the shipped entries."""
    shipped = read_measurements(MEASUREMENTS)
    return [entry for entry in read_measurements(folder / "fastest_backend.json") if entry not in shipped]


def passed(junit: bytes) -> int:
    """Number of tests that passed, in a report without a failure or an error."""
    (suite,) = ElementTree.fromstring(junit)
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    return int(suite.get("tests")) - int(suite.get("skipped"))


def test_build_numbers_and_what_the_engine_lacks(gpu_sh, tmp_path):
    result = gpu_sh("1")
    assert result.returncode == 1
    files = packed(tmp_path, 1)
    assert b"pydantic is not installed, and only the ops work" in files["engine1.log"]
    assert passed(files["numbers.xml"]) > 0
    compiled = [log.read_text() for log in (ROOT / "build" / "rehearsal").glob("temp*/_C_cuda/**/*.ptxas")]
    assert set(re.findall(r"for '(sm_\w+)'", "".join(compiled))) == {"sm_90a"}


@pytest.mark.long
def test_engine(gpu_sh, tmp_path):
    """On this machine's CPU, with the packages that it has."""
    assert gpu_sh("2", sys.executable).returncode == 0
    files = packed(tmp_path, 2)
    names = ("", "-graphs", "-16384", "-native")
    runs = [run for name in names for run in json.loads(files[f"engine-gpu{name}.json"])]
    assert [(run["shape"], run["compiled"]) for run in runs] == [("tiny", on) for on in (True, False, True, True, True)]
    assert b"cuda_graphs: a pass could not be recorded" in files["engine2.log"]
    assert all(run["seconds"] > 0 and run["categories"]["GEMM"] > 0 for run in runs)


@pytest.mark.long
def test_demo_by_phase(gpu_sh, tmp_path):
    """On this machine's CPU, with the packages that it has."""
    assert gpu_sh("3", sys.executable).returncode == 0
    seconds = json.loads(packed(tmp_path, 3)["demo-hf.json"])["hf"]
    assert {"seconds_rollout", "seconds_update"} <= seconds.keys()
    assert sum(seconds.values()) > 0


def test_report_holds_every_bar(gpu_sh, tmp_path):
    assert gpu_sh("4").returncode == 0
    files = packed(tmp_path, 4)
    bars = {bar["name"]: bar for bar in json.loads(files[f"gpu-{SHAPES[0]}.json"])["bars"]}
    assert set(bars) >= BARS
    assert all(math.isfinite(bar["value"]) for bar in bars.values())
    assert len(files[f"gpu-{SHAPES[0]}.png"]) > 1000
    assert {entry["kind"] for entry in measured_here(tmp_path)} == set(KINDS)


@pytest.mark.long
def test_other_shapes(gpu_sh, tmp_path):
    assert gpu_sh("5").returncode == 0
    files = packed(tmp_path, 5)
    assert {f"gpu-{shape}.{suffix}" for shape in SHAPES[1:] for suffix in ("md", "json", "png")} <= files.keys()
    shapes = {tuple(entry["shape"]) for entry in measured_here(tmp_path)}
    assert shapes == {tuple(map(int, shape.split("x"))) for shape in SHAPES[1:]}
    for shape in SHAPES:
        statistics, odds = json.loads(files[f"gpu-epilogues-{shape}.json"])["tasks"].values()
        assert (len(statistics), len(odds)) == (4, 3)


def test_limits_tests_and_sweeps(gpu_sh, tmp_path):
    result = gpu_sh("6")
    assert result.returncode == 0
    assert "tests/engine is left out: ModuleNotFoundError: import of pydantic halted" in result.stdout
    files = packed(tmp_path, 6)
    assert passed(files["tests.xml"]) > 20
    limits = json.loads(files[f"gpu-limits-{SHAPES[0]}.json"])
    assert limits["unavailable"] == {}
    assert len(limits["tasks"]) == 9
    assert all(math.isfinite(m["rate"]) and m["rate"] > 0 for ways in limits["tasks"].values() for m in ways.values())
    sweep = json.loads(files[f"gpu-sweep-{SHAPES[0]}.json"])
    assert sweep["unavailable"] == {}
    assert [len(ways) for ways in sweep["tasks"].values()] == [1 + 2 * 2 * 3] * 2


def test_sanitizers_and_profile(gpu_sh, tmp_path):
    assert gpu_sh("7").returncode == 0
    files = packed(tmp_path, 7)
    assert passed(files["memcheck.xml"]) == passed(files["racecheck.xml"]) > 20
    assert f"once-{SHAPES[0]}.log" in files


@pytest.mark.parametrize("part", ["", "8", "engine"])
def test_an_unknown_part_says_which_there_are(part, gpu_sh, tmp_path):
    result = gpu_sh(part)
    assert result.returncode == 2
    assert "benchmarks/gpu.sh PART [OUTPUT_FOLDER]" in result.stdout
    assert list(tmp_path.iterdir()) == []
