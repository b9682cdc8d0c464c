"""What can go wrong with a generator, on all ranks at once."""

import math
from collections.abc import Sequence

from rlft_fast.errors import RunError
from rlft_fast.rollout.types import Completion
from rlft_fast.world import any_rank


class RolloutError(RunError):
    """The generator failed: it died again after a restart, or has nothing to sample from."""


class NonFiniteLogitsError(RolloutError):
    """The policy gives no distribution to sample from."""


def require_finite(groups: Sequence[Sequence[Completion]]) -> None:
    """Raises on all ranks if the log-probability of a sampled token is not finite on one: some of its logits are not.

    Args:
        groups: this rank's completions.

    Raises:
        NonFiniteLogitsError: as above.
    """
    finite = all(math.isfinite(x) for group in groups for completion in group for x in completion.logprobs)
    if any_rank(not finite):
        raise NonFiniteLogitsError("the policy's logits are not finite")
