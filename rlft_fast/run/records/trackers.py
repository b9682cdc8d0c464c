"""Sends the numbers of a run to TensorBoard, Weights & Biases, Trackio and MLflow, or shows them to Prometheus.

OpenTelemetry gets when each part of the run worked.

Each tracker is one function: a context manager around the connection, which gives the function that sends a step. All
of them read the environment variables that their users know, such as ``WANDB_MODE`` or ``MLFLOW_TRACKING_URI``.
"""

import importlib.util
import json
import math
import os
import queue
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, count
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from rlft_fast.errors import brief
from rlft_fast.run.folder import dotted

_PROJECT = "rlft_fast"
_SECONDS_TO_CONNECT = 20  # less than the time that a run waits for its trackers at its end

Texts = Sequence[Mapping[str, Any]]
"""Samples of a step, as samples.jsonl has them."""
Send = Callable[[int, Mapping[str, float], Texts], None]
"""Sends the numbers and texts of a step."""
Work = Sequence[tuple[str, str, float, float]]
"""Phase, worker, start and end of each piece of work; times in seconds since the epoch, as in timeline.jsonl."""
Trace = Callable[[int, float, float, Work], None]
"""Sends the start and the end of a step, and the work between them."""


class TrackedRun(NamedTuple):
    """A run as trackers know it."""

    directory: Path
    """The run's folder, whose name is the name of the run."""
    id: str
    """The same before and after the run was resumed."""
    first_step: int
    """Steps up to this one were sent before. Steps after it may have been sent by a run that was interrupted."""
    config: Mapping[str, Any]
    """The configuration."""


@contextmanager
def _tensorboard(run: TrackedRun) -> Iterator[Send]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run.directory / "tensorboard", purge_step=run.first_step + bool(run.first_step)) as writer:
        writer.add_text("config", _as_code(run.config), run.first_step)

        def send(step: int, numbers: Mapping[str, float], texts: Texts) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            for i, text in enumerate(texts):
                writer.add_text(f"samples/{i}", _as_code(text), step)
            writer.flush()

        yield send


@contextmanager
def _wandb(run: TrackedRun) -> Iterator[Send]:
    import wandb

    is_online = wandb.setup().settings.mode == "online"
    if is_online and not wandb.login(prompt=False, verify=False):  # init would ask on the terminal
        raise RuntimeError("no API key: run wandb login, or set WANDB_MODE=offline")
    settings = wandb.Settings(console="off", silent=True, init_timeout=_SECONDS_TO_CONNECT)  # the console has texts
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT), id=run.id, name=run.directory.name, resume="allow",
        dir=run.directory, config=dict(run.config), settings=settings,
    ) as tracked:  # fmt: skip
        tracked.define_metric("*", step_metric="step")  # its own step cannot go back to a checkpoint

        def send(step: int, numbers: Mapping[str, float], texts: Texts) -> None:
            table = {"samples": wandb.Table(*_table(texts))} if texts else {}
            tracked.log({"step": step, **numbers, **table})

        yield send


@contextmanager
def _trackio(run: TrackedRun) -> Iterator[Send]:
    import pandas
    import trackio

    name = f"{run.directory.name}-{run.id}"  # Trackio finds a run by its name
    tracked = trackio.init(
        os.environ.get("TRACKIO_PROJECT", _PROJECT), name=name, resume="allow", embed=False, config=dict(run.config)
    )

    def send(step: int, numbers: Mapping[str, float], texts: Texts) -> None:
        columns, rows = _table(texts)
        table = {"samples": trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))} if texts else {}
        tracked.log({**numbers, **table}, step=step)

    try:
        yield send
    finally:
        tracked.finish()


