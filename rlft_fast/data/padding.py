"""Plans padded micro-batches: of similar lengths, under a cap that counts the padding."""

import heapq

import numpy as np

from rlft_fast.data.batch import cumulative
from rlft_fast.data.planning import MicroBatchPlan

_SHORTEST = 0.75  # of the longest sequence of a micro-batch; less padding would take more passes


def plan_padded(
    length_B: np.ndarray, unit_B: np.ndarray, max_tokens: int, world_size: int, most: int
) -> MicroBatchPlan:
    """Deals sequences to ranks, longest first, in micro-batches of similar lengths.

    In each step of the plan the ranks get equally many sequences, or nearly so, whose lengths differ by a quarter at
    most, unless a rank would have none.

    Args:
        length_B: (B,) tokens of each sequence.
        unit_B: (B,) int64 numbers from 0 on; sequences of equal number stay together.
        max_tokens: cap on a micro-batch: its sequences times the length of the longest.
        world_size: number of ranks.
        most: cap on the sequences of a micro-batch.

    Returns:
        A plan in which every rank has equally many micro-batches, at least one.

    Raises:
        ValueError: a unit does not fit under the cap.
    """
    members = np.split(unit_B.argsort(kind="stable"), np.cumsum(np.bincount(unit_B))[:-1])
    longest = np.zeros(len(members), np.int64)
    np.maximum.at(longest, unit_B, length_B)
    for part, length in zip(members, longest.tolist(), strict=True):
        if len(part) * length > max_tokens:
            raise ValueError(
                f"the unit of sequences {', '.join(map(str, part))} takes {len(part)} x {length} tokens when padded, "
                f"more than max_tokens={max_tokens}: raise max_tokens to this, or couple fewer sequences"
            )
    order = (-longest).argsort(kind="stable").tolist()
    steps: list[list[list[np.ndarray]]] = []
    while order:
        room = min(max_tokens // max(int(longest[order[0]]), 1), most)
        steps.append(_deal(order, members, longest, room, world_size))
    steps = steps or [[[] for _ in range(world_size)]]
    bins = [np.concatenate([unit_B[:0], *step[rank]]) for rank in range(world_size) for step in steps]
    return MicroBatchPlan(np.concatenate(bins), cumulative(np.array([*map(len, bins)])), world_size, len(steps))


def _deal(
    order: list[int], members: list[np.ndarray], longest: np.ndarray, room: int, world_size: int
) -> list[list[np.ndarray]]:
    """Takes the units of one step from the front of `order`: those of each rank, at most `room` sequences."""
    first = int(longest[order[0]])
    ranks: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    filled = [(0, rank) for rank in range(world_size)]  # a heap of sequences dealt so far
    taken = 0
    for unit in order:
        size, rank = filled[0]
        if size + len(members[unit]) > room or (size and longest[unit] < _SHORTEST * first):
            break
        ranks[rank].append(members[unit])
        heapq.heapreplace(filled, (size + len(members[unit]), rank))
        taken += 1
    del order[:taken]
    return ranks
