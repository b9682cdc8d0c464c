"""The prefix tree of a batch: which tokens each sequence has in common with the sequences before it.

A sequence is the first tokens of its parent, an earlier sequence, and then its own tokens. Sequences with a prompt, a
system message or the first turns of an episode in common so name each distinct token once.

    sequences  [s p a b]  [s p a c]  [s q]        parents  -1 0 0        shared  0 3 1
"""

from typing import NamedTuple

import numpy as np

_FIRST_BLOCK, _GROWTH = 512, 8  # so many elements cost no more than the call that compares them


class PrefixTree(NamedTuple):
    """Where each sequence branches off.

    Args:
        parent_B: (B,) int64, the earlier sequence with the longest prefix in common; -1: no token in common.
        shared_B: (B,) int64, tokens of this prefix. They are the parent's, and may be its own parent's in turn.
    """

    parent_B: np.ndarray
    shared_B: np.ndarray


def prefix_tree(tokens_T: np.ndarray, start_B: np.ndarray, size_B: np.ndarray, root_B: np.ndarray) -> PrefixTree:
    """The tree of the sequences `tokens_T[start : start + size]`, each compared with the sequences before it.

    Args:
        tokens_T: (T,) integers.
        start_B: (B,) int64 position of each sequence's first token.
        size_B: (B,) int64, tokens of each sequence that count, also 0.
        root_B: (B,) int64 >= 0; sequences with different roots have nothing in common.
    """
    branches: dict[tuple[int, int, int], int] = {}  # by the sequence left, the depth, and the token that follows there
    parents, depths = [], []
    starts, sizes = start_B.tolist(), size_B.tolist()
    for b, (start, size, root) in enumerate(zip(starts, sizes, root_B.tolist(), strict=True)):
        left, depth = -1 - root, 0
        while depth < size:
            branch = (left, depth, int(tokens_T[start + depth]))
            if (child := branches.setdefault(branch, b)) == b:
                break
            left, most = child, min(size, sizes[child])
            depth += common_length(
                tokens_T[start + depth : start + most], tokens_T[starts[child] + depth : starts[child] + most]
            )
        parents.append(max(left, -1))
        depths.append(depth)
    return PrefixTree(np.array(parents, np.int64), np.array(depths, np.int64))


def common_length(x: np.ndarray, y: np.ndarray) -> int:
    """Elements before the first difference of two arrays of one length."""
    begin, block = 0, _FIRST_BLOCK
    while begin < len(x):
        differs = x[begin : begin + block] != y[begin : begin + block]
        if differs[first := int(differs.argmax())]:
            return begin + first
        begin, block = begin + block, block * _GROWTH
    return len(x)
