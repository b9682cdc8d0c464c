"""Equal prefixes run once: sequences that begin alike attend to one copy, and what no output depends on never runs.

GRPO answers every prompt several times, prompts have a system message in common, and branches of an episode its first
turns. A hidden state does not depend on the tokens that follow it. So a sequence runs only the tokens that no earlier
sequence has, and they attend to all tokens before them in the sequence. Every position keeps its own term of the loss:
positions of one row read the same hidden state, and their gradients add up in it. Outputs and gradients are those of
the plain batch, up to the order of additions.

    batch    [p p p a b] [p p p a c c] [p p q q]    rows    [p p p] [a] [c] [q]    (the last token predicts nothing)
    queries  [p p p] [a] [c] [q]                    keys    [p p p] [p p p a] [p p p a c] [p p q]

Shapes: T packed tokens, U rows that run, M keys.
"""

import dataclasses
from collections.abc import Hashable, Iterable

import numpy as np
import torch
from torch import Tensor

from rlft_fast.data.batch import Batch, cumulative, token_ranges
from rlft_fast.data.padding import plan_padded
from rlft_fast.data.planning import MicroBatchPlan, check_lengths, plan_micro_batches
from rlft_fast.data.prefixes import PrefixTree, common_length, prefix_tree

_UNITS_PER_RANK = 4  # enough pieces to balance the ranks; more would repeat prompts for nothing
# Each layer copies the keys and values along the path of each sequence: without grouped heads two vectors, where a row
# keeps about sixteen. So the copies take about as much memory as the rows at most, far less with grouped heads.
_PATHS_PER_TOKEN = 8


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
        padded_length: positions of each sequence of a padded batch; None: the sequences are packed.
    """

    token_index_U: Tensor
    row_T: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_index_M: Tensor | None
    padded_length: int | None = None


def pad_sequences(batch: Batch) -> PackedLayout:
    """The layout of a padded batch: the sequences with an active position, up to the last active one of the longest.

    A sequence that is shorter repeats its last token, which no earlier token sees.

    Args:
        batch: on the CPU.
    """
    used_B = _prompt_and_used_lengths(batch)[1]
    start_B, used_B = (x[used_B > 0] for x in (batch.cu_seqlens.numpy()[:-1].astype(np.int64), used_B))
    num_sequences, length = len(used_B), int(used_B.max(initial=1))
    token_index_BL = start_B[:, None] + np.minimum(np.arange(length), used_B[:, None] - 1)
    row_T = np.full(batch.num_tokens, -1)
    row_T[_ranges(start_B, used_B)] = _ranges(length * np.arange(num_sequences), used_B)
    boundaries = _boundaries(np.full(num_sequences, length))
    return PackedLayout(
        token_index_U=torch.from_numpy(token_index_BL.ravel()), row_T=torch.from_numpy(row_T),
        cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, key_index_M=None, padded_length=length,
    )  # fmt: skip


def share_prefixes(batch: Batch) -> PackedLayout:
    """The layout in which equal prefixes run once, and only tokens that an active position depends on run at all.

    Prefixes are equal if their tokens are and the images of their sequences are, sampled tokens or not.

    Args:
        batch: on the CPU.
    """
    prompt_B, used_B = _prompt_and_used_lengths(batch)
    number_B = _prompt_numbers(batch, prompt_B)
    cut_B = np.where(np.bincount(number_B)[number_B] > 1, prompt_B, used_B)
    order_B = number_B.argsort(kind="stable")  # prompt after prompt
    start_B = batch.cu_seqlens.numpy()[:-1][order_B].astype(np.int64)
    cut_B, used_B = cut_B[order_B], used_B[order_B]
    parent_B, shared_B = prefix_tree(batch.input_ids_T.numpy(), start_B, used_B, _image_numbers(batch)[order_B])

    # Every sequence has two segments: its own tokens up to the end of a prompt that others have, too, and the rest.
    end = _interleaved(cut_B, used_B)
    begin = _interleaved(shared_B, np.maximum(shared_B, cut_B))
    size, start = (end - begin).clip(0), start_B.repeat(2)
    token_index_U = _ranges(start + begin, size)
    row_T = np.full(batch.num_tokens, -1)
    row_T[token_index_U] = np.arange(len(token_index_U))
    for own, parent, shared in zip(start_B.tolist(), start_B[parent_B].tolist(), shared_B.tolist(), strict=True):
        row_T[own : own + shared] = row_T[parent : parent + shared]

    runs = size > 0
    key_index_M = torch.from_numpy(row_T[_ranges(start[runs], end[runs])]) if end[runs].sum() > size.sum() else None
    return PackedLayout(
        token_index_U=torch.from_numpy(token_index_U),
        row_T=torch.from_numpy(row_T),
        cu_seqlens_q=_boundaries(size[runs]),
        cu_seqlens_k=_boundaries(end[runs]),
        key_index_M=key_index_M,
    )


def count_tokens(batch: Batch, *, padded: bool = False) -> tuple[int, float]:
    """How many tokens of a batch have to run, and how many pairs of one with itself or a token that it attends to.

    A pair of a token with itself counts as half a pair, so that n tokens have n²/2 of them.

    Args:
        batch: on the CPU.
        padded: whether equal prefixes run as often as they stand there, see `pad_sequences`.
    """
    used_B = _prompt_and_used_lengths(batch)[1]
    shared_B = np.zeros_like(used_B) if padded else _tree(batch, used_B, np.zeros_like(used_B)).shared_B
    return int((used_B - shared_B).sum()), float((used_B**2 - shared_B**2).sum()) / 2


def plan_batch(
    batch: Batch, max_tokens: int, world_size: int = 1, *, micro_batch_size: int | None = None, padded: bool = False
) -> MicroBatchPlan:
    """Plans a batch by the rows that run, keeping sequences with equal prompts together, and units whole.

    A row that sequences of a unit share counts once, and so do the tokens that all sequences of the batch begin with.
    Units that have more in common run fewer rows than planned.

    Short sequences behind a long prefix have few rows, and attend to many keys. The sequences of a micro-batch together
    are at most 8 times as long as `max_tokens`, but for a unit that is longer alone.

    Sequences that will be padded are planned by their lengths instead, so that neighbours have similar lengths.

    Args:
        batch: on the CPU.
        max_tokens: cap on the rows that run in a micro-batch.
        world_size: number of ranks.
        micro_batch_size: cap on the sequences of a micro-batch, too; None: no other cap.
        padded: whether each micro-batch runs padded, see `pad_sequences`.

    Returns:
        A plan of the batch's sequences, see `plan_micro_batches`.

    Raises:
        ValueError: a sequence or a unit is longer than `max_tokens`, or a unit has more sequences than the cap.
    """
    check_lengths(batch.lengths, max_tokens)
    prompt_B, used_B = _prompt_and_used_lengths(batch)
    most = batch.num_sequences if micro_batch_size is None else micro_batch_size
    if batch.unit_B is not None:
        _check_number(_numbers(batch.unit_B.tolist()), most)
    if padded:
        unit_B = np.arange(batch.num_sequences) if batch.unit_B is None else _numbers(batch.unit_B.tolist())
        return plan_padded(used_B, unit_B, max_tokens, world_size, most)
    longest_paths = _PATHS_PER_TOKEN * max_tokens
    if batch.unit_B is not None:
        unit_B = _numbers(batch.unit_B.tolist())
        tree = _tree(batch, used_B, unit_B)
    else:
        number_B = _prompt_numbers(batch, prompt_B)
        tree = _tree(batch, used_B, number_B)
        share = int((used_B - tree.shared_B).sum()) // (_UNITS_PER_RANK * world_size)
        limit = min(max_tokens, max(share, int(used_B.max(initial=0))))
        unit_B = _cut(number_B, prompt_B, used_B, tree, limit, most, longest_paths)
        if unit_B.max(initial=-1) > number_B.max(initial=-1):  # a cut parts sequences from their parents
            tree = _tree(batch, used_B, unit_B)
    num_rows = np.bincount(unit_B, used_B - tree.shared_B).astype(np.int64)
    _check_units(unit_B, num_rows, max_tokens)
    common = _common_prefix(batch, used_B)  # runs once in every micro-batch
    num_rows, max_tokens = (num_rows - common).clip(1), max(max_tokens - common, 1)
    sizes = np.bincount(unit_B, minlength=len(num_rows))
    paths = np.bincount(unit_B, used_B, len(num_rows)).astype(np.int64).clip(max=longest_paths)
    plan = plan_micro_batches(num_rows, max_tokens, world_size=world_size)
    caps = [(num_rows, max_tokens), (sizes, most), (paths, longest_paths)]
    if any(np.diff(cumulative(own[plan.indices])[plan.offsets]).max(initial=0) > cap for own, cap in caps):
        # The share of each cap that a unit takes, of which the largest counts. Rounded down, shares of more than a cap
        # are still more than the whole: it has more parts for each token than there are units.
        whole = max(cap for _, cap in caps) * (len(num_rows) + 1)
        shares = np.max([own * whole // cap for own, cap in caps], axis=0)
        plan = plan_micro_batches(shares, whole, world_size=world_size)
    starts = cumulative(sizes)[:-1]
    members = unit_B.argsort(kind="stable")[_ranges(starts[plan.indices], sizes[plan.indices])]
    return dataclasses.replace(plan, indices=members, offsets=cumulative(sizes[plan.indices])[plan.offsets])


def _numbers(keys: Iterable[Hashable]) -> np.ndarray:
    """(B,) int64, equal for equal keys, from 0 on in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _tree(batch: Batch, used_B: np.ndarray, root_B: np.ndarray) -> PrefixTree:
    """The prefix tree of the batch in its order, apart for each number of a root and for different images."""
    root_B = _numbers(zip(root_B.tolist(), _image_numbers(batch).tolist(), strict=True))
    return prefix_tree(batch.input_ids_T.numpy(), batch.cu_seqlens.numpy()[:-1], used_B, root_B)


