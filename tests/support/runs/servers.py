"""vLLM servers in processes of their own, as `rlft-fast serve` starts them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import yaml

from rlft_fast.config import RolloutConfig, VLLMConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Rollout, build_rollout
from tests.support.runs.vllm_rollouts import HEADS, SMALL
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import toy_values

TOKEN = "a secret of the tests"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        return True
    return False


class Served:
    """The servers of the tests: their files, their URLs and their processes."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.model = save_tiny_model("qwen2-tied", folder / "tied", **HEADS)
        values = toy_values(self.model, folder, steps=2)
        values["rollout"] |= {
            "backend": "vllm", "vllm": SMALL | {"check_weights": True}, "batch_size": 32,
            "max_prompt_tokens": 56, "max_new_tokens": 200,
        }  # fmt: skip
        values["actor"]["max_tokens"] = 1024
        self.values = values
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(values))
        self.ports = [free_port() for _ in range(count)]
        self.processes: list[subprocess.Popen] = [self.start(port) for port in self.ports]
        self.wait()

    def start_lost(self) -> None:
        """Starts the servers again whose processes have ended."""
        lost = [place for place, process in enumerate(self.processes) if process.poll() is not None]
        for place in lost:
            self.kill(place)
            self.processes[place] = self.start(self.ports[place])
        self.wait()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    def start(self, port: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "rlft_fast", "serve", str(self.config), "--port", str(port)]
        environment = {**os.environ, "VLLM_API_KEY": TOKEN, "OMP_NUM_THREADS": "1"}
        with open(self.config.with_name(f"server-{port}.log"), "w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Until all servers answer."""
        deadline = time.monotonic() + 300
        for port in self.ports:
            while not is_healthy(port):
                assert time.monotonic() < deadline, self.config.with_name(f"server-{port}.log").read_text()[-3000:]
                time.sleep(0.2)

    def kill(self, place: int) -> None:
        """Kills the processes of a server, as when its machine is lost."""
        with contextlib.suppress(ProcessLookupError):  # the tests may have killed it
            os.killpg(self.processes[place].pid, signal.SIGKILL)
        self.processes[place].wait()

    def close(self) -> None:
        for place in range(len(self.processes)):
            self.kill(place)


def rollout_of(engine: FSDPEngine, urls: tuple[str, ...]) -> Rollout:
    vllm = VLLMConfig(**SMALL, check_weights=True)
    config = RolloutConfig(backend="vllm", vllm=vllm, batch_size=32, servers=urls)
    return build_rollout(engine, load_tokenizer(engine.path), config, max_sequence_tokens=256)
