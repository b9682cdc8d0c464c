"""vLLM itself: the features that it must have, its start, and how it takes weights.

A vLLM inside the training process changes settings of the process when it starts: the number of threads, and torch's
random state. They are restored after the start.
"""

import contextlib
import gc
import importlib.util
import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlft_fast.config import RolloutConfig, VLLMConfig
from rlft_fast.engine import FSDPEngine, checksum
from rlft_fast.world import (
    ensure_process_group,
    forked_rng,
    get_local_world_size,
    get_rank,
    get_world_size,
)

_VERSIONS = "0.30 to 0.33; the tests run with 0.32"
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1"}


def check_vllm(config: VLLMConfig, device: torch.device) -> None:
    """Refuses what cannot work, before anything is started.

    Raises:
        ValueError: vLLM is missing, lacks an interface that is used here, or the settings do not fit the device.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "rollout.backend is vllm, which is not installed: pip install vllm (on a CPU make install-vllm), or choose "
            "rollout.backend: hf"
        )
    if missing := _missing_features(config.process):
        import vllm

        raise ValueError(f"vLLM {vllm.__version__} has no {missing}: install a version that does ({_VERSIONS})")
    if config.tensor_parallel > 1 and device.type != "cuda":
        raise ValueError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel}: on CPUs vLLM would wait more for other "
            "processes than it computes; set it to 1"
        )
    if get_world_size() % config.tensor_parallel:
        raise ValueError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel}, which does not divide the "
            f"{get_world_size()} processes: start a multiple of it, or lower it"
        )
    if config.transfer in ("ipc", "nccl") and device.type != "cuda":
        raise ValueError(f"rollout.vllm.transfer {config.transfer} needs GPUs: leave it out")
    if config.process == "separate" and device.type == "cuda":
        _check_separate_gpus(config, transfer_backend(config, device), torch.cuda.device_count())
    if config.check_weights and config.process == "colocated" and get_world_size() == 1:
        raise ValueError(
            "rollout.vllm.check_weights compares what the processes hand to the vLLM inside them, and one process has "
            "nothing to compare with: leave it out, or use process: separate"
        )
    if config.check_weights and config.process == "separate" and device.type == "cuda":
        raise ValueError(
            "rollout.vllm.check_weights needs to see the weights on arrival, which vLLM's own transfers do not show: "
            "leave it out, or use process: colocated"
        )


def transfer_backend(config: VLLMConfig, device: torch.device) -> str:
    """How weights are sent to a separate process."""
    if config.transfer != "auto":
        return config.transfer
    return "ipc" if device.type == "cuda" else "shared_memory"


def _check_separate_gpus(config: VLLMConfig, transfer: str, num_gpus: int) -> None:
    size, trainers = config.tensor_parallel, get_local_world_size()
    if transfer == "ipc" and size > 1:
        raise ValueError(
            f"rollout.vllm.tensor_parallel is {size}, but with transfer ipc a separate vLLM has the GPU of its trainer "
            "alone: set it to 1, or use transfer: nccl or process: colocated"
        )
    if transfer == "nccl" and trainers * (1 + size) > num_gpus:
        raise ValueError(
            f"rollout.vllm.transfer nccl needs GPUs beside those that train, {trainers} x (1 + tensor_parallel {size}) "
            f"on this machine, which has {num_gpus}: start fewer processes, or use transfer: ipc"
        )


def _missing_features(process: str) -> str | None:
    """Versions are told apart by what they have, not by their number."""
    set_environment()
    from vllm import LLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "weights_iterator" not in inspect.signature(GPUModelRunner.reload_weights).parameters:
        return "reload_weights(weights_iterator=...)"
    if process == "separate":
        if not hasattr(LLM, "start_weight_update"):
            return "LLM.start_weight_update()"
        from vllm.distributed.weight_transfer import factory

        if not hasattr(factory, "WeightTransferTrainerFactory"):
            return "WeightTransferTrainerFactory"
    return None


def set_environment() -> None:
    """Sets environment variables that vLLM reads on import. Variables that the user has set stay."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


class VLLMEngine:
    """The common part of vLLM in this process and vLLM in another: sampling, and a sleep that new weights end.

    Args:
        engine: the policy.
        config: of the rollout.

    Attributes:
        llm: vLLM's own ``LLM``, which subclasses start.
    """

    llm: Any

    def __init__(self, engine: FSDPEngine, config: RolloutConfig) -> None:
        self.engine = engine
        self.dtype = getattr(torch, engine.config.compute_dtype)
        self.check_weights = config.vllm.check_weights
        self.sleeps = engine.device.type == "cuda"
        self.asleep = False

    def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    def sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=2)  # the weights are dropped, too: the next sync brings new ones
            self.asleep = True

    @contextlib.contextmanager
    def _taking_weights(self, weights: Iterator[Any]) -> Iterator[None]:
        """Around a change of the weights: memory for them first, for the key-value cache, which is emptied, after.

        Whatever vLLM does, the stream of weights is iterated to its end, since the ranks gather together.
        """
        with self.engine.eval_mode(), to_the_end(weights):
            if self.asleep:
                self._wake("weights")
            yield
        if self.asleep:
            self._wake("kv_cache")
            self.asleep = False
        self.llm.reset_prefix_cache()

    def _wake(self, part: str) -> None:
        """Its memory comes from the device itself, of which torch still holds what the training has needed."""
        torch.cuda.empty_cache()
        self.llm.wake_up([part])


