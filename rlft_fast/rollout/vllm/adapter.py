"""The policy's adapters for a vLLM on this machine, which computes with them beside the weights of the model's folder.

vLLM reads adapters from files of PEFT. The files lie in shared memory where it has room, else in the folder for
temporary files, and are there only while vLLM reads them.
"""

import inspect
import json
import os
import shutil
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


def place_for(num_bytes: int) -> Path | None:
    """Shared memory, if each process of this machine can write so much there: a container may have 64 MB. None: a disk.

    Args:
        num_bytes: of the adapters.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > (1 + processes) * num_bytes
    return _SHARED_MEMORY if has_room else None


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
    place = place_for(sum(tensor.nbytes for tensor in tensors.values()))
    with TemporaryDirectory(prefix="rlft_fast_adapter_", dir=place) as folder:
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        Path(folder, "adapter_config.json").write_text(json.dumps(adapter))
        taken = llm.llm_engine.add_lora(LoRARequest(_NAME, _NUMBER, folder, load_inplace=True))
    left = [name for names in llm.collective_rpc("unused_adapters", args=(_NUMBER,)) for name in names]
    if not taken or left:
        raise RuntimeError(f"vLLM did not take all adapters: {', '.join(left[:3]) or 'it refused them'}")
    return LoRARequest(_NAME, _NUMBER, folder), tensors
