"""Log-probabilities of a few ids of each row in place of its target's alone: `support_logprob`, `top_logprob`."""

from rlft_fast.ops.logprob.ids.support import support_logprob, support_logprob_loss
from rlft_fast.ops.logprob.ids.top import TopLogprob, top_logprob

__all__ = ["TopLogprob", "support_logprob", "support_logprob_loss", "top_logprob"]
