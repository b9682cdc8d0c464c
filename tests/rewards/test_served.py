"""A reward server: what it is sent, the forms of its answers, and failures, which cost their samples alone."""

import contextlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlft_fast.config import Config, ConfigError
from rlft_fast.rewards import ServerReward, compute_rewards, served
from tests.support.runs.configs import MINIMAL


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.bodies.append((dict(self.headers), body))
        order = body["responses"][0]
        server.asked[order] += 1
        status, answer = 200, order.removeprefix("answer ")
        if order == "hang":
            server.released.wait(30)
        elif order == "once" and server.asked[order] == 1:
            status = 503
        elif order == "once":
            answer = "3"
        elif order.startswith("status "):
            status, _, answer = order.removeprefix("status ").partition(" ")
        self.send_response(int(status))
        if int(status) == 302:
            self.send_header("Location", "/other")
        with contextlib.suppress(ConnectionError):  # who asked has heard enough, or waits no longer
            self.end_headers()
            self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # connections at once


@pytest.fixture
def server():
    server = _Server(("127.0.0.1", 0), _Handler)
    server.bodies, server.asked, server.released = [], Counter(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/get_reward"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, *orders: str, timeout_s: float = 20.0, retries: int = 1, **columns) -> list[float | None]:
    function = ServerReward(server.url, timeout_s, retries)
    return compute_rewards(function, ["p"] * len(orders), orders, [[1]] * len(orders), columns)


def test_what_a_server_gets(server, monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "secret\n")
    function = ServerReward(server.url, 20.0, 0)
    monkeypatch.delenv("REWARD_API_KEY")  # as while another thread starts a worker process
    assert compute_rewards(function, ["p"], ["1.5"], [[1]], {"answer": [7], "level": ["x"]}) == [1.5]
    ((headers, body),) = server.bodies
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "query": ["p1.5"], "prompts": ["p"], "responses": ["1.5"], "labels": [7],
        "columns": {"answer": 7, "level": "x"},
    }  # fmt: skip


def test_every_form_of_an_answer(server):
    forms = ["2", "[2]", '{"rewards": [2]}', '{"rewards": 2, "scores": [9]}', '{"reward": 2}', '[{"score": 2}]']
    assert ask(server, *forms) == [2.0] * 6
    assert ask(server, "null", '{"rewards": [null]}') == [None, None]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("answer hello", "its answer is not JSON: b'hello'"),
        ("answer true", "its answer is no reward: b'true'"),
        ("answer NaN", "its answer is no reward: b'NaN'"),
        ("answer [1, 2]", r"its answer is no reward: b'\[1, 2\]'"),
        ("answer " + "[" * 99_999, "its answer is not JSON"),
        ("answer " + " " * 2_000_000, "its answer has more than 1048576 bytes"),
        ("status 404", "it answers with status 404$"),
        ("status 302", "it answers with status 302$"),
        ('status 400 {"error": {"message": "no model m", "code": 400}}', "it answers with status 400: 'no model m'$"),
        ('status 404 {"object": "error", "message": "no model m"}', "it answers with status 404: 'no model m'$"),
        ('status 422 {"detail": "x"}', r"""it answers with status 422: '{"detail": "x"}'$"""),
        ("status 400 no\n\x1b[31m", r"it answers with status 400: 'no\\n\\x1b\[31m'$"),
        ("status 403 " + "<p>" * 99_999, "it answers with status 403: '[<p> .]{200,210}'$"),
    ],
)
def test_answers_that_are_no_reward(order, reason, server):
    with pytest.warns(UserWarning, match=f"1 of 2 samples have no reward from {server.url}: {reason}"):
        failed, reward = ask(server, order, "4")
    assert (failed != failed, reward) == (True, 4.0)
    assert server.asked[order] == 1  # it would say the same again


def test_a_server_that_hangs_costs_its_samples_alone(server):
    started = time.perf_counter()
    with pytest.warns(UserWarning, match=r"9 of 12 samples have no reward from .*: (no answer within 1 s|it answers)"):
        rewards = ask(server, *["hang"] * 8, "status 500", "once", "1", "2", timeout_s=1.0)
    assert [reward for reward in rewards if reward == reward] == [3.0, 1.0, 2.0]
    assert server.asked == {"hang": 16, "status 500": 2, "once": 2, "1": 1, "2": 1}  # a retry each
    assert time.perf_counter() - started < 10


def test_pauses_between_requests_are_bounded(server, monkeypatch):
    assert served._LONGEST_PAUSE_S == 30.0
    monkeypatch.setattr(served, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(served, "_LONGEST_PAUSE_S", 0.02)
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="it answers with status 503"):
        ask(server, "status 503", retries=11)
    assert server.asked == {"status 503": 12}
    assert 0.21 <= time.perf_counter() - started < 5  # without a bound 20 s


def test_a_server_that_is_gone(server):
    server.shutdown()
    server.server_close()
    with pytest.warns(UserWarning, match="Cannot connect to host"):
        (reward,) = ask(server, "1", retries=0)
    assert reward != reward


def test_weights_of_a_server_and_functions():
    values = MINIMAL | {"data": {"path": "a"}}
    server = {"url": "http://h:1/score", "weight": 0.5}
    assert Config.parse(values | {"reward": {"server": server}}).function_weights == {"server": 0.5}
    both = Config.parse(values | {"reward": {"server": server, "function": "m:f"}})
    assert both.function_weights == {"m:f": 1.0, "server": 0.5}
    with pytest.raises(ConfigError, match=r"reward\.server\.url: expected a URL such as .*, got 'h:1'"):
        Config.parse(values | {"reward": {"server": {"url": "h:1"}}})
    with pytest.raises(ConfigError, match=r"unknown key reward\.url: did you mean reward\.server\.url\?"):
        Config.parse(values | {"reward": {"url": "http://h:1"}})
