"""Clusters whose machines have addresses of IPv6."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rlft_fast.cluster.connecting import _require_reachable
from rlft_fast.cluster.generators import free_url
from rlft_fast.rollout import VLLMServer


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class HTTPServer6(HTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_generator_answers_at_its_url(address):
    if address == "::1" and not has_ipv6():
        pytest.skip("no IPv6")
    url, port = free_url(address)
    with (HTTPServer6 if address == "::1" else HTTPServer)((address, port), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert VLLMServer(url, "token").answers()
        server.shutdown()
    assert not VLLMServer(url, "token").answers()


def test_the_head_of_a_cluster_at_an_address_of_ipv6():
    if not has_ipv6():
        pytest.skip("no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        port = head.getsockname()[1]
        _require_reachable(f"[::1]:{port}")
    with pytest.raises(ValueError, match=rf"no Ray cluster at \[::1\]:{port}: .*refused"):
        _require_reachable(f"[::1]:{port}")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
