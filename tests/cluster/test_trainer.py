"""A run whose models live in Ray workers is the run of two processes, bit for bit."""

import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from rlft_fast.cli import main
from rlft_fast.config import DPOConfig, RewardModelConfig, SFTConfig
from tests.support.machine.distributed import run_distributed, start_processes
from tests.support.machine.processes import ALONE, ROOT, ancestry, wait_for
from tests.trainer.runs.test_episodes import episodes_config  # noqa: F401 - a fixture
from tests.trainer.supervised.rows import texts
from tests.trainer.supervised.test_pairs import pair_config
from tests.trainer.toy import HERE, comparable, read_lines, toy_values, write_rows

BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray"),
]
KILLS = int(os.environ.get("RLFT_KILLS", "3"))
NUM_STEPS = max(3, 2 * KILLS)
WORKERS = ["--ray", "--cluster.actor.num_workers", "2"]


def train_in_two(config: Path, *options: str) -> None:
    """As under torchrun, in processes that are forked with everything imported."""
    run_distributed(run_main, 2, ["train", str(config), *options])


def train_on_ray(config: Path, *options: str) -> None:
    start_processes(run_main, 1, ["train", str(config), *options])


def run_main(number: int, arguments: list[str]) -> None:
    try:
        assert main(arguments) == 0
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def write(folder: Path, values: dict) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def same_runs(first: Path, second: Path) -> None:
    assert comparable(first) == comparable(second)
    assert read_lines(first / "samples.jsonl") == read_lines(second / "samples.jsonl")
    same_weights(first, second)


def same_weights(first: Path, second: Path) -> None:
    (weights, others) = (load_file(run / "hf" / "model.safetensors") for run in (first, second))
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)


GRPO = {"algorithm__kl_coef": 0.1, "algorithm__mini_batches": 2}
CURRICULUM = {
    "algorithm__skip_equal_groups": True, "algorithm__max_refills": 1, "algorithm__curriculum": 0.5,
    "algorithm__first_samples": 2, "reward__function": f"{HERE}:mostly_even",
}  # fmt: skip
PPO = {
    "algorithm__advantage": "gae", "critic": {"max_tokens": 64, "optimizer": {"learning_rate": 1e-2}},
}  # fmt: skip


# The last step goes on from the checkpoint of a critic with workers of its own, which a store has.
@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_run_of_two_processes(steps, tiny_model, tmp_path):
    """PPO with a critic and two reward models, in the actor's workers and in workers of their own."""
    scoring = {"model": str(tiny_model("llama-reward")), "max_tokens": 64}
    models = {"helpful": scoring | {"weight": 0.5}, "short": scoring | {"weight": -0.1, "param_dtype": "bfloat16"}}
    values = toy_values(tiny_model("llama"), tmp_path, **PPO, steps=steps, reward__models=models)
    values["evaluation"] = {"path": values["data"]["path"], "max_new_tokens": 4, "every": 1}
    config = write(tmp_path, values)
    train_in_two(config, "--output_dir", str(tmp_path / "two"))
    ray = [*WORKERS, "--output_dir", str(tmp_path / "ray")]
    train_on_ray(config, *ray, "--steps", "1")
    apart = ["--resume", "--cluster.critic.num_workers", "2", "--cluster.reward.num_workers", "2"]
    apart += ["--checkpoint.store", f"file://{tmp_path}/copies"]
    for step in range(2, steps + 1):  # the critic's first checkpoint lies with the actor's
        if step == 3:
            shutil.rmtree(tmp_path / "ray")
        train_on_ray(config, *ray, *apart, "--steps", str(step))
    same_runs(tmp_path / "two", tmp_path / "ray")
    assert [path.name for path in (tmp_path / "ray" / "checkpoints" / "critic").iterdir()]


def test_episodes(config, tmp_path):
    """The driver plays them, and also held-out ones; each worker answers in the prompts of its rank."""
    held_out = {"path": str(tmp_path / "rows.jsonl"), "temperature": 1.0, "every": 1}
    path = write(tmp_path, config(evaluation=held_out, checkpoint__max_num=3).model_dump(mode="json"))
    train_in_two(path, "--output_dir", str(tmp_path / "two"))
    shutil.copytree(tmp_path / "two", tmp_path / "ray")
    train_on_ray(path, *WORKERS, "--output_dir", str(tmp_path / "ray"), "--resume", "step_1")
    same_runs(tmp_path / "two", tmp_path / "ray")
    lines = [line for line in read_lines(tmp_path / "ray" / "metrics.jsonl") if "reward_mean" in line]
    assert len(lines) == 3
    for line in lines:
        assert 1 < line["turns_mean"] <= 3
        assert line["mismatch_max"] < 1e-4
        assert line["environment_failed_mean"] == 0


