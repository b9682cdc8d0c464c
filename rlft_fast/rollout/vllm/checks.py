"""Settings with which vLLM cannot work on this machine are refused before anything is started."""

import difflib
import importlib.util
import inspect

import torch

from rlft_fast.config import VLLMConfig
from rlft_fast.rollout.vllm.adapter import missing_for_adapters
from rlft_fast.rollout.vllm.colocated import set_environment
from rlft_fast.world import World

_VERSIONS = "0.30 to 0.33; the tests run with 0.32"


def check_vllm(config: VLLMConfig, world: World) -> None:
    """Refuses settings that cannot work, before anything is started.

    Raises:
        ValueError: vLLM is missing, lacks an interface that is used here, or the settings do not fit the device.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "rollout.backend is vllm, which is not installed: pip install vllm (on a CPU make install-vllm), or choose "
            "rollout.backend: hf"
        )
    if missing := _missing_features(config):
        import vllm

        raise ValueError(f"vLLM {vllm.__version__} has no {missing}: install a version that does ({_VERSIONS})")
    _check_engine_options(config)
    device = world.device
    if config.tensor_parallel_size > 1 and device.type != "cuda":
        raise ValueError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel_size}: on CPUs vLLM would wait more for other "
            "processes than it computes; set it to 1"
        )
    if config.process == "colocated" and world.size % config.tensor_parallel_size:
        raise ValueError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel_size}, which does not divide the "
            f"{world.size} processes: start a multiple of it, or lower it"
        )
    if config.transfer == "socket" and config.process == "separate" and device.type == "cuda":
        raise ValueError("rollout.vllm.transfer socket is for CPUs: leave it out, or name ipc or nccl")
    if config.transfer in ("ipc", "nccl") and device.type != "cuda":
        raise ValueError(f"rollout.vllm.transfer {config.transfer} needs GPUs: leave it out")
    if config.process == "separate" and device.type == "cuda":
        _check_separate_gpus(config, transfer_backend(config, device), torch.cuda.device_count(), world.local_size)
    if config.check_weights and config.process == "colocated" and world.size == 1:
        raise ValueError(
            "rollout.vllm.check_weights compares what the processes hand to the vLLM inside them, and one process has "
            "nothing to compare with: leave it out, or use process: separate"
        )
    if config.check_weights and config.process == "separate" and device.type == "cuda":
        raise ValueError(
            "rollout.vllm.check_weights needs to see the weights on arrival, which vLLM's own transfers do not show: "
            "leave it out, or use process: colocated"
        )


def _check_engine_options(config: VLLMConfig) -> None:
    """Raises ValueError for names that this vLLM's engine does not have."""
    if not config.engine_options:
        return
    from vllm import EngineArgs, __version__

    known = inspect.signature(EngineArgs).parameters
    for name in config.engine_options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            instead = f"did you mean {near[0]}?" if near else "leave it out"
            raise ValueError(
                f"rollout.vllm.engine_options has {name}, which vLLM {__version__} does not have: {instead}"
            )


def transfer_backend(config: VLLMConfig, device: torch.device) -> str:
    """How weights are sent to a separate process."""
    if config.transfer != "auto":
        return config.transfer
    return "ipc" if device.type == "cuda" else "socket"


def _check_separate_gpus(config: VLLMConfig, transfer: str, num_gpus: int, trainers: int) -> None:
    size = config.tensor_parallel_size
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


def _missing_features(config: VLLMConfig) -> str | None:
    """The first needed interface that this vLLM lacks. Version numbers are not compared."""
    set_environment()
    from vllm import LLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "weights_iterator" not in inspect.signature(GPUModelRunner.reload_weights).parameters:
        return "reload_weights(weights_iterator=...)"
    if config.adapter and (missing := missing_for_adapters()):
        return missing
    if config.process == "separate":
        from vllm.outputs import CompletionOutput

        if not hasattr(LLM, "start_weight_update"):
            return "LLM.start_weight_update()"
        from vllm.distributed.weight_transfer import factory

        if not hasattr(factory, "WeightTransferTrainerFactory"):
            return "WeightTransferTrainerFactory"
        if "weight_versions" not in inspect.signature(CompletionOutput).parameters:
            return "CompletionOutput.weight_versions"
    return None
