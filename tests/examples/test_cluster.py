"""A run on two nodes of a Slurm job. Slurm's own commands are scripts here, which start both nodes on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.toy import comparable, toy_values

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sh"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & nodes[$node]=$!; done
for node in "${nodes[@]}"; do wait "$node" || failed=1; done
exit "${failed:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == "show hostnames node[0-1]" ]] && printf '127.0.0.1\\nnode1\\n'
"""


# The run saves a step in the seconds after SIGTERM, and ends with the status of the signal, or is complete.
ENDLESS_SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$LOG"
trap 'sleep 0.2; exit "$STATUS"' TERM
kill -s "$SIGNAL" "$PPID"
while true; do sleep 0.05; done
"""
LOGGING_SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo node0; else echo "scontrol $*" >> "$LOG"; fi
"""


def write_commands(folder: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


# The time limit, before which the run ends with 143, or happens to be complete; and a job that is cancelled.
@pytest.mark.parametrize(
    ("signal", "status", "requeued"), [("USR1", 143, True), ("USR1", 0, False), ("TERM", 143, False)]
)
def test_a_job_at_its_time_limit_is_queued_again(signal, status, requeued, tmp_path):
    write_commands(tmp_path, srun=ENDLESS_SRUN, scontrol=LOGGING_SCONTROL)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "12", "LOG": str(tmp_path / "log"), "SIGNAL": signal,
        "STATUS": str(status),
    }  # fmt: skip
    ended = subprocess.run([SCRIPT, "run.yaml"], cwd=ROOT, env=os.environ | job, timeout=60)
    assert ended.returncode == status
    started, *asked = (tmp_path / "log").read_text().splitlines()
    assert "--cpus-per-task=12 " in started
    assert started.endswith(" run.yaml --resume")
    assert asked == ["scontrol requeue 7"] * requeued


@pytest.mark.dist
@pytest.mark.slow
def test_two_nodes(tiny_model, tmp_path):
    write_commands(tmp_path, srun=SRUN, scontrol=SCONTROL)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path)))
    job = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PROCESSES": "1",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    ended = subprocess.run(
        [SCRIPT, config, "--steps", "2"], cwd=ROOT, env=os.environ | job, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert [row["step"] for row in comparable(tmp_path / "run")] == [1, 2]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert len([*(checkpoint / "actor").glob("rank_*.safetensors")]) == 2


def test_the_options_of_the_job_are_options_of_sbatch():
    options = re.findall(r"^#SBATCH --([a-z-]+)", SCRIPT.read_text(), re.MULTILINE)
    assert {"ntasks-per-node", "gpus-per-node", "signal", "requeue"} <= set(options)
