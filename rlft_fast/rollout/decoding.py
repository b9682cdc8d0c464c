"""Decodes models that take a `RowCache`: tokens enter the cache in place, and equal beginnings run once.

A row is a prompt with tokens that one or more completions have in common. A group of samples begins as one row, which
branches where the samples differ. A row whose completions have all ended leaves at once: another row takes its place.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlft_fast.models import Ends, PolicyModel, RowCache, RowStates
from rlft_fast.rollout.graphs import DecodeGraphs
from rlft_fast.rollout.sampling import Choice, Prompts, Sampled, choose
from rlft_fast.rollout.types import SamplingParams


def decode(
    model: PolicyModel, prompts: Prompts, params: SamplingParams, ends: Ends, graphs: DecodeGraphs | None = None
) -> list[Sampled]:
    """Samples completions, in their order. Each stops at its end, but a stop text may be found late (`Ends`)."""
    device, num_completions = prompts.ids_GL.device, len(prompts.limits)
    most_tokens = prompts.ids_GL.shape[1] + max(prompts.limits) - 1  # the last token is never run
    if graphs is None:
        cache = RowCache(model.model, num_completions, most_tokens, keeps_all=any(prompts.keeps))
    else:
        cache = graphs.cache(num_completions, most_tokens)
    next_logits = model.next_logits if graphs is None else graphs.next_logits
    token_U, padding_U = prompts.ids_GL[:, -1], (prompts.mask_GL == 0).sum(1)
    if prompts.num_begun:
        cache.begin(prompts.begun, padding_U.tolist(), prompts.num_begun)
    prompts.begun.clear()
    position_U = model.prefill_rows(prompts.ids_GL, prompts.mask_GL, cache, prompts.images)
    rows = [prompt for prompt, count in enumerate(prompts.counts) for _ in range(count)]
    running = [*range(num_completions)]
    sampled = [Sampled() for _ in running]
    for step in range(max(prompts.limits)):
        logits_UV = next_logits(token_U, position_U, padding_U, cache)
        uniform_B = None if prompts.uniform_BN is None else prompts.uniform_BN[running, step]
        choice = choose(logits_UV, torch.tensor(rows, device=device), uniform_B, params)
        _append([sampled[number] for number in running], choice)
        left = [i for i, number in enumerate(running) if not _has_ended(sampled[number], prompts.limits[number], ends)]
        leaving = sorted({*range(len(running))} - {*left})
        _keep({i: sampled[running[i]] for i in leaving if prompts.keeps[running[i]]}, rows, padding_U, cache)
        if not left:
            break
        pairs = [(rows[i], sampled[running[i]].token_ids[-1]) for i in left]
        running = [running[i] for i in left]
        placed = place(pairs)
        rows = placed.rows
        parents, tokens, sources, targets = (
            torch.tensor(x, dtype=torch.int64, device=device)
            for x in (placed.parents, placed.tokens, placed.sources, placed.targets)
        )
        token_U, position_U, padding_U = tokens, position_U[parents] + 1, padding_U[parents]
        cache.copy_rows(sources, targets, most_rows=len(running))
    return sampled


def _append(sampled: Sequence[Sampled], choice: Choice) -> None:
    for completion, token, logprob in zip(sampled, choice.token_B.tolist(), choice.logprob_B.tolist(), strict=True):
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
    if choice.support_BK is not None:
        for completion, support in zip(sampled, choice.support_BK.cpu().split(1), strict=True):
            completion.supports.append(support)


def _keep(leaving: Mapping[int, Sampled], rows: Sequence[int], padding_U: Tensor, cache: RowCache) -> None:
    """Gives completions the keys and values of their rows; those of one row share them."""
    copies: dict[int, RowStates] = {}
    for i, completion in leaving.items():
        row = rows[i]
        if row not in copies:
            copies[row] = cache.row(row, int(padding_U[row]))
        completion.states = copies[row]


def _has_ended(sampled: Sampled, limit: int, ends: Ends) -> bool:
    tokens = sampled.token_ids
    return len(tokens) == limit or tokens[-1] in ends.token_ids or ends.has_text(tokens)


class Placed(NamedTuple):
    """Where the rows of the next pass are."""

    rows: list[int]
    """The row of each completion."""
    parents: list[int]
    """For each row the row of the last pass that it continues."""
    tokens: list[int]
    """For each row its next token."""
    sources: list[int]
    """Rows to copy in the cache."""
    targets: list[int]
    """Where each source goes. No target is a source."""


def place(pairs: Sequence[tuple[int, int]]) -> Placed:
    """Places the rows that continue a row with a token, so that few rows move.

    The first continuation of a row stays in the place of the row, unless fewer rows are left.

    Args:
        pairs: for each completion its row and its next token.
    """
    distinct = dict.fromkeys(pairs)
    first = {pair[0]: pair for pair in reversed(distinct)}
    stays = {pair: row for row, pair in first.items() if row < len(distinct)}
    moves = [pair for pair in distinct if pair not in stays]
    targets = sorted({*range(len(distinct))} - {*stays.values()})
    places = stays | dict(zip(moves, targets, strict=True))
    ordered = sorted(places, key=places.__getitem__)
    return Placed(
        rows=[places[pair] for pair in pairs],
        parents=[row for row, _ in ordered],
        tokens=[token for _, token in ordered],
        sources=[row for row, _ in moves],
        targets=targets,
    )
