"""Checkpoints that survive a kill, and export as a Hugging Face folder.

manager     saves, loads and removes the checkpoints of a run
content     the tensors and counters that a checkpoint takes from engines and puts back
manifest    the description of a checkpoint: files with checksums, models with shapes
storage     tensors on disk: each process writes its own parts, any number of processes reads them
export      a Hugging Face folder of a policy or critic
"""

from rlft_fast.engine.checkpoint.export import export_hf, export_run, remove_export, require_exportable
from rlft_fast.engine.checkpoint.manager import CheckpointError, CheckpointManager

__all__ = ["CheckpointError", "CheckpointManager", "export_hf", "export_run", "remove_export", "require_exportable"]
