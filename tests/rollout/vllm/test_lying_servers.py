"""What a run does with servers that lie, over real HTTP: they are named and lost, and their samples move."""

import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import WeightStream
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import SampledModel, SamplingParams
from rlft_fast.rollout.vllm.scheduling import ServerError
from rlft_fast.rollout.vllm.served import ServedVLLM
from rlft_fast.rollout.vllm.server import UnsuitableServerError, VLLMServer
from rlft_fast.world import World
from tests.rollout.vllm.lying_server import FINGERPRINT, LyingServer, choice, event, honest, token
from tests.support.runs.rollouts import completions_of
from tests.support.tiny_models import save_tokenizer

pytest.importorskip("aiohttp", reason="servers are asked with aiohttp: pip install aiohttp")

GENERATE = "/inference/v1/generate"
MODEL = SampledModel(
    path="", dtype=torch.float32, device=torch.device("cpu"), vocab_size=256, eos_token_ids=[2]
)  # fmt: skip
PARAMS = SamplingParams(n=2, max_new_tokens=4)
SEEDS = [[1, 2], [3, 4]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


Start = Callable[..., LyingServer]


@pytest.fixture
def start(monkeypatch) -> Iterator[Start]:
    monkeypatch.setenv("VLLM_API_KEY", "a secret of the tests")
    servers = []

    def started(*args: Any) -> LyingServer:
        servers.append(LyingServer(*args))
        return servers[-1]

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


def sample(tokenizer: Any, *urls: str) -> list[list[int]]:
    """Brings weights to the servers, and returns the tokens of each of four samples."""
    generator = ServedVLLM(
        MODEL, FINGERPRINT, tokenizer, RolloutConfig(backend="vllm"), 64, urls=lambda: urls, run="run",
        world=World.current(),
    )  # fmt: skip
    generator.load(WeightStream(lambda: iter(()), {}, 1024, MODEL.device), 1)
    groups = completions_of(generator, [[1, 2], [3]], PARAMS, SEEDS)
    assert all(len(one.logprobs) == 4 for group in groups for one in group)
    return [one.token_ids for group in groups for one in group]


def wrong(token_id: int) -> Callable[[LyingServer, dict[str, Any]], bytes]:
    """An honest first token, then a lie about the rest."""

    def answer(server: LyingServer, body: dict[str, Any]) -> bytes:
        rest = choice([token(token_id)] * 3, "length", server.version)
        return event({"choices": [choice([token(9)])]}) + event({"choices": [rest]})

    return answer


LIES = {
    "a wrong token": ({GENERATE: wrong(256)}, "answers wrongly: token 256, and the vocabulary has 256"),
    "HTML": ({GENERATE: b"<html>\n\n</html>"}, "answers wrongly: no event of a stream, but b'<html>'"),
    "an endless event": ({GENERATE: b"data: " + b" " * 10**6}, "answers wrongly: an event of more than 6"),
    "400": ({GENERATE: (400, {}, b"\xff no")}, "failed: status 400: . no"),
    "another server": ({GENERATE: (307, {"Location": "/v1/models"}, b"")}, "failed: status 307"),
    "gzip": ({GENERATE: (200, {"Content-Encoding": "gzip"}, b"data: no")}, "answers wrongly: no event of a stream"),
    "busy for hours": ({GENERATE: (503, {"Retry-After": "9999"}, b"")}, r"failed: it is busy \(status 503\)"),
    "models": ({"/v1/models": b"null"}, "answers wrongly at /v1/models: Input should be an object, got None"),
    "deep facts": ({"/collective_rpc": b"[" * 10**5}, "answers wrongly at /collective_rpc: .*recursion limit"),
    "weights": ({"/finish_weight_update": b"[]"}, "answers wrongly at /finish_weight_update: .* an object"),
    "versions": ({"/weight_info": {}}, "answers wrongly at /weight_info: weight_version: Field required"),
}


@pytest.mark.parametrize(("lies", "message"), LIES.values(), ids=LIES)
def test_a_server_that_lies_is_named_and_lost(tokenizer, start, lies, message):
    liar, other = start(lies), start()
    with pytest.warns(UserWarning, match=f"the server {liar.url} {message}"):
        assert sample(tokenizer, liar.url, other.url) == [[7] * 4] * 4
    with pytest.raises(ServerError, match=f"the server {liar.url} {message}"):
        sample(tokenizer, liar.url)


def test_a_server_that_rotates_otherwise_than_training_is_refused(tokenizer, start):
    """It takes 64 tokens: vLLM has the frequencies of long sequences for all, if that is more than the limit."""
    (url, unsuitable), match = (start().url, UnsuitableServerError), "takes 64 tokens, and rotates all .* beyond 63"
    for limit, expected in ((64, nullcontext()), (63, pytest.raises(unsuitable, match=match))):
        with expected:
            ServedVLLM(
                replace(MODEL, rope_limit=limit), FINGERPRINT, tokenizer, RolloutConfig(backend="vllm"), 32,
                urls=lambda: [url], run="run", world=World.current(),
            )  # fmt: skip


@pytest.fixture
def tls(tmp_path) -> tuple[ssl.SSLContext, Path]:
    """A server's side of TLS, and the file of its certificate, which no authority has signed."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "1",
        "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1,IP:::1",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


def test_addresses_of_ipv6_and_tls(tokenizer, start, tls, monkeypatch):
    context, certificate = tls
    plain, secure = start({}, "::1"), start({}, "::1", context)
    assert sample(tokenizer, plain.url) == [[7] * 4] * 4
    with pytest.raises(ServerError, match=r"self-signed certificate .*to trust its certificate, .* SSL_CERT_FILE"):
        sample(tokenizer, secure.url)
    with pytest.raises(ServerError, match=r"does not answer: .*a server without TLS has a URL with http://"):
        sample(tokenizer, plain.url.replace("http:", "https:"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # read when a server is named, not when Python starts
    assert sample(tokenizer, secure.url, start({}, "127.0.0.1", context).url) == [[7] * 4] * 4


def test_a_busy_server_is_asked_again(tokenizer, start):
    times: list[float] = []

    def busy(server: LyingServer, body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        return honest(body, server.version) if len(times) > 4 else (429, {"Retry-After": "0"}, b"later")

    answers = [(503, {}, b""), {"weight_version": "default"}]
    server = start({GENERATE: busy, "/weight_info": lambda server, _: answers.pop(0) if answers else _info(server)})
    assert sample(tokenizer, server.url) == [[7] * 4] * 4
    assert len(times) == 8  # each of four samples was sent away once
    assert times[4] - times[0] >= 0.1


def _info(server: LyingServer) -> dict[str, str]:
    return {"weight_version": server.version}


def test_one_server_under_two_names_gets_an_update_once(tokenizer, start):
    server, other = start(), start()
    alias = server.url.replace("127.0.0.1", "localhost")
    with pytest.warns(UserWarning, match=f"{server.url} and {alias} are one server"):
        sample(tokenizer, server.url, alias, other.url)
    assert [one.asked.count("/update_weights") for one in (server, other)] == [1, 1]


HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n"


def drip(at_once: bytes, then: bytes) -> Iterator[bytes]:
    yield at_once
    for byte in then:
        time.sleep(0.1)
        yield bytes([byte])


@pytest.mark.parametrize(("at_once", "then"), [(b"", HEAD), (HEAD, b" " * 100)], ids=["status", "content"])
def test_an_answer_has_a_time_in_all(start, monkeypatch, at_once, then):
    """Each byte comes before a socket's own timeout; the whole answer would take 4 or 10 s."""
    monkeypatch.setattr("rlft_fast.rollout.vllm.server._ANSWER_S", 0.4)
    server = start({"/weight_info": drip(at_once, then)})
    started = time.monotonic()
    with pytest.raises(ServerError, match=f"the server {server.url} does not answer: no answer within 0.4 s"):
        VLLMServer(server.url, "token").weight_version()
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(("status", "expected"), [(200, (True, True)), (429, (False, True)), (503, (False, False))])
def test_health(start, status, expected):
    """vLLM says 503 when its engine is dead."""
    server = VLLMServer(start({"/health": (status, {}, b"")}).url, "token")
    assert (server.answers(), server.is_alive()) == expected
