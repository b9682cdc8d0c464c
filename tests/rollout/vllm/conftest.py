"""Fixtures of vLLM's tests."""

from collections.abc import Iterator

import pytest

from tests.support.runs.servers import TOKEN, Served


@pytest.fixture(scope="package")
def servers(tmp_path_factory) -> Iterator[Served]:
    """Two servers for all modules: to start a server, three processes import vLLM, ten CPU seconds each."""
    servers = Served(tmp_path_factory.mktemp("served"))
    yield servers
    servers.close()


@pytest.fixture
def served(servers, monkeypatch) -> Served:
    """The servers, and their token in this process. A server that a test has killed is started again."""
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    servers.start_lost()
    return servers
