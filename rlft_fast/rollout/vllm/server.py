"""One vLLM server: how it is started, what guards it, and what it is asked to do. Needs no vLLM on this machine.

A server wants the token of the environment variable VLLM_API_KEY with every request. vLLM itself asks for the token on
some of its routes only, and leaves out the routes that replace weights; `RequireToken` guards all of them.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rlft_fast.config import TOKEN_VARIABLE, RolloutConfig, check_server_url
from rlft_fast.errors import brief
from rlft_fast.integrations.vllm import BACKEND, ENDS_WITH_PARENT
from rlft_fast.models import image_family
from rlft_fast.rollout.vllm.answers import (
    MAX_ANSWER_BYTES,
    A,
    AnswerError,
    Models,
    Outcome,
    WeightInfo,
    WorkersChecksums,
    WorkersFacts,
    read_answer,
)
from rlft_fast.rollout.vllm.requests import device_options, plain_weights
from rlft_fast.rollout.vllm.scheduling import Patience, ServerError

GENERATE = "/inference/v1/generate"
_ANSWER_S = 120.0  # of a route that does little
_HEALTH_S = 5.0
_HEALTH_EVERY_S = 2.0
_WEIGHTS_S = 600.0  # of a route that takes weights
_SHORTEST_TOKEN = 8
_CHUNK_TOKENS = 32  # tokens that a server collects before it sends them


class UnsuitableServerError(ValueError):
    """A server answers, and cannot be used."""


def token_from_environment() -> str:
    """The token that servers want, without blanks and line breaks around it.

    Raises:
        ValueError: the environment has none, or none that can be sent. The message does not quote the token.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise ValueError(
            f"a vLLM server needs a token: set the environment variable {TOKEN_VARIABLE} to the same secret for the "
            "servers and for the run"
        )
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(
            f"the environment variable {TOKEN_VARIABLE} has {len(token)} characters, which can be guessed: expected at "
            f"least {_SHORTEST_TOKEN}, such as those of `openssl rand -hex 32`"
        )
    if not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the environment variable {TOKEN_VARIABLE} has a line break, another control character or a letter beyond "
            "ASCII inside, which HTTP cannot carry: set it to a secret such as that of `openssl rand -hex 32`"
        )
    return token


def server_command(
    model: str, dtype: str, config: RolloutConfig, max_sequence_tokens: int, *, host: str, port: int, on_cpu: bool
) -> list[str]:
    """The command of a vLLM server that can be used as a generator. It reads its token from the environment.

    Args:
        model: folder of the model. Its weights are not read; the first update brings them.
        dtype: of the weights.
        config: of the rollout.
        max_sequence_tokens: most tokens of a prompt and its completion together.
        host: address to listen at.
        port: port to listen at.
        on_cpu: whether the server computes on the CPU.
    """
    options = (device_options(config.vllm, on_cpu) | plain_weights(model, config.vllm)).items()
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
        f"--host={host}", "--port", str(port), "--dtype", dtype, "--load-format", "dummy",
        "--max-model-len", str(max_sequence_tokens), "--max-num-seqs", str(config.batch_size),
        "--tensor-parallel-size", str(config.vllm.tensor_parallel_size),
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm",
        "--enable-prefix-caching", "--stream-interval", str(_CHUNK_TOKENS),
        "--weight-transfer-config", json.dumps({"backend": weight_backend(config)}),
        "--worker-extension-cls", "rlft_fast.rollout.vllm.worker.WorkerExtension",
        "--middleware", "rlft_fast.rollout.vllm.server.RequireToken",
        "--enable-scale-out", "--disable-uvicorn-access-log", "--disable-fastapi-docs",
        *(part for name, value in options for part in _flag(name, value)),
        # vLLM's processor of images, which it tries at its start, needs the tokenizer, too.
        *([] if config.stop or image_family(model) is not None else ["--skip-tokenizer-init"]),
    ]  # fmt: skip


def _flag(name: str, value: Any) -> list[str]:
    """An option of vLLM's LLM as its server's command takes it."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if value is None:  # vLLM's default
        return []
    if isinstance(value, (list, tuple)):  # one word each: argparse's nargs="+"
        return [f"--{name}", *map(str, value)] if value else []
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def weight_backend(config: RolloutConfig) -> str:
    """The backend of vLLM's weight transfer: sockets, or NCCL where ``rollout.vllm.transfer`` says so."""
    return "nccl" if config.vllm.transfer == "nccl" else BACKEND


