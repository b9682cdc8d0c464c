"""Log-probabilities of the vocabulary projection and their losses: `linear_logprob`, `support_logprob`."""

from rlft_fast.ops.logprob.gathered import gathered_bytes
from rlft_fast.ops.logprob.ids import TopLogprob, support_logprob, support_logprob_loss, top_logprob
from rlft_fast.ops.logprob.linear import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob.reference import LinearLogprob, LinearLogprobLoss, LossFunction
from rlft_fast.ops.logprob.workspace import default_tile_mib, forward_bytes, scratch_bytes

__all__ = [
    "LinearLogprob",
    "LinearLogprobLoss",
    "LossFunction",
    "TopLogprob",
    "default_tile_mib",
    "forward_bytes",
    "gathered_bytes",
    "linear_logprob",
    "linear_logprob_loss",
    "scratch_bytes",
    "support_logprob",
    "support_logprob_loss",
    "top_logprob",
]
