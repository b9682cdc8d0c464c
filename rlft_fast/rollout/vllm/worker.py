"""What vLLM's workers import: the receiving side of `weight_sender`, as a backend of vLLM's weight transfer."""

import secrets
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlft_fast.engine import PieceJoiner, checksum
from rlft_fast.integrations.vllm import end_with_starter, register
from rlft_fast.rollout.vllm.reload import Reload, renew_packed_weights
from rlft_fast.rollout.vllm.server import model_fingerprint
from rlft_fast.rollout.vllm.weight_sender import TIMEOUT_S, read_pieces

_IDENTITY = secrets.token_hex(8)  # of this process, by which a server that has two names is recognised


@dataclass
class SocketInitInfo(WeightTransferInitInfo):
    """Settings for all updates.

    Args:
        check: keep a checksum of each weight as it arrived.
    """

    check: bool = False


@dataclass
class SocketUpdateInfo(WeightTransferUpdateInfo):
    """The sender's address, and the secret that the sender asks for."""

    address: str
    port: int
    secret: str


class SocketWorker(WeightTransferEngine[SocketInitInfo, SocketUpdateInfo]):
    """Reads weights into vLLM's model, layer by layer."""

    init_info_cls = SocketInitInfo
    update_info_cls = SocketUpdateInfo
    check = False
    is_first = True  # update of this process

    def init_transfer_engine(self, init_info: SocketInitInfo) -> None:
        self.check = init_info.check

    def start_weight_update(self) -> None:
        self.loaded: set[str] = set()
        self.checksums: dict[str, str] = {}
        self.reload = Reload(self.model, is_first=self.is_first)
        self.is_first = False
        initialize_layerwise_reload(self.model)
        self.checkpoint_format = {name for name, _ in self.model.named_parameters()}  # no scales that vLLM makes itself

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class does not ask
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SocketUpdateInfo) -> None:
        joiner = PieceJoiner()
        with socket.create_connection((update_info.address, update_info.port), TIMEOUT_S) as connection:
            for piece in read_pieces(connection, update_info.secret):
                self._load(joiner.add(piece))
        joiner.finish()

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        if not weights:
            return
        if self.check:
            self.checksums |= {name: checksum(weight) for name, weight in weights}
        self.loaded |= self.model.load_weights(self.reload.weights(weights)) or set()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.reload.write_sinks()
        renew_packed_weights(self.model)
        self.reload.require_all()
        expected = {name for name, _ in self.model.named_parameters()} & self.checkpoint_format
        if missing := expected - self.loaded:
            raise RuntimeError(f"vLLM did not get all weights of its model: {', '.join(sorted(missing)[:3])}, ...")

    def shutdown(self) -> None:
        """Does nothing: a connection lasts for one update."""


class WorkerExtension:
    """Adds methods to vLLM's worker, for ``collective_rpc``."""

    weight_transfer_engine: SocketWorker
    vllm_config: Any
    model_runner: Any

    def facts(self) -> dict[str, Any]:
        """What a run checks before it uses the server."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "identity": _IDENTITY,
            "model": model_fingerprint(config.model_config.hf_config),
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_logprobs": config.model_config.max_logprobs,
            "backend": None if transfer is None else transfer.backend,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "has_tokenizer": not config.model_config.skip_tokenizer_init,
        }

    def abandon_update(self) -> None:
        """Forgets an update that broke off: vLLM (0.32) would refuse the next one, or join weights of both."""
        self._weight_update_active = False
        for layer in self.weight_transfer_engine.model.modules():
            if (info := get_layerwise_info(layer)).can_load():
                info.loaded_weights.clear()
                info.load_numel = 0

    def unused_adapters(self, number: int) -> list[str]:
        """Names of the layers of an adapter that the model has no place for: vLLM (0.32) leaves them out."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        return [*adapter.loras.keys() - manager.modules.keys()]

    def received_checksums(self) -> dict[str, str]:
        return self.weight_transfer_engine.checksums


register()
end_with_starter()  # in an engine that was forked after `register`, too
