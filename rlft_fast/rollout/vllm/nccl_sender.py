"""Broadcasts weights to the GPUs of vLLM servers by vLLM's own NCCL engine, all servers in one group.

vLLM's trainer speaks to one client. `AllServers` is that client for all servers: each server's workers get the ranks
after those of the servers before it. Needs vLLM on this machine. It has not run on GPUs yet.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlft_fast.engine import WeightMetadata, WeightStream
from rlft_fast.rollout.vllm.separate import stream_source
from rlft_fast.rollout.vllm.server import VLLMServer


class AllServers:
    """vLLM's weight-sync client, for several servers.

    Args:
        servers: in the order of their ranks.

    Attributes:
        version: name of the weights that are sent now.
    """

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        self.servers = servers
        self.version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        sizes = [server.num_workers for server in self.servers]
        own = {
            server.url: init_info | {"rank_offset": 1 + sum(sizes[:place])} for place, server in enumerate(self.servers)
        }
        self._each(lambda server: server.prepare(own[server.url]))

    def start_weight_update(self) -> None:
        self._each(VLLMServer.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._each(lambda server: server.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda server: server.finish_weight_update(weight_version or self.version))

    def _each(self, action: Callable[[VLLMServer], None]) -> None:
        with ThreadPoolExecutor(len(self.servers)) as threads:
            list(threads.map(action, self.servers))


class NCCLSender:
    """The group of this process and the servers' workers. It is made again when the servers have changed."""

    def __init__(self) -> None:
        self._client = AllServers([])
        self._trainer: Any = None

    def send(
        self, weights: WeightStream, metadata: Sequence[WeightMetadata], servers: Sequence[VLLMServer], version: str
    ) -> None:
        """Sends all weights to all servers; a failure is a failure of all, and ends the group.

        Args:
            weights: of the policy.
            metadata: of the weights, which all ranks have asked for together.
            servers: answer.
            version: name of these weights.
        """
        try:
            if not self._reaches(servers):
                self._connect(weights, servers)
            self._source.stream, self._source.known = weights, metadata
            self._client.version = version
            self._trainer.send_weights()
        except BaseException:
            self._trainer = None
            raise

    def _reaches(self, servers: Sequence[VLLMServer]) -> bool:
        """Whether the group has these servers, and no server was started again."""
        before = [server.url for server in self._client.servers]
        is_same = self._trainer is not None and [server.url for server in servers] == before
        return is_same and all(server.weight_version() == self._client.version for server in servers)

    def _connect(self, weights: WeightStream, servers: Sequence[VLLMServer]) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if self._trainer is not None:
            self._trainer.shutdown()
        for server in servers:
            server.leave_group()
        self._client, self._source = AllServers(servers), stream_source(weights)
        info = NCCLTrainerInitInfo(
            master_address=servers[0].local_address, master_port=_free_port(),
            world_size=1 + sum(server.num_workers for server in servers), rank=0,
        )  # fmt: skip
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
