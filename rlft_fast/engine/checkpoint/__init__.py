"""Checkpoints that survive a kill, and export as a Hugging Face folder."""

from rlft_fast.engine.checkpoint.export import export_hf, export_run
from rlft_fast.engine.checkpoint.manager import CheckpointError, CheckpointManager

__all__ = ["CheckpointError", "CheckpointManager", "export_hf", "export_run"]