@pytest.mark.parametrize("objective", ["sft", *(pytest.param(x, marks=pytest.mark.long) for x in ("dpo", "reward"))])
def test_objectives_of_rows(objective, tiny_model, tmp_path):
    """SFT with a teacher in workers of its own."""
    kind = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardModelConfig}[objective]
    model, options, ray = tiny_model("llama-reward" if objective == "reward" else "llama"), {}, [*WORKERS]
    if objective == "sft":
        teacher = {"model": str(tiny_model("qwen2")), "max_tokens": 128, "top_k": 4}
        data = str(write_rows(tmp_path / "texts.jsonl", texts(20)))
        options = {"data__path": data, "evaluation__path": data, "teacher": teacher}
        ray += ["--cluster.teacher.num_workers", "2"]
    config = tmp_path / "config.yaml"
    config.write_text(pair_config(kind, model, tmp_path / "rows", **options).to_yaml())
    train_in_two(config, "--output_dir", str(tmp_path / "two"))
    train_on_ray(config, *ray, "--output_dir", str(tmp_path / "ray"))
    assert comparable(tmp_path / "ray") == comparable(tmp_path / "two")
    same_weights(tmp_path / "ray", tmp_path / "two")


def test_preferences_go_on_in_workers(tiny_model, tmp_path):
    """With the log-probabilities of the reference that two processes have kept."""
    config = tmp_path / "config.yaml"
    values = pair_config(DPOConfig, tiny_model("llama"), tmp_path / "rows", evaluation=None)
    config.write_text(values.to_yaml())
    train_in_two(config, "--output_dir", str(tmp_path / "two"))
    shutil.copytree(tmp_path / "two", tmp_path / "mixed")
    train_on_ray(config, *WORKERS, "--output_dir", str(tmp_path / "mixed"), "--resume", "step_2")
    assert comparable(tmp_path / "mixed") == comparable(tmp_path / "two")
    same_weights(tmp_path / "mixed", tmp_path / "two")


@pytest.mark.long
def test_a_teacher_with_workers_of_its_own(tiny_model, tmp_path):
    """Its likely ids come back in the order of the batch, bit for bit."""
    teacher = {"model": str(tiny_model("qwen2")), "max_tokens": 64, "loss": "topk", "top_k": 4}
    config = write(tmp_path, toy_values(tiny_model("llama"), tmp_path, steps=2, teacher=teacher))
    train_in_two(config, "--output_dir", str(tmp_path / "two"))
    apart = ["--cluster.teacher.num_workers", "2", "--output_dir", str(tmp_path / "ray")]
    train_on_ray(config, *WORKERS, *apart)
    same_runs(tmp_path / "two", tmp_path / "ray")


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory) -> Path:
    """Folder with the configuration of a run that reads the estimates of a curriculum, and the run in two processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    changes = GRPO | CURRICULUM | {"checkpoint": {"every": 1, "max_num": NUM_STEPS}}
    config = write(folder, toy_values(tiny_model("llama"), folder, steps=NUM_STEPS, **changes))
    train_in_two(config, "--output_dir", str(folder / "whole"))
    return folder


def test_either_continues_what_the_other_saved(undisturbed, tmp_path):
    """Also the estimates of a curriculum, and groups that stop early; and a real torchrun."""
    config, mixed = undisturbed / "config.yaml", tmp_path / "mixed"
    shutil.copytree(undisturbed / "whole", mixed)
    options = ["--output_dir", str(mixed), "--resume"]
    train_on_ray(config, *options, "step_1", *WORKERS, "--cluster.reference.num_workers", "2", "--steps", "2")
    command = [BIN / "torchrun", "--nproc-per-node", "2", "-m", "rlft_fast", "train", config, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    same_runs(undisturbed / "whole", mixed)


def test_a_run_outlives_its_workers(undisturbed, tmp_path):
    """kill -9 of a worker at random moments: the final weights are those of a run that nothing has disturbed."""
    config = undisturbed / "config.yaml"
    command = [*ALONE, "train", str(config), *WORKERS, "--output_dir", str(tmp_path / "killed")]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        for kill in range(KILLS):
            wait_for(lambda n=2 * kill + 1: metrics.exists() and len(metrics.read_text().splitlines()) >= n, run)
            time.sleep(random.Random(kill).uniform(0, 0.3))
            os.kill(random.Random(kill).choice(workers_of(run)), signal.SIGKILL)
        output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors[-3000:]
    assert len(re.findall(r"warning: worker \d of ColocatedWorker died: .*\. Starting new workers", output)) == KILLS, (
        output
    )
    same_runs(undisturbed / "whole", tmp_path / "killed")


def test_a_run_saves_and_ends_when_its_cluster_loses_the_head(tiny_model, tmp_path):
    values = toy_values(tiny_model("llama"), tmp_path, steps=10_000, **GRPO, checkpoint={"every": 0})
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(
        [*ALONE, "train", str(write(tmp_path, values)), *WORKERS], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, run)
        processes = psutil.Process(run.pid).children(recursive=True)
        next(process for process in processes if process.name().startswith("gcs_server")).kill()
        output, errors = run.communicate(timeout=50)  # Ray itself would end the driver after 60 s
    assert run.returncode == 1
    error = [line for line in errors.splitlines() if line.startswith("error:")]
    assert re.fullmatch(
        r"error: the head of the Ray cluster at 127\.0\.0\.1:\d+ does not answer: its process .*", *error
    )
    steps = [row["step"] for row in read_lines(metrics)]
    assert f"stopped after step {steps[-1]}: step {steps[-1]} is saved" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{steps[-1]:08d}"]
    _, left = psutil.wait_procs(processes, timeout=5)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def workers_of(run: subprocess.Popen) -> list[int]:
    """Process ids of the workers of a run, which Ray names after their class."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::_Host") and str(run.pid) in ancestry(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found
