"""What trackers get of a run, read back by their own readers, and a tracker that does not answer."""

import contextlib
import gzip
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
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from rlft_fast.run.records.trackers import TrackedRun, Tracker, _table
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


def test_samples_with_and_without_images_make_one_table():
    """A sample without the column ended the tracker with a KeyError."""
    samples = [{"prompt": "p", "reward": 1.0}, {"prompt": "q", "reward": None, "images": ["a.png"]}]
    columns, rows = ["prompt", "reward", "images"], [["p", "1.0", ""], ["q", "null", '["a.png"]']]
    assert _table(samples) == (columns, rows)
    assert _table(samples[::-1]) == (columns, rows[::-1])


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
def test_a_tracker_that_does_not_answer_costs_one_warning(
    name, variable, value, reason, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setenv(variable, value)
    ended = train_here(tiny_model("llama"), tmp_path, name)
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


WORK = [
    ("generate", "rank 0", 100.25, 103.0), ("reward", "rank 1", 103.0, 104.5), ("environment", "rank 0", 99.5, 101.0),
]  # fmt: skip


@pytest.mark.peers
def test_opentelemetry_gets_a_span_for_each_piece_of_work(tmp_path):
    """By the provider of the process, in a process of its own: a provider is set once."""
    code = """if True:
        import json
        import sys
        from pathlib import Path
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from rlft_fast.run.records.trackers import TrackedRun, Tracker

        work = [tuple(piece) for piece in json.loads(sys.argv[1])]
        memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
        trace.set_tracer_provider(provider)
        tracker = Tracker("opentelemetry", TrackedRun(Path("a run"), "1234", 0, {}), sys.exit)
        tracker.send(7, {"loss": 1.0})
        for step in (7, 8):
            tracker.trace(step, 100.0 + step, 104.75 + step, work)
        tracker.close(60.0)
        found = memory.get_finished_spans()
        roots = {span.context.span_id: span for span in found if span.parent is None}
        assert [span.name for span in roots.values()] == ["step 7", "step 8"]
        assert len({span.context.trace_id for span in found}) == 2
        for number, root in zip((7, 8), roots.values()):
            assert (root.start_time, root.end_time) == (round((100 + number) * 1e9), round((104.75 + number) * 1e9))
            assert dict(root.attributes) == {"run": "a run", "run_id": "1234", "step": number}
            inside = [span for span in found if span.parent is not None and roots[span.parent.span_id] is root]
            got = [(x.name, x.attributes["worker"], x.start_time / 1e9, x.end_time / 1e9) for x in inside]
            assert got == work, got
            assert {span.context.trace_id for span in inside} == {root.context.trace_id}
    """
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(WORK)], text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.peers
@pytest.mark.parametrize("status", [200, 400])
def test_a_collector_gets_the_spans_of_a_run(status, tiny_model, tmp_path, monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            assert self.path == "/v1/traces"
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        ended = train_here(tiny_model("llama"), tmp_path, "opentelemetry")
        server.shutdown()
    warnings = [line for line in ended.stdout.splitlines() if line.startswith("warning")]
    if status == 400:
        assert len(bodies) == 1
        (warning,) = warnings
        assert warning.startswith("warning: opentelemetry gets no spans from here on: ConnectionError: no collector")
        return
    assert warnings == []
    lines = read_lines(tmp_path / "run" / "timeline.jsonl")
    assert len(bodies) == len(lines) == 3
    for body, line in zip(bodies, lines, strict=True):
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        assert any(
            x.key == "service.name" and x.value.string_value == "rlft_fast" for x in resource.resource.attributes
        )
        spans = resource.scope_spans[0].spans
        found = [
            [x.name, own["worker"].string_value, x.start_time_unix_nano / 1e9, x.end_time_unix_nano / 1e9]
            for x in spans
            if "worker" in (own := {attribute.key: attribute.value for attribute in x.attributes})
        ]
        assert {"generate", "reward", "update", "sync"} <= {name for name, *_ in found}
        assert found == [
            [*names, pytest.approx(a, abs=1e-3), pytest.approx(b, abs=1e-3)] for *names, a, b in line["spans"]
        ]


def train_here(model: Path, folder: Path, tracker: str) -> subprocess.CompletedProcess[str]:
    """A run of three steps in a process of its own."""
    config = folder / "config.yaml"
    config.write_text(toy_config(model, folder, log=[tracker], steps=3).to_yaml())
    command = [sys.executable, "-m", "rlft_fast", "train", str(config)]
    ended = subprocess.run(
        command, env=os.environ | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "WANDB_API_KEY": ""}, text=True,
        capture_output=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(read_lines(folder / "run" / "metrics.jsonl")) == 3
    return ended


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
