"""The FSDP2 engine: a model, a head, and an optimizer, on one process or many."""

from rlft_fast.engine.checkpoint import CheckpointError, CheckpointManager, export_hf, export_run
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.engine.loss import Output
from rlft_fast.engine.weight_sync import BUCKET_BYTES, Piece, PieceJoiner, checksum, join_pieces, split_pieces

__all__ = [
    "BUCKET_BYTES",
    "CheckpointError",
    "CheckpointManager",
    "FSDPEngine",
    "Output",
    "Piece",
    "PieceJoiner",
    "checksum",
    "export_hf",
    "export_run",
    "join_pieces",
    "split_pieces",
]
