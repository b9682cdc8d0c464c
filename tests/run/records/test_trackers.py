"""What trackers get of a run, read back by their own readers, and a tracker that does not answer."""

import contextlib
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlft_fast.run.records.trackers import TrackedRun, Tracker
from rlft_fast.trainer import train
from tests.run.counting import count
from tests.trainer.toy import WORDS, read_lines, toy_config, write_rows

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
Numbers = dict[tuple[int, str], float]


def of_tensorboard(run: Path, _: str) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {(x.step, tag): x.value for tag in events.Tags()["scalars"] for x in events.Scalars(tag)}


def of_wandb(run: Path, run_id: str) -> Numbers:
    from wandb.proto import wandb_internal_pb2

    numbers: Numbers = {}
    for path in sorted(run.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            row = {x.key or x.nested_key[0]: json.loads(x.value_json) for x in record.history.item}
            numbers |= {(row["step"], name): value for name, value in row.items() if isinstance(value, int | float)}
    return numbers


def records(data: bytes) -> Iterator[bytes]:
    """Records in a log of LevelDB: blocks of 32 KiB with pieces of (checksum, length, type), after a header."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if (left := -position % 32_768) and left < 7:  # zeros fill the block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


def of_trackio(run: Path, run_id: str) -> Numbers:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("rlft_fast", f"{run.name}-{run_id}")
    return {(row["step"], name): value for row in rows for name, value in row.items() if isinstance(value, int | float)}


def of_mlflow(run: Path, run_id: str) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rlft_fast").experiment_id
    (tracked,) = client.search_runs([experiment])
    assert tracked.data.tags["rlft_fast.run_id"] == run_id
    histories = {name: client.get_metric_history(tracked.info.run_id, name) for name in tracked.data.metrics}
    return {(x.step, name): x.value for name, history in histories.items() for x in history}


@pytest.fixture(scope="session")
def trackio_dir(tmp_path_factory):
    """One folder, because Trackio reads the variable once: `make test-peers` sets it before TRL imports Trackio."""
    return Path(os.environ.setdefault("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio"))))


@pytest.fixture(autouse=True)
def offline(trackio_dir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.peers
@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_the_numbers_of_a_resumed_run(name, tmp_path):
    run = tmp_path / "run"
    count(tmp_path, log=["jsonl", name], steps=2, evaluation=None)
    run_id = json.loads((run / "run.json").read_text())["id"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    count(tmp_path, log=[name], steps=3, evaluation=None, resume=True)
    assert json.loads((run / "run.json").read_text())["id"] == run_id
    written = {
        (row["step"], name): pytest.approx(value, rel=1e-6)
        for row in read_lines(run / "metrics.jsonl")
        for name, value in row.items()
        if name not in ("step", "time")
    }
    found = globals()[f"of_{name}"](run, run_id)
    assert {key: found.get(key) for key in written} == written
    assert {step for step, _ in written} == {1, 2, 3}


@pytest.mark.peers
@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("num_texts", [0, 2])
def test_a_tracker_has_texts_where_they_are_asked_for(name, num_texts, tiny_model, trackio_dir, tmp_path):
    started = time.time()
    write_rows(tmp_path / "data.jsonl", [{"prompt": f"a question about {word}"} for word in WORDS])
    train(
        toy_config(
            tiny_model("llama"), tmp_path, log=[name], log_texts=num_texts, steps=1, rollout__max_prompt_tokens=32
        )
    )
    run = tmp_path / "run"
    own = {"tensorboard", "wandb", "mlflow", "mlflow.db"}
    sent = [path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] in own]
    sent += [path for path in trackio_dir.rglob("*") if path.is_file() and path.stat().st_mtime > started]
    content = b"".join(map(content_of, sent))
    prompts = [sample["prompt"] for sample in read_lines(run / "samples.jsonl")]
    found = [prompt.encode() in content for prompt in prompts]
    assert found == [prompt in prompts[:num_texts] for prompt in prompts]


def content_of(path: Path) -> bytes:
    if path.suffix != ".parquet":
        return path.read_bytes()
    import pandas

    return pandas.read_parquet(path).to_json().encode()


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "variable", "value", "reason"),
    [
        ("wandb", "WANDB_MODE", "online", "no API key: run wandb login"),
        ("trackio", "TRACKIO_SERVER_URL", "no url", "must be a full URL"),
        ("mlflow", "MLFLOW_TRACKING_URI", "http://127.0.0.1:9", "Max retries exceeded"),
        ("prometheus", "OTEL_EXPORTER_PROMETHEUS_HOST", "192.0.2.1", "192.0.2.1:9464 cannot be served"),
    ],
)
def test_a_tracker_that_does_not_answer_costs_one_warning(name, variable, value, reason, tiny_model, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(toy_config(tiny_model("llama"), tmp_path, log=[name], steps=3).to_yaml())
    ended = subprocess.run(
        [sys.executable, "-m", "rlft_fast", "train", config],
        env=os.environ | {variable: value, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "WANDB_API_KEY": ""},
        text=True, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    (warning,) = [line for line in ended.stdout.splitlines() if line.startswith("warning")]
    assert warning.startswith(f"warning: {name} gets no numbers from here on")
    assert reason in warning


@pytest.mark.peers
def test_prometheus_reads_the_last_step(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    run = TrackedRun(tmp_path / "a run", "1234", 0, {})
    tracker = Tracker("prometheus", run, pytest.fail)
    tracker.send(6, {"loss": 1.0})
    tracker.send(7, {"reward/even share": 0.25, "reward/even.share": 0.5, "entropy": math.nan})
    wanted = {
        'rlft_fast_step{run="a run",run_id="1234"} 7.0', 'rlft_fast_loss{run="a run",run_id="1234"} 1.0',
        'rlft_fast_reward_even_share{run="a run",run_id="1234"} 0.25',
        'rlft_fast_reward_even_share_2{run="a run",run_id="1234"} 0.5',
    }  # fmt: skip
    within_s, found = time.monotonic() + 60, set()
    while found != wanted and time.monotonic() < within_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/metrics") as page:
            found = {line for line in page.read().decode().splitlines() if not line.startswith("#")}
    assert found == wanted
    tracker.close(timeout_s=60.0)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://localhost:{port}/metrics")


def test_a_tracker_that_is_not_installed(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = toy_config(tiny_model("llama"), tmp_path, log=["wandb"])
    with pytest.raises(ModuleNotFoundError, match="log names wandb, which is not installed: pip install wandb"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit("no licence"), "SystemExit: no licence"),
        (ValueError("x" * 10**7), "ValueError: xxx"),
        (ValueError(10**5000), "ValueError: (ValueError cannot be shown: str() raises ValueError)"),
    ],
)
def test_however_a_tracker_fails_one_short_warning_says_so(error, said, tmp_path, monkeypatch):
    def init(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    warnings = []
    tracker = Tracker("trackio", TrackedRun(tmp_path, "id", 0, {}), warnings.append)
    tracker.close(timeout_s=60.0)
    (warning,) = warnings
    assert warning.startswith(f"warning: trackio gets no numbers from here on: {said}")
    assert len(warning) < 700
