"""Joining a Ray cluster, or starting one on this machine."""

import atexit
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from rlft_fast.cluster.buffers import send_tensors_as_buffers
from rlft_fast.cluster.head import HEAD, keep_drivers
from rlft_fast.cluster.sendable import require_ray, send_user_files


def connect(address: str | None = None, num_cpus: int | None = None) -> None:
    """Connects to a Ray cluster, or starts one on this machine that listens on loopback.

    Args:
        address: of a running cluster, such as ``auto`` or ``10.0.0.1:6379``; None: start one.
        num_cpus: logical CPUs of a cluster that is started; None: those of this machine.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: there is no cluster at the address.
    """
    require_ray()
    keep_drivers()
    import ray

    if not ray.is_initialized():
        _require_reachable(address)
        options: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "warning"}
        try:
            if address is None:
                with _on_loopback():
                    ray.init(num_cpus=num_cpus, include_dashboard=False, **options)
            else:
                ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
        if not (address or "").startswith("ray://"):  # such a driver is a client of the cluster, not a part of it
            HEAD.watch(ray.get_runtime_context().gcs_address, is_own=address is None)
            atexit.register(HEAD.end_own_processes)  # runs before Ray's own hook
    send_tensors_as_buffers()
    send_user_files()


def _require_reachable(address: str | None) -> None:
    """Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at {address}: {error}") from error


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray that starts inside listens on loopback. Ray itself does so only on systems where it has no clusters.

    A terminal that closes does not end it: the driver hears of it, and wants to save.
    """
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if is_main:
            signal.signal(signal.SIGHUP, handler)