def _common_prefix(batch: Batch, used_B: np.ndarray) -> int:
    """Tokens that all sequences begin with, of the sequences that run and have the same images."""
    start_B = batch.cu_seqlens.numpy()[:-1][used_B > 0].tolist()
    if not start_B or np.ptp(_image_numbers(batch)[used_B > 0]):
        return 0
    tokens, common = batch.input_ids_T.numpy(), int(used_B[used_B > 0].min())
    for start in start_B:
        if not common:
            break
        common = common_length(tokens[start : start + common], tokens[start_B[0] : start_B[0] + common])
    return common


def _check_units(unit_B: np.ndarray, num_rows: np.ndarray, max_tokens: int) -> None:
    """Raises ValueError naming the longest unit if it exceeds the cap."""
    if num_rows.max(initial=0) > max_tokens:
        members = np.flatnonzero(unit_B == num_rows.argmax())
        raise ValueError(
            f"the unit of sequences {', '.join(map(str, members))} has {num_rows.max()} tokens, more than "
            f"max_tokens={max_tokens}: raise max_tokens to at least this length, or couple fewer sequences"
        )


def _check_number(unit_B: np.ndarray, most: int) -> None:
    """Raises ValueError naming the largest unit if it has too many sequences."""
    if (sizes := np.bincount(unit_B)).max(initial=0) > most:
        raise ValueError(
            f"a unit has {sizes.max()} sequences that stay together, more than micro_batch_size={most}: raise "
            "micro_batch_size to at least this number"
        )


