"""What a run needs per rank, from simulated engines: memory, token cap, communication."""

from rlft_fast.engine.memory.engine import MemoryPlanError
from rlft_fast.engine.memory.fit import DoesNotFitError, check_run
from rlft_fast.engine.memory.run import MemoryPlan, largest_actor_max_tokens, longest_sequence, plan_memory

__all__ = [
    "DoesNotFitError",
    "MemoryPlan",
    "MemoryPlanError",
    "check_run",
    "largest_actor_max_tokens",
    "longest_sequence",
    "plan_memory",
]
