"""The prefix tree against every pair of sequences."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.data.prefixes import common_length, prefix_tree


def num_equal(x: list[int], y: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(x, y, strict=False))))


TOKENS = st.lists(st.sampled_from([1, 2]), max_size=7)


@given(sequences=st.lists(st.tuples(TOKENS, st.sampled_from([0, 1])), max_size=9), spare=st.integers(0, 3))
def test_a_sequence_leaves_the_earlier_one_with_the_longest_common_prefix(sequences, spare):
    """Tokens behind those that count do not matter."""
    size_B = np.array([len(tokens) for tokens, _ in sequences], np.int64)
    tokens_T = np.array([token for tokens, _ in sequences for token in [*tokens, *[1] * spare]], np.int64)
    start_B = np.cumsum(size_B + spare) - size_B - spare
    tree = prefix_tree(tokens_T, start_B, size_B, np.array([root for _, root in sequences], np.int64))
    for b, (tokens, root) in enumerate(sequences):
        common = [num_equal(tokens, other) * (root == its_root) for other, its_root in sequences[:b]]
        assert tree.shared_B[b] == max(common, default=0)
        assert tree.parent_B[b] == -1 or common[tree.parent_B[b]] == tree.shared_B[b] > 0


def test_long_common_prefixes_are_found_to_the_token():
    """At the ends of the blocks that are compared at once, and far behind them."""
    x = np.arange(10_000)
    for first in (0, 1, 63, 64, 65, 575, 576, 577, 9_999):
        y = x.copy()
        y[first] = -1
        assert common_length(x, y) == first
    assert common_length(x, x) == 10_000
    assert common_length(x[:0], x[:0]) == 0
