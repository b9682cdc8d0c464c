"""The FSDP2 engine: a model, a head, and an optimizer, on one process or many."""

from rlft_fast.engine.checkpoint import CheckpointError, CheckpointManager
from rlft_fast.engine.export import export_hf, export_run
from rlft_fast.engine.fsdp import FSDPEngine

__all__ = ["CheckpointError", "CheckpointManager", "FSDPEngine", "export_hf", "export_run"]
