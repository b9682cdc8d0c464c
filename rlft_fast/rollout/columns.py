"""Completions as columns of samples."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data import Samples, cat_lists, cat_supports
from rlft_fast.rollout.types import Completion, Span


def to_samples(answers: Sequence[tuple[int, Completion]]) -> Samples:
    """The columns of completions that this process has sampled. They have no rewards yet.

    Args:
        answers: completions, each with the row of its prompt. The completions of a row stand in the order of their
            numbers.
    """
    rows = [row for row, _ in answers]
    completions = [completion for _, completion in answers]
    numbering: defaultdict[int, count[int]] = defaultdict(count)
    return Samples(
        row_B=torch.tensor(rows, dtype=torch.int64),
        number_B=torch.tensor([next(numbering[row]) for row in rows], dtype=torch.int64),
        length_B=torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64),
        stopped_B=torch.tensor([completion.finish_reason == "stop" for completion in completions], dtype=torch.bool),
        reward_B=torch.full((len(rows),), math.nan, dtype=torch.float64),
        token_ids_T=cat_lists([completion.token_ids for completion in completions], np.int32),
        logprob_T=cat_lists([completion.logprobs for completion in completions], np.float32),
        is_sampled_T=cat_lists([c.mask or [True] * len(c.token_ids) for c in completions], np.bool_),
        weight_version_T=_weight_versions(completions),
        support_TK=_supports(completions),
    )


def _weight_versions(completions: Sequence[Completion]) -> Tensor:
    """(T,) int32"""
    spans = [span for c in completions for span in c.spans or [Span(len(c.token_ids), 0)]]
    versions, counts = [span.weight_version for span in spans], [span.num_tokens for span in spans]
    return torch.from_numpy(np.repeat(np.array(versions, np.int32), np.array(counts, np.int64)))


def _supports(completions: Sequence[Completion]) -> Tensor | None:
    given = [completion.support for completion in completions if completion.support is not None]
    if not given:
        return None
    assert len(given) == len(completions), "samples of one rollout are sampled alike"
    return cat_supports(given)
