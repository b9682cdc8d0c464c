"""Joining a Ray cluster, or starting one: what it listens on, and what is refused."""

import contextlib
import importlib.util
import os
from pathlib import Path

import pytest

from rlft_fast.cluster import WorkerGroup, connect
from rlft_fast.cluster.workers import Worker

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray"),
]


def test_a_cluster_on_this_machine_listens_on_loopback():
    import ray

    connect(num_cpus=1)
    try:
        assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()  # a worker is there
        addresses = listening_addresses()
    finally:
        ray.shutdown()
    assert addresses
    # As /proc writes them: 127.0.0.1, ::1, and 127.0.0.1 in IPv6.
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    assert not [address for address in addresses if not address.startswith(loopback)]


def listening_addresses() -> set[str]:
    own = {Path(link).name for pid in processes_of_ray() for link in sockets_of(pid)}
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def processes_of_ray() -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            if command.startswith(b"ray::") or b"/ray/" in command or path.name == str(os.getpid()):
                found.append(path)
    return found


def sockets_of(process: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(link))
    return found


def test_no_cluster_at_the_address():
    with pytest.raises(ValueError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        connect("127.0.0.1:1")


def test_a_group_before_a_cluster_is_refused():
    class Nothing(Worker):
        @staticmethod
        def engine_configs(config):
            return {}

    with pytest.raises(ValueError, match="there is no Ray cluster yet"):
        WorkerGroup(Nothing, None, 1)


def test_without_ray(monkeypatch):
    monkeypatch.setattr("rlft_fast.cluster.sendable.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install ray"):
        connect()
