"""Worker processes for code that may hang, crash or be a model's, and the guard that outlives the trainer."""

from rlft_fast.isolation.guard import GUARD, MARK, end_worker
from rlft_fast.isolation.process import environment_of_worker, outlive_requests_to_stop

__all__ = ["GUARD", "MARK", "end_worker", "environment_of_worker", "outlive_requests_to_stop"]
