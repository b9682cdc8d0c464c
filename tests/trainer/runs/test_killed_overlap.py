"""Runs that sample ahead, killed at random moments: every prompt is trained once, with the numbers of a whole run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rlft_fast.trainer.models
from rlft_fast.trainer import train
from tests.support.runs.copied_generator import copied_rollout
from tests.support.runs.vllm_rollouts import HEADS, needs_vllm
from tests.support.tiny_models import save_tiny_model
from tests.trainer.struck import assert_same_result
from tests.trainer.toy import read_lines, toy_config

STEPS = 12
OPTIONS = {
    "steps": STEPS, "rollout__max_staleness": 2, "rollout__backend": "vllm",
    "rollout__vllm": {"process": "separate", "cpu_cache_gib": 0.1}, "checkpoint__every": 1,
    "evaluation__every": 5,
}  # fmt: skip


def run(folder: Path) -> None:
    update = "in-flight" if "in-flight" in folder.name else "drain"
    own = {"rollout__update": update, "evaluation__path": str(folder / "data.jsonl")}
    train(toy_config(folder.parent / "model", folder, **OPTIONS, **own), resume=True)


def killed(folder: Path, rng: random.Random, longest_s: float, most: int) -> int:
    """Runs in forks until a run ends, and kills at most so many; returns how many were killed."""
    for kills in range(most + 1):
        if not (child := os.fork()):
            os.setpgid(0, 0)
            run(folder)
            os._exit(0)
        deadline = time.monotonic() + (rng.uniform(0.05, longest_s) if kills < most else 300)
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if status[0]:
            assert status[1] == 0, f"the run after {kills} kills failed"
            return kills
        os.killpg(child, signal.SIGKILL)  # with the processes that it has started
        os.waitpid(child, 0)
    raise AssertionError("the run takes too long")


def kill_runs(folder: Path, kind: str, num_kills: int, longest_s: float) -> None:
    """Kills runs until so many were killed. Each trains the prompts of the whole run, with its numbers if it drains."""
    torch.set_num_threads(1)
    save_tiny_model("llama", folder / "model", **HEADS)
    rng, done, number = random.Random(48), 0, 0
    assert killed(folder / "whole", rng, 0.0, 0) == 0
    while done < num_kills:
        number += 1
        done += killed(folder / f"{kind}{number}", rng, longest_s, num_kills - done)
        whole, found = folder / "whole/run", folder / f"{kind}{number}/run"
        rows = read_lines(found / "samples.jsonl")
        assert [row["step"] for row in rows] == [step for step in range(1, STEPS + 1) for _ in range(16)]
        assert [row["prompt"] for row in rows] == [row["prompt"] for row in read_lines(whole / "samples.jsonl")]
        assert {row["step"] - row["weight_version"] for row in rows} == {0, 1, 2}
        if kind != "in-flight":
            assert_same_result(found, whole)
    print(f"{done} kills of {number} runs")


def kill_in_process_of_its_own(folder: Path, kind: str, num_kills: int, longest_s: float) -> str:
    """Forks need a process without threads."""
    command = [sys.executable, "-m", __name__, str(folder), kind, str(num_kills), str(longest_s)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["copied", "in-flight"])
def test_kills_at_random_moments(kind, num_kills, tmp_path):
    assert kill_in_process_of_its_own(tmp_path, kind, num_kills, 1.5).startswith(f"{num_kills} kills of ")


@pytest.mark.long
@needs_vllm
def test_kills_beside_vllm(tmp_path):
    assert kill_in_process_of_its_own(tmp_path, "vllm", 4, 40.0).startswith("4 kills of ")


def slow_copy(engine, *_: object) -> object:
    latency: Callable[[int], float] = lambda number: random.paretovariate(1.5) / 50  # noqa: E731
    return copied_rollout(engine, latency)


if __name__ == "__main__":
    own_folder, own_kind, own_kills, own_seconds = sys.argv[1:]
    if own_kind != "vllm":
        rlft_fast.trainer.models.build_rollout = slow_copy
    kill_runs(Path(own_folder), own_kind, int(own_kills), float(own_seconds))
