"""vLLM's processes find the backend by which CPUs and servers take weights. The entry point `register` tells them."""

from contextlib import suppress
from functools import cache

__all__ = ["BACKEND", "register"]

BACKEND = "rlft_fast"
"""Name of the backend: ``vllm serve --weight-transfer-config '{"backend": "rlft_fast"}'``."""


@cache
def register() -> None:
    """Registers the backend with vLLM, which imports it where it is used."""
    with suppress(ImportError):  # an old vLLM, which works without the backend
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "rlft_fast.rollout.vllm_worker", "SocketWorker")
