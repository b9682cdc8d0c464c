"""Checkpoints that survive a kill, and export as a Hugging Face folder.

manager     saves, loads and removes the checkpoints of a run
content     the tensors and counters that a checkpoint takes from engines and puts back
manifest    the description of a checkpoint: files with checksums, models with shapes
storage     tensors on disk: each process writes its own parts, any number of processes reads them
partial     a part of a checkpoint, such as its weights alone
export      a Hugging Face folder of a policy or critic
hub         an export as a repository of the Hub
adapter     the files of an adapter of PEFT
start       weights to start from, whichever of these has them
"""

from rlft_fast.engine.checkpoint.adapter import adapter_config, adapter_stream
from rlft_fast.engine.checkpoint.export import export_hf, export_run, is_export, remove_export, require_exportable
from rlft_fast.engine.checkpoint.hub import HubRepository
from rlft_fast.engine.checkpoint.manager import CheckpointError, CheckpointManager, step_of
from rlft_fast.engine.checkpoint.partial import Loaded
from rlft_fast.engine.checkpoint.start import find_start, load_start, start_checksum

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "HubRepository",
    "Loaded",
    "adapter_config",
    "adapter_stream",
    "export_hf",
    "export_run",
    "find_start",
    "is_export",
    "load_start",
    "remove_export",
    "require_exportable",
    "start_checksum",
    "step_of",
]
