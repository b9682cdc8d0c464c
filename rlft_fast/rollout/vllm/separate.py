"""vLLM in a process beside the training, which takes weights through vLLM's public weight-transfer interface."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig, VLLMConfig
from rlft_fast.engine import WeightMetadata, WeightStream
from rlft_fast.integrations.vllm import BACKEND, ENDS_WITH_PARENT
from rlft_fast.rollout.types import SampledModel, Span
from rlft_fast.rollout.vllm.checks import transfer_backend
from rlft_fast.rollout.vllm.colocated import VLLMGenerator, environment, start_llm
from rlft_fast.rollout.vllm.stepping import Stepping
from rlft_fast.rollout.vllm.weight_sender import send_weights
from rlft_fast.world import World


class SeparateVLLM(VLLMGenerator):
    """vLLM in a process of its own, one beside each training process, see `VLLMGenerator`.

    Several threads may call `generate` at once, and `load` meanwhile, but for adapters: vLLM pauses the requests that
    are under way, takes the weights, and goes on.
    """

    def __init__(
        self, model: SampledModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int,
        world: World,
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, config, max_sequence_tokens)
        self.config = config.vllm
        self.backend = transfer_backend(config.vllm, model.device)
        self.is_socket = self.backend == "socket"
        with environment(_process_environment(world, config.vllm, self.backend)):
            from vllm.config import WeightTransferConfig

            transfer = WeightTransferConfig(backend=BACKEND if self.is_socket else self.backend)
            self.llm = start_llm(
                model, config, max_sequence_tokens, weight_transfer_config=None if model.adapter else transfer,
                enable_sleep_mode=self.sleeps, worker_extension_cls="rlft_fast.rollout.vllm.worker.WorkerExtension",
            )  # fmt: skip
        _raise_when_it_dies(self.llm.llm_engine.engine_core)
        self.stepping = Stepping(self.llm)
        self.client = _Client(self.llm)
        if self.is_socket and not model.adapter:
            self.client.init_weight_transfer_engine({"check": self.check_weights})
        self.trainer: Any = None

    def _connect(self, weights: WeightStream) -> Any:
        """Each training process is rank 0, the sender, towards the vLLM beside it."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self.source = stream_source(weights)
        info = _init_info(self.backend, self.config)
        return WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=self.source)

    def _outputs_of(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        return self.stepping.outputs_of(prompts, params, self._adapter)

    def _spans(self, sample: Any, version: int) -> tuple[Span, ...]:
        if self.model.adapter is not None:
            return super()._spans(sample, version)
        return tuple(Span(span.end - span.start, int(span.version)) for span in sample.weight_versions)

    def _load(self, weights: WeightStream, version: int) -> None:
        if self.is_socket:
            for failure in send_weights(weights.pieces(), [self.client], str(version)).values():
                raise failure
            return
        self.trainer = self.trainer or self._connect(weights)
        self.source.stream = weights
        self.client.version = version
        self.trainer.send_weights()
        assert self.llm.get_weight_version() == str(version)

    def checksums(self) -> dict[str, str]:
        """The checksum of each weight as vLLM received it; of adapters, as vLLM was handed them."""
        if self.model.adapter is not None:
            return super().checksums()
        return self.llm.collective_rpc("received_checksums")[0]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what has died cannot be asked to
            self.llm.llm_engine.engine_core.shutdown()
        self.stepping.close()


def _raise_when_it_dies(core: Any) -> None:
    """vLLM's synchronous client (0.32) waits forever for the answers of a process that was killed."""

    def watch(sentinels: list[Any]) -> None:
        connection.wait(sentinels)
        error = RuntimeError("vLLM's process has ended")
        core.resources.engine_dead = True  # refuses what is asked from here on
        core.outputs_queue.put_nowait(error)
        for future in list(core.utility_results.values()):
            future.set_exception(error)

    threading.Thread(target=watch, args=(core.resources.engine_manager.sentinels(),), daemon=True).start()


class _Client:
    """The four methods through which vLLM's trainers, and `send_weights`, speak to a vLLM."""

    local_address = "127.0.0.1"
    num_workers = 1

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Pauses the requests under way, and empties the caches, which the old weights made."""
        self.llm.llm_engine.engine_core.call_utility("pause_scheduler", "keep", True)
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def abort(self) -> None:
        """Does nothing: the process is closed with this one, which ends all calls."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Goes on with the requests: each computes its keys and values again."""
        self.llm.finish_weight_update(weight_version or str(self.version))
        self.llm.llm_engine.engine_core.call_utility("resume_scheduler")


def _init_info(backend: str, config: VLLMConfig) -> Any:
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    # Both ends are on this machine. vLLM's own address of it may be another one's, if machines share VLLM_HOST_IP.
    return NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 1 + config.tensor_parallel_size, rank=0)


def stream_source(stream: WeightStream) -> Any:
    """A stream in the form that vLLM's trainers take. The attribute ``stream`` is the stream to send now.

    ``known`` is its metadata, if it is known: asking for it is a collective.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class StreamSource(WeightSource):
        def __init__(self) -> None:
            self.stream = stream
            self.known: Sequence[WeightMetadata] | None = None

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(*fields) for fields in self.known or self.stream.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return self.stream.tensors()

    return StreamSource()


def _process_environment(world: World, config: VLLMConfig, backend: str) -> dict[str, str]:
    """What vLLM's processes inherit: this process's threads, or their GPUs; but not torchrun's store."""
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if threading.current_thread() is threading.main_thread():  # Linux tells of the end of the thread that starts it
        common[ENDS_WITH_PARENT] = str(os.getpid())
    device = world.device
    if device.type == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all ranks' would share the same cores
        return common | {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": binding}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    local_rank = device.index or 0
    if backend == "ipc":  # the same GPU
        return common | {"CUDA_VISIBLE_DEVICES": visible[local_rank]}
    first = world.local_size + local_rank * config.tensor_parallel_size  # nccl: those after the machine's trainers'
    return common | {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + config.tensor_parallel_size])}
