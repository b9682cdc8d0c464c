"""Packed batches, the plan that cuts them into micro-batches, and the layout in which equal prompts run once."""

from rlft_fast.data.batch import IGNORE_INDEX, Batch
from rlft_fast.data.planning import MicroBatchPlan, plan_micro_batches
from rlft_fast.data.sharing import PackedLayout, plan_batch, share_prompts

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "MicroBatchPlan",
    "PackedLayout",
    "plan_batch",
    "plan_micro_batches",
    "share_prompts",
]
