"""Worker processes for code that may hang, crash or be a model's, and the guard that outlives the trainer."""

from rlft_fast.isolation.process import WorkerProcess, outlive_requests_to_stop

__all__ = ["WorkerProcess", "outlive_requests_to_stop"]
