"""What a run needs per rank, from simulated engines: memory, token cap, communication."""

from rlft_fast.engine.memory.gate import DoesNotFitError, check_run
from rlft_fast.engine.memory.plan import PlanError
from rlft_fast.engine.memory.run_plan import RunPlan, largest_actor_max_tokens, longest_sequence, plan_run

__all__ = [
    "DoesNotFitError",
    "PlanError",
    "RunPlan",
    "check_run",
    "largest_actor_max_tokens",
    "longest_sequence",
    "plan_run",
]
