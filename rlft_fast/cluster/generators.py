"""vLLM servers on a Ray cluster, which generate for the workers of a run. A server that dies is replaced."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlft_fast.cluster.group import WorkerError, last_words
from rlft_fast.cluster.head import Leaving, end_actors
from rlft_fast.cluster.resources import parts_of, require_connected
from rlft_fast.config import TOKEN_VARIABLE, Config
from rlft_fast.rollout import VLLMServer, server_command, server_environment
from rlft_fast.world import end_with_parent

_MAX_FAILURES = 3
_MAX_SILENT = 5


class Generators:
    """The servers of a run. Each is one process of vLLM beside a Ray actor, which has its GPUs and CPUs.

    Args:
        config: of the run, with ``cluster.generators``.

    Attributes:
        token: that the servers want, drawn for this run.

    Raises:
        ValueError: the cluster has fewer resources than asked for.
    """

    def __init__(self, config: Config) -> None:
        assert config.cluster is not None
        assert config.cluster.generators is not None
        self.config = config
        self.sizes = config.cluster.generators
        self.token = secrets.token_hex(16)
        self._actors: list[Any] = []
        self._starting: list[Any] = []  # for each actor the call that returns its URL, until it has
        self._urls: list[str | None] = []
        self._has_run = False  # so the configuration is sound, and a start that fails is tried again
        self._failures = 0  # to start, in a row
        require_connected({"generators": parts_of(config.cluster)["generators"]})
        for place in range(self.sizes.num_workers):
            self._actors.append(None)
            self._starting.append(None)
            self._urls.append(None)
            self._start(place)

    def urls(self) -> list[str]:
        """The servers that run now. Replaces servers that have died; waits for one where none runs.

        Raises:
            WorkerError: a server could not start.
        """
        import ray

        for place, actor in enumerate(self._actors):
            if self._urls[place] is None:
                continue
            try:
                if (words := ray.get(actor.died.remote(), timeout=30)) is None:
                    continue
            except (ray.exceptions.RayError, TimeoutError) as error:
                words = str(error).splitlines()[0]
            warnings.warn(f"generator {place} died at {_now()}: {words}. Starting another one", stacklevel=2)
            self._end(place)
            self._start(place)
        deadline = time.monotonic() + 60 * self.config.timeout_minutes
        while True:
            pending = [call for call in self._starting if call is not None]
            has_any = any(url is not None for url in self._urls)
            ready, _ = ray.wait(pending, num_returns=1, timeout=0 if has_any else 5) if pending else ([], [])
            for call in ready:
                self._started(self._starting.index(call), call)
            if not ready and has_any:
                return [url for url in self._urls if url is not None]
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"no generator started within {self.config.timeout_minutes:g} minutes. Each needs "
                    f"{self.sizes.cpus} CPUs and {self.sizes.gpus} GPUs of one machine; the cluster has "
                    f"{ray.available_resources()} free"
                )

    def close(self) -> None:
        """Ends the servers."""
        import ray

        running = [actor.stop.remote() for actor, url in zip(self._actors, self._urls, strict=True) if url]
        with contextlib.suppress(Exception):  # actors may be dead, or the cluster gone
            ray.wait(running, num_returns=len(running), timeout=10)
        self._urls = [None] * len(self._urls)  # no server is asked to stop again
        for place in range(len(self._actors)):
            self._end(place)

    def _start(self, place: int) -> None:
        import ray

        remote = ray.remote(num_cpus=self.sizes.cpus, num_gpus=self.sizes.gpus, max_restarts=0)(_Host)
        self._actors[place] = remote.remote()
        self._starting[place] = self._actors[place].start.remote(self.config, self.token)
        self._urls[place] = None

    def _started(self, place: int, call: Any) -> None:
        import ray

        self._starting[place] = None
        try:
            self._urls[place] = ray.get(call)
            self._has_run, self._failures = True, 0
        except ray.exceptions.RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
            self._failures += 1
            if not self._has_run or self._failures > _MAX_FAILURES:
                raise WorkerError(f"generator {place} could not start: {reason}") from None
            warnings.warn(
                f"generator {place} could not start at {_now()}: {reason}. Starting another one", stacklevel=2
            )
            self._end(place)
            self._start(place)

    def _end(self, place: int) -> None:
        import ray

        actor, self._actors[place] = self._actors[place], None
        is_running, self._urls[place] = self._urls[place] is not None, None
        if actor is None:
            return
        with contextlib.suppress(Exception):  # it may be dead, or the cluster gone
            if is_running:  # otherwise the actor is busy, and its server ends with it
                ray.get(actor.stop.remote(), timeout=10)
        end_actors([actor])


def free_url(address: str) -> tuple[str, int]:
    """The URL of a server at an address of this machine, and its port, which is free now."""
    is_ipv6 = ":" in address
    with socket.create_server((address, 0), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
        port = probe.getsockname()[1]
    return f"http://{f'[{address}]' if is_ipv6 else address}:{port}", port


def _now() -> str:
    """Local time. Python shows a warning once, so two deaths with the same last words have to differ."""
    return f"{datetime.now():%H:%M:%S}"


class _Host(Leaving):
    """A Ray actor with a server beside it, which ends with the actor."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None
        self.url: str | None = None  # once it has answered
        self.num_silent = 0  # questions in a row without an answer

    def start(self, config: Config, token: str) -> str:
        """Returns the URL of the server when the server answers."""
        import ray

        assert config.cluster is not None
        assert config.cluster.generators is not None
        address = ray.util.get_node_ip_address()
        url, port = free_url(address)
        sizes = config.cluster.generators
        command = server_command(
            config.model, config.rollout.dtype_beside(config.actor.compute_dtype), config.rollout,
            config.longest_sequence, host=address, port=port, on_cpu=not sizes.gpus,
        )  # fmt: skip
        environment = {**os.environ, **server_environment(), TOKEN_VARIABLE: token, "OMP_NUM_THREADS": str(sizes.cpus)}
        with tempfile.NamedTemporaryFile(prefix="rlft_fast-generator-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.server = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                # A server that starts ignores SIGTERM. Its engine ends with it: rlft_fast.integrations.vllm.
                preexec_fn=partial(end_with_parent, signal.SIGKILL),
            )  # fmt: skip
        deadline = time.monotonic() + 60 * config.timeout_minutes
        while time.monotonic() < deadline:
            if (words := self.died()) is not None:
                self.stop()  # the server's own processes may live: an engine waits for its server for ever
                raise WorkerError(words)
            if VLLMServer(url, token).answers():
                self.url = url
                return url
            time.sleep(0.2)
        self.stop()
        raise WorkerError(f"no answer within {config.timeout_minutes:g} minutes")

    def died(self) -> str | None:
        """How the server has ended, with its last words. None: it lives."""
        assert self.server is not None
        server = None if self.url is None else VLLMServer(self.url, "")
        is_silent = server is not None and not server.answers()
        self.num_silent = self.num_silent + 1 if is_silent else 0
        if server is not None and is_silent and (self.num_silent > _MAX_SILENT or not server.is_alive()):
            self._kill()
        if (status := self.server.poll()) is None:
            return None
        lines = last_words(self.log, 500).split(" | ")
        errors = [line for line in lines if "Error" in line or "died" in line]
        words = " | ".join((errors or lines)[-2:])
        said = f", last words: {words[:600]}" if words else ""
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{ended}{said}"

    def stop(self) -> None:
        """Ends the server and its processes."""
        if self.server is not None:
            self._kill()
            self.log.unlink(missing_ok=True)

    def _kill(self) -> None:
        assert self.server is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
