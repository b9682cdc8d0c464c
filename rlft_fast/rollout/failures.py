"""Errors of a generator. They are raised on all ranks together."""

import math
from collections.abc import Sequence

from rlft_fast.errors import RunError
from rlft_fast.rollout.types import Completion
from rlft_fast.world import any_rank


class RolloutError(RunError):
    """The generator failed: it died again after a restart, or the policy's logits are not finite."""


class NonFiniteLogitsError(RolloutError):
    """The policy gives no distribution to sample from."""


def require_finite(groups: Sequence[Sequence[Completion]]) -> None:
    """Requires finite log-probabilities of all sampled tokens, on all ranks.

    Args:
        groups: this rank's completions.

    Raises:
        NonFiniteLogitsError: a log-probability is not finite on some rank; raised on all ranks.
    """
    finite = all(math.isfinite(x) for group in groups for completion in group for x in completion.logprobs)
    if any_rank(not finite):
        raise NonFiniteLogitsError("the policy's logits are not finite")
