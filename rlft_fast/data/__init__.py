"""Packed batches, and the plan that cuts them into micro-batches."""

from rlft_fast.data.batch import Batch
from rlft_fast.data.planning import MicroBatchPlan, plan_micro_batches

__all__ = ["Batch", "MicroBatchPlan", "plan_micro_batches"]