def _prompt_and_used_lengths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(B,) each: tokens up to the first masked position, and up to the last active one; 0 without an active one."""
    prompt_B, used_B = np.zeros((2, batch.num_sequences), np.int64)
    sequence, last = _runs(batch.active_T, batch)[::2]
    used_B[sequence] = last  # of several assignments the last one stays
    sequence, first = _runs(batch.loss_mask_T, batch)[:2]
    prompt_B[sequence[::-1]] = first[::-1]
    return np.where(used_B > 0, prompt_B, 0), used_B


def _runs(mask_T: Tensor, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The runs of True: their sequences, and the tokens of the sequence up to the first position and up to the last.

    A run ends within its sequence, because the last position of a sequence is never True. The runs are few, so that no
    array of positions is as long as the batch.
    """
    boundaries = batch.cu_seqlens.numpy()
    changes = np.flatnonzero(np.diff(mask_T.numpy(), prepend=False)).reshape(-1, 2)
    sequence = np.searchsorted(boundaries, changes[:, 0], side="right") - 1
    first, last = (changes - boundaries[sequence, None] + [1, 0]).T
    return sequence, first, last


def _prompt_numbers(batch: Batch, prompt_B: np.ndarray) -> np.ndarray:
    """(B,) equal for sequences with equal prompts, in order of first appearance; without a prompt all are equal."""
    bounds, tokens = batch.cu_seqlens.numpy(), batch.input_ids_T.numpy()
    prompts = (tokens[start:end].tobytes() for start, end in zip(bounds[:-1], bounds[:-1] + prompt_B, strict=True))
    return _numbers(zip(prompts, _image_numbers(batch).tolist(), strict=True))


def _image_numbers(batch: Batch) -> np.ndarray:
    """(B,) int64, 0 without images: equal tokens are not equal prefixes where different images stand behind them."""
    return np.zeros(batch.num_sequences, np.int64) if batch.image_B is None else batch.image_B.numpy() + 1


def _cut(
    number_B: np.ndarray, prompt_B: np.ndarray, used_B: np.ndarray, tree: PrefixTree, limit: int, most: int,
    longest_paths: int,
) -> np.ndarray:  # fmt: skip
    """(B,) units: sequences of a prompt stay together, but where they exceed a limit of rows, sequences or paths."""
    order_B = number_B.argsort(kind="stable")
    unit_B, unit, rows, last, size, paths = np.full_like(number_B, -1), -1, 0, -1, 0, 0
    columns = (x_B[order_B].tolist() for x_B in (number_B, prompt_B, used_B, *tree))
    for b, number, prompt, used, parent, shared in zip(order_B, *columns, strict=True):
        # Behind a cut, the prompt alone is certain to be there.
        own = used - (shared if number == last and unit_B[parent] == unit else prompt)
        if number != last or rows + own > limit or size == most or paths + used > longest_paths:
            unit, rows, last, size, own, paths = unit + 1, 0, number, 0, used, 0
        rows, size, paths = rows + own, size + 1, paths + used
        unit_B[b] = unit
    return unit_B


def _interleaved(x_B: np.ndarray, y_B: np.ndarray) -> np.ndarray:
    """(2B,) x[0], y[0], x[1], y[1], ..."""
    return np.stack([x_B, y_B], 1).ravel()


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return token_ranges(starts, sizes).numpy()


def _boundaries(sizes: np.ndarray) -> Tensor:
    return torch.from_numpy(cumulative(sizes).astype(np.int32))