class ColocatedEngine(VLLMEngine):
    """vLLM in this process.

    Args:
        engine: the policy.
        config: of the rollout.
        max_sequence_tokens: most tokens of a sequence.
    """

    def __init__(self, engine: FSDPEngine, config: RolloutConfig, max_sequence_tokens: int) -> None:
        super().__init__(engine, config)
        ensure_process_group()
        os.environ.setdefault("RANK", str(get_rank()))
        os.environ.setdefault("LOCAL_RANK", str(engine.device.index or 0))
        with _undisturbed():
            self.llm = start_llm(
                engine, config, max_sequence_tokens,
                distributed_executor_backend="external_launcher", enable_sleep_mode=self.sleeps,
            )  # fmt: skip
        self.llm.llm_engine.engine_core._finalizer.detach()  # it would end the training's process group

    def load(self, version: int) -> None:
        """Takes over the policy's weights; all ranks together."""
        self.handed_over: dict[str, str] = {}
        weights = self.engine.named_weights(self.dtype)
        with self._taking_weights(weights), _nothing_left_out():
            stream = _noting_checksums(weights, self.handed_over) if self.check_weights else weights
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
            self.llm.apply_model(renew_packed_weights)

    def checksums(self) -> dict[str, str]:
        """Of each weight as vLLM was handed it."""
        return self.handed_over

    def close(self) -> None:
        """Ends vLLM, but for its process groups: the next one takes them over, since all live in this process's."""
        llm, self.llm = self.llm, None
        if llm is None:  # closed before
            return
        core = llm.llm_engine.engine_core.engine_core
        with contextlib.suppress(Exception):  # it may be closed because it is broken
            core.model_executor.shutdown()
        del llm, core
        gc.unfreeze()  # vLLM freezes all that is there when it starts
        gc.collect()
        if self.sleeps:
            torch.cuda.empty_cache()


def start_llm(engine: FSDPEngine, config: RolloutConfig, max_sequence_tokens: int, **options: Any) -> Any:
    set_environment()
    from vllm import LLM

    on_cpu = engine.device.type == "cpu"
    if on_cpu:
        options["kv_cache_memory_bytes"] = int(config.vllm.cpu_cache_gib * 2**30)
    else:
        options["gpu_memory_utilization"] = config.vllm.gpu_memory_utilization
    return LLM(
        engine.path,
        dtype=engine.config.compute_dtype,
        load_format="dummy",  # the first sync brings the weights, and what it left out would show at once
        max_model_len=max_sequence_tokens,
        max_num_seqs=config.batch_size,
        tensor_parallel_size=config.vllm.tensor_parallel,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after temperature and top-k
        max_logprobs=-1,  # as many as top-k keeps
        generation_config="vllm",  # not the model's own sampling defaults
        enable_prefix_caching=True,
        enforce_eager=on_cpu,  # compiling takes minutes there
        skip_tokenizer_init=not config.stop,
        **options,
    )


def renew_packed_weights(model: nn.Module) -> None:
    """Has vLLM pack anew, after a reload, what it multiplies by in packed copies on CPUs.

    A reload (0.32) renews those of the layers that get weights, but for two, which it would go on sampling with in a
    wrong form: a head that is tied to the embedding gets none, and experts are packed when they are first loaded only.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    embeddings = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and any(module.weight is embedding.weight for embedding in embeddings):
            method.process_weights_after_loading(module)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the number of threads and the random states, which vLLM changes on its start."""
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    with forked_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)


@contextlib.contextmanager
def to_the_end(stream: Iterator[Any]) -> Iterator[None]:
    """Afterwards iterates the stream to its end, also after an error: all ranks gather together."""
    try:
        yield
    finally:
        for _ in stream:
            pass


@contextlib.contextmanager
def _nothing_left_out() -> Iterator[None]:
    """Raises if vLLM warns of weights that it was not given."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload")
    handler = _Warnings(logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if handler.messages:
        raise RuntimeError(f"vLLM did not get all weights of its model: {handler.messages[0]}")


class _Warnings(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not loaded" in record.msg:
            self.messages.append(record.getMessage())


def _noting_checksums(weights: Iterator[Any], received: dict[str, str]) -> Iterator[Any]:
    for name, weight in weights:
        received[name] = checksum(weight)
        yield name, weight
