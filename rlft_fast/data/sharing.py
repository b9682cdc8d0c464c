"""Equal prompts run once: the samples of a prompt attend to one copy of it, and what no output depends on never runs.

GRPO answers every prompt several times, so a packed batch repeats each prompt as often. Hidden states of a prompt do
not depend on what follows it; here each becomes one segment, and the completions become segments that attend to it and
to themselves. Outputs and gradients are those of the plain batch, up to the order of additions.

    batch    [p p p a a] [p p p b]        rows    [p p p] [a] [b -> not run if nothing is predicted from it] ...
    queries  [p p p] [a]                  keys    [p p p] [p p p a]

Shapes: T packed tokens, U rows that run, M keys.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data.batch import Batch, cumulative
from rlft_fast.data.planning import MicroBatchPlan, check_lengths, plan_micro_batches

_UNITS_PER_RANK = 4  # enough pieces to balance the ranks; more would repeat prompts for nothing


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Which tokens of a batch run, and what each attends to. On the CPU.

    Args:
        token_index_U: (U,) int64 positions in the batch of the tokens that run.
        row_T: (T,) int64 row that computes each position, -1 where none does.
        cu_seqlens_q: (segments + 1,) int32 boundaries of the segments among the rows.
        cu_seqlens_k: (segments + 1,) int32 boundaries of the keys that each segment attends to. A segment's queries
            are the last of its keys, and attention is causal: query i of m sees the first n - m + i + 1 of n keys.
        key_index_M: (M,) int64 row of each key; None: keys are the rows themselves.
    """

    token_index_U: Tensor
    row_T: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_index_M: Tensor | None


def share_prompts(batch: Batch) -> PackedLayout:
    """The layout in which equal prompts run once, and only tokens that an active position depends on run at all.

    A prompt ends with the first active position of its sequence.

    Args:
        batch: on the CPU.
    """
    prompt_B, used_B = _prompt_and_used_lengths(batch)
    row_T = np.full(batch.num_tokens, -1)
    pieces: list[np.ndarray] = [np.zeros(0, np.int64)]
    keys: list[np.ndarray] = [np.zeros(0, np.int64)]
    num_rows = 0

    def add_segment(positions: np.ndarray, prefix_rows: np.ndarray) -> np.ndarray:
        nonlocal num_rows
        rows = np.arange(num_rows, num_rows + len(positions))
        num_rows += len(rows)
        row_T[positions] = rows
        pieces.append(positions)
        keys.append(np.concatenate([prefix_rows, rows]))
        return rows

    nothing = np.zeros(0, np.int64)
    for members in _same_prompt(batch, prompt_B):
        starts = batch.cu_seqlens.numpy()[members].astype(np.int64)
        prompt, used = prompt_B[members[0]], used_B[members]
        if prompt == 0:
            continue
        if len(members) == 1:
            add_segment(np.arange(starts[0], starts[0] + used[0]), nothing)
            continue
        prefix_rows = add_segment(np.arange(starts[0], starts[0] + prompt), nothing)
        for start, end in zip(starts, starts + used, strict=True):
            row_T[start : start + prompt] = prefix_rows
            if end > start + prompt:
                add_segment(np.arange(start + prompt, end), prefix_rows)
    key_index = np.concatenate(keys)
    shared = len(key_index) > num_rows
    return PackedLayout(
        token_index_U=torch.from_numpy(np.concatenate(pieces)),
        row_T=torch.from_numpy(row_T),
        cu_seqlens_q=_boundaries(pieces[1:]),
        cu_seqlens_k=_boundaries(keys[1:]),
        key_index_M=torch.from_numpy(key_index) if shared else None,
    )


