"""FSDP2 units as accelerate makes them."""

from types import SimpleNamespace

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


def prepare_as_accelerate(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards the model, in place, by accelerate's own function; accelerate itself picks FSDP on accelerators only."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, mixed_precision="no", is_main_process=True,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names), device=torch.device("cpu"),
    )  # fmt: skip
    assert fsdp2_prepare_model(accelerator, model) is model
    assert isinstance(model.lm_head, FSDPModule)  # one unit with the final norm, and a tied embedding
    assert isinstance(model.model.norm, FSDPModule)