@contextmanager
def _mlflow(run: TrackedRun) -> Iterator[Send]:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    own = None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{run.directory.absolute() / 'mlflow.db'}"
    client = MlflowClient(own)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    artifacts = None if own is None else (run.directory.absolute() / "mlflow").as_uri()
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name, artifact_location=artifacts)
    found = client.search_runs([number], f"tags.`rlft_fast.run_id` = '{run.id}'")
    tracked = found[0] if found else client.create_run(
        number, run_name=run.directory.name, tags={"rlft_fast.run_id": run.id}
    )  # fmt: skip
    tracked_id = tracked.info.run_id
    if found:
        client.update_run(tracked_id, "RUNNING")
    else:
        settings = [Param(_mlflow_name(name), str(value)) for name, value in dotted(run.config)]
        for start in range(0, len(settings), 100):  # MLflow takes so many at once
            client.log_batch(tracked_id, params=settings[start : start + 100])

    def send(step: int, numbers: Mapping[str, float], texts: Texts) -> None:
        now = round(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in numbers.items()]
        client.log_batch(tracked_id, metrics=metrics)
        if texts:
            lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
            client.log_text(tracked_id, lines, f"samples/step_{step:08d}.jsonl")

    try:
        yield send
    except BaseException:
        client.set_terminated(tracked_id, "FAILED")
        raise
    client.set_terminated(tracked_id)


def _mlflow_name(name: str) -> str:
    """A name as MLflow admits it: names of rewards may be paths."""
    return re.sub(r"[^\w\-. /:]", "_", name)


@contextmanager
def _prometheus(run: TrackedRun) -> Iterator[Send]:
    """The numbers of the last step at ``/metrics``, under the address that OpenTelemetry's exporters read."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    gauges: dict[str, Gauge] = {}
    names: set[str] = set()
    registry = CollectorRegistry()

    def send(step: int, numbers: Mapping[str, float], _: Texts) -> None:
        for name, value in {"step": step, **numbers}.items():
            if name not in gauges:
                names.add(own := _prometheus_name(name, names))
                gauges[name] = Gauge(own, f"{name} of metrics.jsonl", ("run", "run_id"), registry=registry)
            gauges[name].labels(run.directory.name, run.id).set(value)

    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    port = int(os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464"))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be served: {error.strerror}. Set OTEL_EXPORTER_PROMETHEUS_PORT to a free port"
        ) from error
    try:
        yield send
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _prometheus_name(name: str, taken: Collection[str]) -> str:
    """A name as Prometheus admits it, with a number where another one would be the same."""
    start = "rlft_fast_" + re.sub(r"\W", "_", name, flags=re.ASCII)
    return next(own for own in chain([start], (f"{start}_{number}" for number in count(2))) if own not in taken)


@contextmanager
def _opentelemetry(run: TrackedRun) -> Iterator[Trace]:
    """A trace for each step, in which each piece of work is a span with the name of its phase.

    Spans go to the provider that the process has, as under ``opentelemetry-instrument``. Without one, they go by OTLP
    over HTTP to the address that ``OTEL_EXPORTER_OTLP_ENDPOINT`` names.
    """
    from opentelemetry import context, trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter, ended = trace.get_tracer_provider(), None, InMemorySpanExporter()
    if isinstance(provider, trace.ProxyTracerProvider):  # it drops everything
        exporter = OTLPSpanExporter()
        name = os.environ.get("OTEL_SERVICE_NAME", _PROJECT)
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(SimpleSpanProcessor(ended))  # a batch processor would not tell of failures
    tracer = provider.get_tracer(_PROJECT)

    def send(step: int, start: float, end: float, work: Work) -> None:
        attributes = {"run": run.directory.name, "run_id": run.id, "step": step}
        whole = tracer.start_span(
            f"step {step}", context.Context(), attributes=attributes, start_time=_in_nanoseconds(start)
        )
        inside = trace.set_span_in_context(whole)
        for phase, worker, begun, done in work:
            attributes = {"run_id": run.id, "step": step, "worker": worker}
            span = tracer.start_span(phase, inside, attributes=attributes, start_time=_in_nanoseconds(begun))
            span.end(_in_nanoseconds(done))
        whole.end(_in_nanoseconds(end))
        if exporter is not None:
            result = exporter.export(ended.get_finished_spans())
            ended.clear()
            if result is not SpanExportResult.SUCCESS:
                raise ConnectionError(
                    "no collector has taken the spans: OTEL_EXPORTER_OTLP_ENDPOINT names its address, "
                    "http://localhost:4318 by default"
                )

    try:
        yield send
    finally:
        if exporter is not None:
            exporter.shutdown()


def _in_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


_TRACKERS: dict[str, Callable[[TrackedRun], AbstractContextManager[Send]]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow, "prometheus": _prometheus,
}  # fmt: skip
_TRACERS: dict[str, Callable[[TrackedRun], AbstractContextManager[Trace]]] = {"opentelemetry": _opentelemetry}
_MODULES = {"prometheus": "prometheus_client", "opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
"""Of trackers whose module has another name."""
_CONNECT: dict[str, Callable[[TrackedRun], AbstractContextManager[Callable[..., None]]]] = {**_TRACKERS, **_TRACERS}


def require_trackers(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed, without importing them.

    Raises:
        ModuleNotFoundError: a package is missing. The message says how it is installed.
    """
    for name in names:
        module = _MODULES.get(name, name)
        if name in _CONNECT and not _is_installed(module):
            package = re.sub(r"[._]", "-", module)
            raise ModuleNotFoundError(
                f"log names {name}, which is not installed: pip install {package}, or leave it out", name=module
            )


