"""A server on loopback that speaks the protocol of vLLM's servers, and lies where a test says so."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlft_fast.rollout.vllm.weight_sender import read_pieces

FINGERPRINT = {"model_type": "llama", "vocab_size": 256}
FACTS = {
    "identity": "1f", "model": FINGERPRINT, "max_model_len": 64, "logprobs_mode": "processed_logprobs",
    "max_logprobs": -1, "backend": "rlft_fast", "dtype": "float32", "has_tokenizer": False,
}  # fmt: skip
Answer = tuple[int, dict[str, str], bytes] | Iterator[bytes]


def token(token_id: Any, logprob: Any = -1.0, top: Any = ()) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob, "top_logprobs": list(top)}


def choice(tokens: list[dict[str, Any]], reason: str | None = None, version: str | None = None) -> dict[str, Any]:
    """One part of an honest answer; its last part names the version of all of its tokens."""
    spans = None if version is None else [{"version": version, "start": 0, "end": len(tokens)}]
    content = {"content": tokens}
    ids = [one["token_id"] for one in tokens]
    return {"index": 0, "token_ids": ids, "logprobs": content, "finish_reason": reason, "weight_versions": spans}


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def honest(body: dict[str, Any], version: str) -> bytes:
    """Two parts of as many tokens as asked for."""
    tokens = [token(7)] * body["sampling_params"]["max_tokens"]
    first, last = choice(tokens[:1]), choice(tokens[1:], "length", version)
    last["weight_versions"][0]["end"] = len(tokens)
    return event({"choices": [first]}) + event({"choices": [last]}) + event(b"[DONE]")


class LyingServer(ThreadingHTTPServer):
    """An honest server, until `lies` has a route.

    Args:
        lies: for a route what it answers: JSON, bytes, a status with headers and bytes, or an iterator of all that goes
            through the connection; or a function of the server and of the request's body that returns such an answer.
        host: address to listen at.
        tls: settings of TLS; None: none.

    Attributes:
        asked: routes that were asked for, in order.
    """

    daemon_threads = True

    def __init__(
        self, lies: dict[str, Any] | None = None, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.tls = tls
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.lies = lies or {}
        self.facts: dict[str, Any] = FACTS | {"identity": f"{self.server_address[1]:x}"}
        self.version = "default"
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        host, port, *_ = self.server_address
        return f"{'http' if self.tls is None else 'https'}://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append(path)
        said = self.lies[path] if path in self.lies else self._honest(path, body)
        if isinstance(said, Callable):
            said = said(self, body)
        if isinstance(said, tuple | Iterator):
            return said
        return 200, {}, said if isinstance(said, bytes) else json.dumps(said).encode()

    def _honest(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/inference/v1/generate":
            return honest(body, self.version)
        if path == "/update_weights":
            info = body["update_info"]
            self.receive((info["address"], info["port"]), info["secret"])
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            return {"results": [self.facts if body["method"] == "facts" else {}]}
        answers = {"/v1/models": {"data": [{"id": "m"}]}, "/weight_info": {"weight_version": self.version}}
        return answers.get(path, {})

    def receive(self, address: tuple[str, int], secret: str) -> None:
        with socket.create_connection(address, 10) as connection:
            for _ in read_pieces(connection, secret):
                pass

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is none."""


class _Handler(BaseHTTPRequestHandler):
    server: LyingServer

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._answer({})

    def _answer(self, body: dict[str, Any]) -> None:
        answer = self.server.answer(self.path.partition("?")[0], body)
        if isinstance(answer, Iterator):
            for part in answer:
                self.wfile.write(part)
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
