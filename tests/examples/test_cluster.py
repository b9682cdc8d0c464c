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


@pytest.mark.dist
@pytest.mark.slow
def test_two_nodes(tiny_model, tmp_path):
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path)))
    job = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PROCESSES": "1",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2",
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
