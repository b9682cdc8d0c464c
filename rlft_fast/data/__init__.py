"""Samples in columns, packed batches, the plan that cuts them, and the layout in which equal prefixes run once."""

from rlft_fast.errors import needing_train

with needing_train():
    from rlft_fast.data.batch import IGNORE_INDEX, Batch, cat_lists, cat_supports
    from rlft_fast.data.images import Images, image_table
    from rlft_fast.data.layout import PackedLayout, count_tokens, pad_sequences, plan_batch, share_prefixes
    from rlft_fast.data.planning import MicroBatchPlan, plan_micro_batches
    from rlft_fast.data.samples import Samples, cat_samples
    from rlft_fast.data.shares import Share, cut_shares, join_outputs

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Images",
    "MicroBatchPlan",
    "PackedLayout",
    "Samples",
    "Share",
    "cat_lists",
    "cat_samples",
    "cat_supports",
    "count_tokens",
    "cut_shares",
    "image_table",
    "join_outputs",
    "pad_sequences",
    "plan_batch",
    "plan_micro_batches",
    "share_prefixes",
]