def plan_batch(batch: Batch, max_tokens: int, world_size: int = 1) -> MicroBatchPlan:
    """Plans a batch by the rows that run, keeping sequences with equal prompts together, and units whole.

    Args:
        batch: on the CPU.
        max_tokens: cap on the rows that run in a micro-batch.
        world_size: number of ranks.

    Returns:
        A plan of the batch's sequences, see `plan_micro_batches`.

    Raises:
        ValueError: a sequence or a unit is longer than `max_tokens`.
    """
    check_lengths(batch.lengths, max_tokens)
    prompt_B, used_B = _prompt_and_used_lengths(batch)
    suffix_B = used_B - prompt_B

    groups = _same_prompt(batch, prompt_B)
    prompt_of_B = np.empty(batch.num_sequences, np.int64)  # number of each sequence's prompt
    for number, group in enumerate(groups):
        prompt_of_B[group] = number

    def num_rows(unit: np.ndarray) -> int:
        _, first = np.unique(prompt_of_B[unit], return_index=True)
        return int(prompt_B[unit[first]].sum() + suffix_B[unit].sum())

    if batch.unit_B is not None:
        units = _coupled(batch.unit_B.numpy())
        _check_units(units, [*map(num_rows, units)], max_tokens)
    else:
        share = sum(map(num_rows, groups)) // (_UNITS_PER_RANK * world_size)
        limit = min(max_tokens, max(share, int(used_B.max(initial=0))))
        units = [unit for group in groups for unit in _cut(group, int(prompt_B[group[0]]), suffix_B[group], limit)]
    lengths = np.array([max(num_rows(unit), 1) for unit in units], np.int64)
    plan = plan_micro_batches(lengths, max_tokens, world_size=world_size)
    sizes = np.array([len(units[i]) for i in plan.indices], np.int64)
    indices = np.concatenate([units[i] for i in plan.indices]) if units else plan.indices
    return dataclasses.replace(plan, indices=indices, offsets=cumulative(sizes)[plan.offsets])


def _coupled(unit_B: np.ndarray) -> list[np.ndarray]:
    """The sequences of each unit, in order of first appearance."""
    members: dict[int, list[int]] = {}
    for b, unit in enumerate(unit_B.tolist()):
        members.setdefault(unit, []).append(b)
    return [np.array(unit) for unit in members.values()]


def _check_units(units: list[np.ndarray], num_rows: list[int], max_tokens: int) -> None:
    """Raises ValueError naming the longest unit if it exceeds the cap."""
    rows, unit = max(zip(num_rows, units, strict=True), key=lambda pair: pair[0], default=(0, np.zeros(0)))
    if rows > max_tokens:
        raise ValueError(
            f"the unit of sequences {', '.join(map(str, unit))} has {rows} tokens, more than max_tokens={max_tokens}: "
            "raise max_tokens to at least this length, or couple fewer sequences"
        )


def _prompt_and_used_lengths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(B,) each: tokens up to the first active position, and up to the last one; 0 without any."""
    active = batch.active_index_T.numpy()
    sequence = np.searchsorted(batch.cu_seqlens.numpy(), active, side="right") - 1
    length = active - batch.cu_seqlens.numpy()[sequence] + 1
    prompt_B, used_B = np.zeros((2, batch.num_sequences), np.int64)
    prompt_B[sequence[::-1]] = length[::-1]  # of several assignments the last one stays
    used_B[sequence] = length
    return prompt_B, used_B


def _same_prompt(batch: Batch, prompt_B: np.ndarray) -> list[np.ndarray]:
    """Sequences with equal prompts, in order of first appearance; those without a prompt or images are one group."""
    tokens, starts = batch.input_ids_T.numpy(), batch.cu_seqlens.numpy()
    members: dict[tuple, list[int]] = {}
    images = [*(batch.multi_modal_inputs or {}).values()]
    for b, (start, prompt) in enumerate(zip(starts, prompt_B, strict=False)):
        # Equal tokens do not mean equal prompts where images stand behind them: these have to be the same tensors.
        key = (tokens[start : start + prompt].tobytes(), *(id(values[b]) for values in images))
        members.setdefault(key, []).append(b)
    return [np.array(group) for group in members.values()]


def _cut(group: np.ndarray, prompt: int, suffixes: np.ndarray, limit: int) -> list[np.ndarray]:
    """Cuts a group where the prompt and its completions would exceed the limit."""
    parts, first, rows = [], 0, prompt
    for i, suffix in enumerate(suffixes):
        if rows + suffix > limit and i > first:
            parts.append(group[first:i])
            first, rows = i, prompt
        rows += suffix
    return [*parts, group[first:]]


def _boundaries(pieces: list[np.ndarray]) -> Tensor:
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return torch.from_numpy(cumulative(lengths).astype(np.int32))
