"""What servers are told before and while vLLM's NCCL engine sends, over real HTTP; without GPUs, and without vLLM."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from rlft_fast.rollout.vllm.nccl_sender import AllServers
from rlft_fast.rollout.vllm.server import VLLMServer


class Recording(http.server.BaseHTTPRequestHandler):
    """Answers all routes, and notes what was asked."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[http.server.ThreadingHTTPServer]]:
    found = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recording) for _ in range(3)]
    for server in found:
        server.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


def test_all_servers_are_one_group(servers):
    spoken_to = [VLLMServer(f"http://127.0.0.1:{server.server_address[1]}", "token") for server in servers]
    for server, size in zip(spoken_to, (1, 4, 2), strict=True):
        server.num_workers = size
    client = AllServers(spoken_to)
    client.init_weight_transfer_engine({"master_port": 5, "rank_offset": 1, "world_size": 8})
    client.version = "run:3"
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    for server, offset in zip(servers, (1, 2, 6), strict=True):
        asked = server.asked
        init = {"master_port": 5, "rank_offset": offset, "world_size": 8}
        assert asked[0] == ("/init_weight_transfer_engine", {"init_info": init})
        assert ("/update_weights", {"update_info": {"names": ["a"]}}) in asked
        order = [path for path, _ in asked]
        assert order.index("/pause?mode=keep") < order.index("/start_weight_update") < order.index("/update_weights")
        assert order.index("/update_weights") < order.index("/finish_weight_update")
        assert asked[-2:] == [("/update_weight_version", {"new_version": "run:3"}), ("/resume", {})]