def server_environment() -> dict[str, str]:
    """Variables of a server's process, beside the token."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # has the routes of weights
        "VLLM_NO_USAGE_STATS": "1",
        ENDS_WITH_PARENT: "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }


class RequireToken:
    """ASGI middleware of a server: no route but ``/health`` answers without the token.

    Args:
        app: the server.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = _digest(f"Bearer {token_from_environment()}".encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(_digest(shown), self.expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
        return None


def _digest(content: bytes) -> bytes:
    """Of equal lengths, so that comparing tells nothing of the token's length."""
    return hashlib.sha256(content).digest()


class VLLMServer:
    """The weights of one server, and its state. It is a `Receiver` of weights.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        token: that the server wants.

    Raises:
        ValueError: this is no URL of a server.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.model_name = ""
        self.identity = ""  # of the process that answers
        self.num_workers = 1
        parts = urlsplit(check_server_url(self.url))
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path
        self._waiting: set[socket.socket] = set()  # connections of calls that wait for an answer

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}

    @property
    def local_address(self) -> str:
        """The address of this machine from which the server is reached, and so can reach this machine."""
        with socket.create_connection(self._address, timeout=_ANSWER_S) as connection:
            return connection.getsockname()[0]

    def check(
        self, fingerprint: dict[str, Any], max_sequence_tokens: int, *, backend: str = BACKEND, dtype: str = "auto",
        has_stop_texts: bool = False, rope_limit: int | None = None,
    ) -> None:  # fmt: skip
        """Refuses a server that would fail later, or sample from something else.

        Args:
            fingerprint: of the policy, see `model_fingerprint`.
            max_sequence_tokens: most tokens of a prompt and its completion together.
            backend: see `weight_backend`.
            dtype: of the weights, in which the server has to compute; auto: any.
            has_stop_texts: whether texts end a completion, for which the server needs a tokenizer.
            rope_limit: see `SampledModel`.

        Raises:
            ServerError: it does not answer.
            UnsuitableServerError: it lacks a route, has another model, or was started with other settings.
        """
        self.model_name = self._get("/v1/models", Models).data[0].id
        workers = self._post("/collective_rpc", {"method": "facts"}, WorkersFacts).results
        self.num_workers, facts = len(workers), workers[0]
        self.identity = facts.identity
        if different := {name for name, value in fingerprint.items() if facts.model.get(name) != value}:
            name = sorted(different)[0]
            self._refuse(f"has another model: {name} is {facts.model.get(name)!r:.100}, not {fingerprint[name]!r}")
        if facts.max_model_len < max_sequence_tokens:
            self._refuse(
                f"takes {facts.max_model_len} tokens, but a prompt and its completion may have {max_sequence_tokens}"
            )
        if rope_limit is not None and facts.max_model_len > rope_limit:
            self._refuse(
                f"takes {facts.max_model_len} tokens, and rotates all tokens as beyond {rope_limit}, unlike training"
            )
        if facts.logprobs_mode != "processed_logprobs" or facts.max_logprobs != -1:
            self._refuse("gives log-probabilities of another distribution than it samples from, or too few")
        if facts.backend != backend:
            self._refuse(f"takes its weights by {facts.backend}, not by {backend}")
        if dtype not in ("auto", facts.dtype):
            self._refuse(
                f"computes in {facts.dtype}, and the run in {dtype} (if one of both has a GPU and the other "
                "has none, name rollout.dtype in the file)"
            )
        if has_stop_texts and not facts.has_tokenizer:
            self._refuse("has no tokenizer, without which it would not see rollout.stop")
        self.weight_version()

    def _refuse(self, what: str) -> None:
        raise UnsuitableServerError(f"the server {self.url} {what}: start it with rlft-fast serve and this run's file")

    def weight_version(self) -> str | None:
        """The name of the weights that the server has."""
        return self._get("/weight_info", WeightInfo).weight_version

    def start_weight_update(self) -> None:
        """Pauses the requests under way, and empties the caches, which the old weights made."""
        self._post("/pause?mode=keep", {}, timeout_s=_WEIGHTS_S)
        self._post("/collective_rpc", {"method": "abandon_update"})
        self._post("/start_weight_update", {}, timeout_s=_WEIGHTS_S)

    def prepare(self, init_info: dict[str, Any]) -> None:
        """Before the first update of a server: settings of its weight backend."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info}, timeout_s=_WEIGHTS_S)

    def leave_group(self) -> None:
        """Before `prepare` with another NCCL group."""
        self._post("/shutdown_weight_transfer_engine", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Its sockets have timeouts of their own.
        self._post("/update_weights", {"update_info": update_info}, timeout_s=None)

    def finish_weight_update(self, weight_version: str) -> None:
        """Names the new weights, and goes on with the requests: each computes its keys and values again."""
        self._post("/finish_weight_update", {}, timeout_s=_WEIGHTS_S)
        if not self._post("/reset_prefix_cache", {}).success:
            raise ServerError(f"the server {self.url} cannot empty its prefix cache")
        self._post("/update_weight_version", {"new_version": weight_version})
        self._post("/resume", {})

    def checksums(self) -> dict[str, str]:
        """The checksum of each weight as it arrived."""
        return self._post("/collective_rpc", {"method": "received_checksums"}, WorkersChecksums).results[0]

    def answers(self) -> bool:
        """Whether the server is up, and has an engine."""
        try:
            return self._exchange("GET", "/health", None, _HEALTH_S)[0] == 200
        except ServerError:
            return False

    def is_alive(self) -> bool:
        """Whether the server and its engine live. A busy server may take long to say so."""
        try:
            return self._exchange("GET", "/health", None, _HEALTH_S)[0] in (200, 429)
        except ServerError as error:
            return isinstance(error.__cause__, TimeoutError)

    def abort(self) -> None:
        """Ends all calls that wait for an answer, with a `ServerError`."""
        for line in list(self._waiting):
            _break(line)

    def _watch(self, line: socket.socket, answered: threading.Event) -> None:
        """Ends a call to a server whose engine has died: the server may keep the connection open."""
        while not answered.wait(_HEALTH_EVERY_S):
            if not self.is_alive():
                _break(line)

    def _get(self, path: str, kind: type[A]) -> A:
        return self._ask("GET", path, None, kind, _ANSWER_S)

    def _post(
        self, path: str, body: dict[str, Any], kind: type[A] = Outcome, *, timeout_s: float | None = _ANSWER_S
    ) -> A:
        return self._ask("POST", path, json.dumps(body).encode(), kind, timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, kind: type[A], timeout_s: float | None) -> A:
        """The checked answer of a route. Waits for a server that is busy."""
        patience = Patience()
        while True:
            status, retry_after, content = self._exchange(method, path, body, timeout_s)
            try:
                if (pause_s := patience.pause_s(status, retry_after)) is None:
                    break
            except ServerError as error:
                raise ServerError(f"the server {self.url} failed at {path}: {error}") from error
            time.sleep(pause_s)
        self._require_success(path, status, content)
        try:
            return read_answer(kind, content or b"{}")
        except AnswerError as error:
            raise ServerError(f"the server {self.url} answers wrongly at {path}: {error}") from error

    def _exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> tuple[int, str | None, bytes]:
        """Status, header Retry-After and content of an answer."""
        connection = self._connection(timeout_s or _ANSWER_S)
        answered = threading.Event()
        line: socket.socket | None = None
        try:
            connection.connect()
            line = connection.sock  # which the connection forgets when an answer begins
            line.settimeout(timeout_s)
            if path != "/health":
                self._waiting.add(line)
                threading.Thread(target=self._watch, args=(line, answered), daemon=True).start()
            with _in_time(line, timeout_s):
                connection.request(method, self._prefix + path, body, self.headers)
                answer = connection.getresponse()
                content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException) as error:
            reason = f"{brief(error)}{_advice(error)}"
            raise ServerError(f"the server {self.url} does not answer: {reason}") from error
        finally:
            answered.set()
            if line is not None:
                self._waiting.discard(line)
            connection.close()
        return answer.status, answer.getheader("Retry-After"), content

    def _connection(self, timeout_s: float) -> HTTPConnection:
        if self.tls is None:
            return HTTPConnection(*self._address, timeout=timeout_s)
        return HTTPSConnection(*self._address, timeout=timeout_s, context=self.tls)

    def _require_success(self, path: str, status: int, content: bytes) -> None:
        if status == 401:
            raise UnsuitableServerError(
                f"the server {self.url} refuses the token of {TOKEN_VARIABLE}: give both the same"
            )
        if status in (403, 404):
            raise UnsuitableServerError(
                f"the server {self.url} has no route {path}: start it with rlft-fast serve and this run's file"
            )
        if status != 200:
            said = content[:500].decode(errors="replace")
            raise ServerError(f"the server {self.url} failed at {path} with status {status}: {said}")


def _advice(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return " (to trust its certificate, name a file with it in the environment variable SSL_CERT_FILE)"
    return " (a server without TLS has a URL with http://)" if isinstance(error, ssl.SSLError) else ""


@contextlib.contextmanager
def _in_time(line: socket.socket, timeout_s: float | None) -> Iterator[None]:
    """Breaks a connection off after a time in all: a socket's own timeout begins again with every byte."""
    if timeout_s is None:
        yield
        return
    late: list[bool] = []
    timer = threading.Timer(timeout_s, lambda: (late.append(True), _break(line)))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not late:
            raise
    finally:
        timer.cancel()
    if late:
        raise TimeoutError(f"no answer within {timeout_s:g} s")


def _break(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed by now
        line.shutdown(socket.SHUT_RDWR)


def model_fingerprint(config: Any) -> dict[str, Any]:
    """Numbers of a model's configuration, by which another model is recognised.

    Args:
        config: transformers' configuration of the model.
    """
    text = config.get_text_config()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {"model_type": config.model_type} | {name: getattr(text, name) for name in names if hasattr(text, name)}
