"""A model is built without memory, wrapped, and sharded over the ranks.

build     from a model folder and a configuration to a sharded model
float8    linear layers that multiply in float8
graphs    CUDA graphs of the backbone's passes
blocks    recompute the activations of repeated blocks, compile the blocks
wrap      which modules FSDP2 shards as units, and how the units behave
mesh      which ranks share one copy of a model
"""

from rlft_fast.engine.sharding.blocks import checkpoint_activations, offload_inputs
from rlft_fast.engine.sharding.build import (
    build_model,
    freeze,
    is_wrapped,
    prepare_blocks,
    require_own_numbers,
    require_same_model,
    shard,
    state_bytes,
)
from rlft_fast.engine.sharding.float8 import float8_layers, multiply_in_float8, require_float8
from rlft_fast.engine.sharding.graphs import (
    CudaRecorder,
    Recorder,
    Replay,
    drop_graphs,
    require_graphs,
    run_in_graphs,
    warn_of_recording,
)
from rlft_fast.engine.sharding.mesh import device_memory, host_memory, resolve_shard_size, shard_numel
from rlft_fast.engine.sharding.narrow import narrowed
from rlft_fast.engine.sharding.wrap import (
    decoder_blocks,
    describe_units,
    discard_gradients,
    find_units,
    gathered,
    hand_over_gradients,
    move_gradients,
    reduce_gradients,
    reshard,
)

__all__ = [
    "CudaRecorder",
    "Recorder",
    "Replay",
    "build_model",
    "checkpoint_activations",
    "decoder_blocks",
    "describe_units",
    "device_memory",
    "discard_gradients",
    "drop_graphs",
    "find_units",
    "float8_layers",
    "freeze",
    "gathered",
    "hand_over_gradients",
    "host_memory",
    "is_wrapped",
    "move_gradients",
    "multiply_in_float8",
    "narrowed",
    "offload_inputs",
    "prepare_blocks",
    "reduce_gradients",
    "require_float8",
    "require_graphs",
    "require_own_numbers",
    "require_same_model",
    "reshard",
    "resolve_shard_size",
    "run_in_graphs",
    "shard",
    "shard_numel",
    "state_bytes",
    "warn_of_recording",
]
