"""Samples of two prompts, and the numbers of their tokens."""

from collections.abc import Sequence

from rlft_fast.data import Samples
from rlft_fast.rollout import Completion, Span, to_samples
from rlft_fast.run.records.tokens import token_columns
from rlft_fast.trainer.collect.experience import build_batch, scored_samples, with_rewards

# Two prompts: no reward, a cut-off completion, a completion of one token, tokens of an environment, two versions.
ANSWERS = [
    (0, Completion([5, 6, 9], [-0.5, -1.25, -0.125], "stop", (Span(1, 3), Span(2, 4)), mask=[True, False, True])),
    (0, Completion([7], [-2.0], "stop", (Span(1, 4),))),
    (0, Completion([7, 8], [-1.0, -3.0], "length", (Span(2, 4),))),
    (1, Completion([4], [-0.75], "stop", (Span(1, 4),))),
    (1, Completion([4, 4], [-0.75, -0.25], "length")),
]
REWARDS = [1.0, None, 0.0, 0.5, 0.5]
PROMPTS = [[1, 2], [3]]
SAMPLES = with_rewards(to_samples(ANSWERS), REWARDS)
UNMASKED = with_rewards(to_samples([(row, completion._replace(mask=None)) for row, completion in ANSWERS]), REWARDS)


def columns_of_samples(max_bytes: int = 2**20, **changes):
    """Of `SAMPLES`, whose second sample has no reward, so that it is not learned from."""
    taught = scored_samples(SAMPLES)
    batch = build_batch(taught, PROMPTS)
    assert batch.rollout_logprob_T is not None
    batch = batch.replace(logprob_T=batch.rollout_logprob_T + 1.0, advantage_T=batch.input_ids_T.roll(-1) * 2.0)
    return token_columns(SAMPLES, taught, batch.replace(**changes), max_bytes)


def samples_of(groups: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> Samples:
    """Samples with these rewards, one list for each prompt.

    Args:
        groups: rewards by prompt; NaN where there is none.
        lengths: tokens of each sample; None: one.
    """
    rewards = [reward for group in groups for reward in group]
    rows = [row for row, group in enumerate(groups) for _ in group]
    counts = lengths or [1] * len(rows)
    completions = [Completion([4] * count, [-1.0] * count, "stop") for count in counts]
    return with_rewards(to_samples([*zip(rows, completions, strict=True)]), rewards)
