"""The memory that a run needs per rank, planned before the run from simulated engines.

fit           refuses a run that does not fit into memory, and says what would make it fit
decisions     settings that lower a run's memory
search        the fastest combination of settings with which a run fits
run           all models of a run and the generator, phase by phase
processes     which models are in one process, and which processes share a device
engine        one model: memory by part, largest token cap, bytes sent per step
generator     vLLM's memory, or the memory of transformers' ``generate``
simulation    runs the real model code on tensors without data, and records the peak
repeats       models with few blocks stand for a model with many equal blocks
trace         the bytes after every operator, for any number of tokens
tracker       bytes that are allocated while operators run
"""

from rlft_fast.engine.memory.decisions import changed
from rlft_fast.engine.memory.engine import MemoryPlanError, plan_engine_memory
from rlft_fast.engine.memory.fit import (
    DoesNotFitError,
    advice,
    as_options,
    check_run,
    check_samples,
    choose,
    fitting_changes,
)
from rlft_fast.engine.memory.run import MemoryPlan, largest_actor_max_tokens, plan_memory, surely_exceeds

__all__ = [
    "DoesNotFitError",
    "MemoryPlan",
    "MemoryPlanError",
    "advice",
    "as_options",
    "changed",
    "check_run",
    "check_samples",
    "choose",
    "fitting_changes",
    "largest_actor_max_tokens",
    "plan_engine_memory",
    "plan_memory",
    "surely_exceeds",
]
