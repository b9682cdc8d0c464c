"""The policy's adapters for a vLLM on this machine, which computes with them beside the weights of the model's folder.

vLLM reads adapters from files of PEFT. The files lie in shared memory, and are there only while vLLM reads them.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from rlft_fast.config import LARGEST_VLLM_RANK
from rlft_fast.engine import WeightStream
from rlft_fast.models import image_family
from rlft_fast.rollout.types import SampledModel

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_VLLM_RANK)  # that vLLM makes room for
_SHARED_MEMORY = Path("/dev/shm")
_NAME, _NUMBER = "policy", 1  # by which vLLM knows the adapter


def check_adapter(model: SampledModel) -> None:
    """Refuses what vLLM cannot compute with adapters, before anything is started.

    Raises:
        ValueError: the model or its device do not fit.
    """
    instead = "leave rollout.vllm.adapter out, for merged weights"
    if model.device.type == "cuda" and model.dtype == torch.float32:
        raise ValueError(
            f"vLLM computes with adapters of bfloat16 on a GPU, and samples in float32 here: {instead}, or set "
            "rollout.dtype: bfloat16"
        )
    if image_family(model.path) is not None:
        raise ValueError(f"vLLM is given no adapters of a model that takes images: {instead}")


def missing_for_adapters() -> str | None:
    """The first needed interface that this vLLM lacks."""
    from vllm import EngineArgs
    from vllm.lora.request import LoRARequest

    for kind, name in ((LoRARequest, "load_inplace"), (EngineArgs, "lora_target_modules")):
        if name not in inspect.signature(kind).parameters:
            return f"{kind.__name__}({name}=...)"
    return None


def adapter_options(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Options of vLLM's engine.

    Args:
        adapter: entries of ``adapter_config.json``.
    """
    return {
        "enable_lora": True,
        "max_lora_rank": min((rank for rank in _RANKS if rank >= adapter["r"]), default=adapter["r"]),
        "max_loras": 1,
        # Other layers would compute with adapters of zeros, the head among them.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapter["target_modules"]}),
        "load_format": "hf",  # the weights beside the adapters, which no sync brings
        "worker_extension_cls": "rlft_fast.rollout.vllm.worker.WorkerExtension",
    }


def load_adapter(llm: Any, weights: WeightStream, adapter: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Has vLLM take adapters in place of the adapters that it has.

    Args:
        llm: vLLM's ``LLM``.
        weights: of the adapters, by PEFT's names.
        adapter: entries of ``adapter_config.json``.

    Returns:
        What requests name the adapters by, and the adapters.

    Raises:
        RuntimeError: vLLM did not take all of them.
    """
    from vllm.lora.request import LoRARequest

    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.tensors()}
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="rlft_fast_adapter_", dir=place) as folder:
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        Path(folder, "adapter_config.json").write_text(json.dumps(adapter))
        taken = llm.llm_engine.add_lora(LoRARequest(_NAME, _NUMBER, folder, load_inplace=True))
    left = [name for names in llm.collective_rpc("unused_adapters", args=(_NUMBER,)) for name in names]
    if not taken or left:
        raise RuntimeError(f"vLLM did not take all adapters: {', '.join(left[:3]) or 'it refused them'}")
    return LoRARequest(_NAME, _NUMBER, folder), tensors
