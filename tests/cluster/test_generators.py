"""Generators in Ray actors: a run outlives them, and every prompt is trained once."""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rlft_fast.cluster.generators import _Host
from rlft_fast.config import Config
from rlft_fast.trainer import train
from tests.cluster.test_trainer import workers_of
from tests.support.machine.processes import ALONE, ROOT, ancestry, wait_for
from tests.support.runs.vllm_rollouts import HEADS, SMALL
from tests.support.tiny_models import save_tiny_model
from tests.trainer.runs.test_episodes import (
    ENVIRONMENTS,
    check_branches,
    episodes_config,  # noqa: F401 - a fixture
    thinking_episodes_config,  # noqa: F401 - a fixture
)
from tests.trainer.toy import read_lines, toy_config, toy_values

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM: make install-vllm"),
]
KILLS = int(os.environ.get("RLFT_KILLS", "3"))
STEPS = 10 * KILLS


def parity_in_a_second(*, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Gives a new server the time to start within a few steps, and cannot be learned: every step teaches."""
    time.sleep(1)
    return [float(sum(ids) % 2) for ids in completion_ids]


def generators_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The servers of a run. A server and its engine are killed alike."""
    found = [p for p in psutil.process_iter(["cmdline"]) if "vllm.entrypoints" in " ".join(p.info["cmdline"] or [])]
    return [p for p in found if str(run.pid) in ancestry(p.pid) and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long  # the next test kills a generator, and test_updates_in_flight.py one of two servers
def test_a_run_outlives_its_generators(tmp_path):
    """kill -9 of a generator's server, or of its engine, at random moments; once no generator is left."""
    values = toy_values(save_tiny_model("llama", tmp_path / "model", **HEADS), tmp_path, steps=STEPS)
    values["rollout"] |= {"backend": "vllm", "vllm": SMALL, "batch_size": 32, "max_new_tokens": 24}
    values["reward"]["function"] = f"{__file__}:parity_in_a_second"
    values["cluster"] = {"actor": {"num_workers": 2}, "generators": {"num_workers": 2}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    metrics, draw = tmp_path / "run" / "metrics.jsonl", random.Random(0)
    with subprocess.Popen(
        [*ALONE, "train", str(tmp_path / "config.yaml")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        servers: set[psutil.Process] = set()  # and their engines
        for kill in range(KILLS):
            wait_for(lambda n=8 * kill + 1: metrics.exists() and len(metrics.read_text().splitlines()) >= n, run)
            wait_for(lambda: len(generators_of(run)) == 2, run)
            time.sleep(draw.uniform(0, 2))
            servers |= {q for p in generators_of(run) for q in [p, *p.children(recursive=True)]}
            for victim in generators_of(run) if kill % 3 == 1 else draw.sample(generators_of(run), 1):
                family = [victim, *victim.children(recursive=True)]  # a server outlives its resource tracker
                family = [p for p in family if (words := title(p)) and "resource_tracker" not in words]
                os.kill(draw.choice(family).pid, signal.SIGKILL)
        output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors[-3000:]
    assert (
        len(re.findall(r"generator \d (?:died|could not start) at .*Starting another one", output + errors)) >= KILLS
    ), output + errors
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    rollout = values["rollout"]
    per_step = rollout["prompts_per_step"] * rollout["samples_per_prompt"]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, STEPS + 1), per_step)
    assert all(sample["weight_version"] == sample["step"] for sample in samples)
    taught = [row for row in read_lines(metrics) if row["taught_share"]]  # without equal rewards alone
    assert len(taught) > STEPS // 2
    assert all(row["mismatch_max"] < 1e-3 for row in taught)
    assert not [p for p in servers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_generators_sample_beside_the_workers(tmp_path):
    """The driver asks them. kill -9 of a generator, and of a worker: each prompt is trained once, no token is older."""
    steps, path = 8, save_tiny_model("llama", tmp_path / "model", **HEADS)
    values = toy_values(path, tmp_path, steps=steps, checkpoint__every=1)
    values["rollout"] |= {"backend": "vllm", "vllm": SMALL, "max_staleness": 2, "update": "in-flight"}
    values["reward"]["function"] = f"{__file__}:parity_in_a_second"
    values["cluster"] = {"generators": {}}
    metrics = tmp_path / "run" / "metrics.jsonl"
    with begin(Config.parse(values)) as run:
        for lines, victims in ((2, generators_of), (5, training_of)):
            wait_for(lambda n=lines: metrics.exists() and metrics.read_text().count("\n") >= n, run)
            for victim in victims(run):
                os.kill(victim.pid, signal.SIGKILL)
        output, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors[-3000:]
    assert "generator 0 died at" in output + errors
    assert "warning: worker 0 of ColocatedWorker died" in output
    in_turn = toy_config(path, tmp_path / "in turn", steps=steps)
    train(in_turn)
    asked = [
        [(row["step"], row["prompt"]) for row in read_lines(Path(folder) / "samples.jsonl")]
        for folder in (metrics.parent, in_turn.output_dir)
    ]
    assert asked[0] == asked[1]
    ages = {row["step"] - row["weight_version"] for row in read_lines(metrics.with_name("samples.jsonl"))}
    assert {1} <= ages <= {0, 1, 2}
    rows = read_lines(metrics)
    assert max(row["staleness_max"] for row in rows) <= 2
    assert rows[0]["staleness_max"] == 0
    assert rows[0]["mismatch_max"] < 1e-3
    assert all(row["seconds_wait"] > 0 for row in rows)


def training_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The workers of a run that host no server."""
    return [p for p in map(psutil.Process, workers_of(run)) if not p.children()]


def begin(given: Config) -> subprocess.Popen:
    path = Path(given.output_dir).with_name("config.yaml")
    path.write_text(given.to_yaml())
    return subprocess.Popen(
        [*ALONE, "train", str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_episodes_of_generators(thinking_config):
    """Each turn asks the servers of two workers, and a branch begins where the template leaves out a thought."""
    cluster = {"actor": {"num_workers": 2}, "generators": {"num_workers": 1}}
    given = thinking_config(rollout__backend="vllm", rollout__vllm=SMALL, cluster=cluster)
    with begin(given) as run:
        _, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors[-3000:]
    check_branches(Path(given.output_dir))


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.long)])
def test_episodes_by_vllm_in_workers(adapter, config):
    """The driver plays them. A process of an environment that is killed costs its episode, a killed worker none."""
    given = config(
        rollout__backend="vllm", rollout__vllm=SMALL | {"adapter": adapter}, cluster={"actor": {"num_workers": 2}},
        environment={"name": f"{ENVIRONMENTS}:Mortal"}, actor__lora={"rank": 4} if adapter else None,
    )  # fmt: skip
    metrics = Path(given.output_dir) / "metrics.jsonl"
    with begin(given) as run:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, run)
        os.kill(workers_of(run)[0], signal.SIGKILL)
        output, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors[-3000:]
    assert len(re.findall(r"warning: worker \d of ColocatedWorker died: .*\. Starting new workers", output)) == 1, (
        output
    )
    lines = read_lines(metrics)
    for line in lines:
        assert 1 < line["turns_mean"] <= 3
        assert line["mismatch_max"] < 1e-3
        assert line["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert 0 < line["environment_failed_mean"] == line["stop_died_mean"] <= 0.25
        assert 0 < line["reward_mean"] < 1
        assert (line["sync_mib"] < 0.2) == adapter
    samples = read_lines(metrics.with_name("samples.jsonl"))
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys((1, 2, 3), 16)
    died = [sample for sample in samples if sample["stop_reason"] == "died"]
    assert {sample["prompt"] for sample in died} == {"u:sun"}
    assert len(died) == round(16 * sum(line["environment_failed_mean"] for line in lines))


@pytest.mark.parametrize("victim", ["server", "host"])
def test_no_engine_outlives_a_server_that_starts(victim, tmp_path):
    """kill -9 of the server, or of the process that starts it. An engine would wait for its server for ever."""
    values = toy_values(save_tiny_model("llama", tmp_path / "model", **HEADS), tmp_path)
    values["rollout"] |= {"backend": "vllm", "vllm": SMALL}
    values["cluster"] = {"generators": {}}
    host = multiprocessing.get_context("spawn").Process(target=_start, args=(values,))
    host.start()
    engines: list[psutil.Process] = []
    while not engines:
        assert host.is_alive()
        time.sleep(0.1)
        children = psutil.Process(host.pid).children(recursive=True)
        engines = [p for p in children if "EngineCore" in title(p)]
    server = engines[0].parent()
    assert server is not None
    os.kill(host.pid if victim == "host" else server.pid, signal.SIGKILL)
    host.join(timeout=30)
    assert host.exitcode == (-signal.SIGKILL if victim == "host" else 1)
    _, left = psutil.wait_procs([*engines, server], timeout=30)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # it has ended
        return " ".join(process.cmdline())
    return ""


def _start(values: dict[str, Any]) -> None:
    _Host().start(Config.parse(values), "token")


@pytest.mark.long
def test_a_generator_that_cannot_start_is_named(tmp_path):
    path = save_tiny_model("llama", tmp_path / "model", **HEADS)
    values = toy_values(path, tmp_path)
    values["rollout"] |= {"backend": "vllm", "vllm": {"cpu_cache_gib": 1e-6}}
    values["cluster"] = {"generators": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-m", "rlft_fast", "train", str(tmp_path / "config.yaml")], cwd=ROOT, capture_output=True,
        text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: generator 0 could not start: exit status 1, last words:" in done.stderr
    assert not (Path(values["output_dir"]) / "metrics.jsonl").exists()
