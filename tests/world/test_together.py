"""What fails on one rank ends the work of all ranks, in the same words."""

import os

import pytest

from rlft_fast.world import RAISED_BY, World
from tests.support.machine.distributed import FORKS, run_distributed

IMPORTED_IN = os.getpid()


class RefusedError(ValueError):
    pass


def failing(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "done"


def outcome(world: World, error: Exception | None) -> tuple[type[Exception], str, int | None]:
    try:
        world.together(lambda: failing(error), RefusedError, Exception)
    except Exception as found:
        return type(found), str(found), getattr(found, RAISED_BY, None)
    raise AssertionError("nothing failed")


def check_failures(rank: int) -> None:
    world = World.current()
    assert world.any_rank(rank == 1)
    assert not world.any_rank(False)
    assert world.together(lambda: rank, ValueError) == rank
    # One rank, then both with errors of two classes, then both with the same class.
    found = [
        outcome(world, [None, RefusedError("too long")][rank]),
        outcome(world, [MemoryError("no room"), RefusedError("too long")][rank]),
        outcome(world, [KeyError("a"), KeyError()][rank]),
    ]
    own = [
        [(RefusedError, "rank 1: too long", 1)] * 2 + [(KeyError, "'a'", None)],
        [(RefusedError, "too long", None)] * 2 + [(RuntimeError, "rank 0: 'a'", 0)],
    ]
    assert found == own[rank]


@pytest.mark.dist
def test_all_ranks_raise_the_first_failure():
    run_distributed(check_failures, 2)


def test_a_single_process_raises_its_own_error():
    assert World().together(lambda: failing(None), ValueError) == "done"
    assert outcome(World(), RefusedError("too long")) == (RefusedError, "too long", None)
    with pytest.raises(KeyError):
        World().together(lambda: failing(KeyError("a")), RefusedError)


def check_imported(rank: int) -> None:
    assert os.getpid() != IMPORTED_IN


@pytest.mark.dist
@pytest.mark.skipif(not FORKS, reason="processes are spawned where there is a GPU")
def test_processes_of_tests_need_not_import():
    """Each of a hundred processes would take seconds."""
    run_distributed(check_imported, 1)