class _RunFailedError(Exception):
    """The run ends before its last step."""


class Tracker:
    """One tracker of a run. Its calls run in a thread of their own, and so cost no step any time.

    A tracker that fails is told of once, and gets nothing more.

    Args:
        name: one of ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, ``prometheus`` and ``opentelemetry``.
        run: the run.
        warn: shows a message.
    """

    def __init__(self, name: str, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self.name, self.run, self.warn = name, run, warn
        self._steps: queue.SimpleQueue[tuple[Any, ...] | _RunFailedError | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, step: int, values: Mapping[str, float], texts: Texts = ()) -> None:
        """Sends the numbers of a step, without the numbers that are not finite, to a tracker that takes numbers.

        Args:
            step: counted from 1.
            values: numbers by name.
            texts: samples of the step, if the run uploads any.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.name in _TRACKERS and self._thread.is_alive():
            self._steps.put((step, finite, texts))

    def trace(self, step: int, start: float, end: float, work: Work) -> None:
        """Sends when each part worked, to a tracker that takes spans.

        Args:
            step: counted from 1.
            start: of the step, in seconds since the epoch.
            end: of the step.
            work: between them.
        """
        if self.name in _TRACERS and self._thread.is_alive():
            self._steps.put((step, start, end, [*work]))

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Waits until everything is sent, but not longer than the timeout [s].

        Args:
            timeout_s: most seconds to wait.
            failed: the run ends before its last step, which the tracker shows.
        """
        self._steps.put(_RunFailedError() if failed else None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.warn(f"warning: {self.name} has not taken all steps yet, and is left")
            self.warn = lambda _: None

    def _work(self) -> None:
        try:
            with _CONNECT[self.name](self.run) as send:
                while (step := self._steps.get()) is not None:
                    if isinstance(step, _RunFailedError):
                        raise step
                    send(*step)
        except _RunFailedError:
            pass
        except BaseException as error:  # whatever a tracker raises, SystemExit included, the run goes on
            what = "spans" if self.name in _TRACERS else "numbers"
            self.warn(f"warning: {self.name} gets no {what} from here on: {type(error).__name__}: {brief(error)}")


def _is_installed(name: str) -> bool:
    """A folder of this name in the working directory is no package: W&B makes such a folder."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a package around it is missing
        return False
    return spec is not None and spec.origin is not None


def _table(texts: Texts) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of samples. All cells are texts, since a reward may be missing, and parts are nested.

    A sample may lack a column: only rows with images have this one.
    """
    columns = list(dict.fromkeys(name for text in texts for name in text))
    return columns, [[_cell(text.get(name, "")) for name in columns] for text in texts]


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _as_code(values: Mapping[str, Any]) -> str:
    """A block of code in Markdown, in which nothing is markup."""
    return "".join(f"    {line}\n" for line in json.dumps(values, indent=2, ensure_ascii=False).splitlines())
