"""The FSDP2 engine: a model, a head, and an optimizer, on one process or many."""

from rlft_fast.errors import needing_train

with needing_train():
    from rlft_fast.engine.checkpoint import (
        CheckpointError,
        CheckpointManager,
        HubRepository,
        Loaded,
        adapter_config,
        adapter_stream,
        export_hf,
        export_run,
        find_start,
        is_export,
        remove_export,
        require_exportable,
        start_checksum,
        step_of,
    )
    from rlft_fast.engine.facts import EngineFacts
    from rlft_fast.engine.flops import ModelFlops, model_flops, peak_flops
    from rlft_fast.engine.forward import power_of_two
    from rlft_fast.engine.fsdp import FSDPEngine
    from rlft_fast.engine.loss import TRAINED, Loss, Output, weighted
    from rlft_fast.engine.protocol import Engine, Future, results
    from rlft_fast.engine.roles import check_names, role_engine
    from rlft_fast.engine.schedule import Schedule
    from rlft_fast.engine.torch_optim import require_trainable
    from rlft_fast.engine.weight_sync import BUCKET_BYTES, Piece, PieceJoiner, WeightMetadata, WeightStream, checksum

__all__ = [
    "BUCKET_BYTES",
    "TRAINED",
    "CheckpointError",
    "CheckpointManager",
    "Engine",
    "EngineFacts",
    "FSDPEngine",
    "Future",
    "HubRepository",
    "Loaded",
    "Loss",
    "ModelFlops",
    "Output",
    "Piece",
    "PieceJoiner",
    "Schedule",
    "WeightMetadata",
    "WeightStream",
    "adapter_config",
    "adapter_stream",
    "check_names",
    "checksum",
    "export_hf",
    "export_run",
    "find_start",
    "is_export",
    "model_flops",
    "peak_flops",
    "power_of_two",
    "remove_export",
    "require_exportable",
    "require_trainable",
    "results",
    "role_engine",
    "start_checksum",
    "step_of",
    "weighted",
]
