"""The weights of a model folder.

tensors    reads safetensors into the shards of a model, and names a checkpoint's tensors
quantized  dequantizes weights as they are read
checksum   tells a model folder from others
"""

from rlft_fast.models.weights.checksum import model_checksum
from rlft_fast.models.weights.quantized import mark_quantized, take_quantization
from rlft_fast.models.weights.tensors import (
    CheckpointPart,
    build_on_meta,
    check_weights,
    checkpoint_parts,
    checkpoint_tensors,
    keeps_float32,
    load_weights,
    local_part,
    materialize,
    name_kinds,
    name_some,
    stored_dtype,
    stored_names,
)

__all__ = [
    "CheckpointPart",
    "build_on_meta",
    "check_weights",
    "checkpoint_parts",
    "checkpoint_tensors",
    "keeps_float32",
    "load_weights",
    "local_part",
    "mark_quantized",
    "materialize",
    "model_checksum",
    "name_kinds",
    "name_some",
    "stored_dtype",
    "stored_names",
    "take_quantization",
]
