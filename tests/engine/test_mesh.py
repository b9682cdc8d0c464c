"""Which shard sizes are accepted, and which one "auto" chooses."""

import pytest

from rlft_fast.engine.mesh import resolve_shard_size

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "world_size", "expected"), [(-1, 6, 6), (1, 6, 1), (2, 6, 2), (3, 6, 3), (6, 6, 6), (-1, 1, 1)]
)
def test_sizes_that_divide(asked, world_size, expected):
    assert resolve_shard_size(asked, world_size, state_bytes=GIB, memory_bytes=GIB) == expected


@pytest.mark.parametrize(("asked", "world_size"), [(4, 6), (7, 6), (2, 1)])
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(asked, world_size):
    with pytest.raises(ValueError, match=rf"shard_size is {asked}, which does not divide the {world_size} ranks"):
        resolve_shard_size(asked, world_size, state_bytes=GIB, memory_bytes=GIB)


# 60 % of a device are for the state: 48 of 80 GiB.
@pytest.mark.parametrize(("state_gib", "expected"), [(10, 1), (48, 1), (49, 2), (96, 2), (97, 4), (140, 4), (300, 8)])
def test_auto_takes_the_fewest_ranks_that_hold_a_copy(state_gib, expected):
    assert resolve_shard_size("auto", 8, state_bytes=state_gib * GIB, memory_bytes=80 * GIB) == expected


def test_auto_that_fits_nowhere_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"400\.0 GiB of state, over all 8 ranks, take more than 60% of .* 80\.0 GiB"):
        resolve_shard_size("auto", 8, state_bytes=400 * GIB, memory_bytes=80 * GIB)
