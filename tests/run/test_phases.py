"""What is measured of the phases of a step."""

import contextlib
import mmap
import time
from collections.abc import Iterator

import pytest

from rlft_fast.cluster import TotalUsage
from rlft_fast.cluster.usage import Usage
from rlft_fast.run.phases import Phases
from rlft_fast.world import SPANS, World
from tests.support.machine.distributed import run_distributed
from tests.support.machine.memory import requires_proc


@contextlib.contextmanager
def resident(mib: int) -> Iterator[None]:
    """Holds fresh pages of the system: malloc may give out pages that the process already has."""
    with mmap.mmap(-1, mib * 2**20) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        yield


@requires_proc
def test_a_phase_has_the_peak_of_its_parts():
    phases = Phases(World())
    for name, mib in (("update", 256), ("generate", 1), ("update", 1)):
        with phases.timed(name), resident(mib):
            time.sleep(0.01)
    metrics = phases.metrics()
    assert metrics["memory_gib_update"] - metrics["memory_gib_generate"] > 128 / 1024
    assert 0.01 < metrics["seconds_generate"] < metrics["seconds_update"]


def test_a_driver_has_the_time_and_memory_of_its_workers():
    nothing = TotalUsage()
    took = [
        TotalUsage(3 * 2**30, 5.0, (3.0, 4.0), (("actor 0", 7.0, 12.0),)), TotalUsage(None, 0.5),
        TotalUsage(2**30, 2.0, (2.0, 1.0)), nothing,
    ]  # fmt: skip
    calls = iter([x for usage in took for x in (TotalUsage(2**40, 100.0), usage)])  # before and after each phase
    phases = Phases(World(), elsewhere=lambda: next(calls))
    for name in ("generate", "reward", "generate", "sync"):
        with phases.timed(name):
            time.sleep(0.01)
    phases.busy("reward", 0.25)  # functions of the driver
    assert phases.metrics() == {
        "seconds_generate": 7.0, "seconds_reward": 0.75, "seconds_sync": 0.0, "memory_gib_generate": 3.0,
        "idle_share_generate": 0.0,  # 5 s each
    }  # fmt: skip
    assert ("generate", "actor 0", 7.0, 12.0) in SPANS.take()


def test_usage_of_workers_and_groups():
    calls = [[Usage(5, 1.0, 0.5, 100.0), Usage(None, 2.0, 0.5, 103.0)], [Usage(7, 4.0, 3.0, 101.0)]]
    actor = TotalUsage.of_workers(calls, "actor")
    spans = (("actor 0", 100.0, 101.0), ("actor 0", 103.0, 105.0), ("actor 1", 101.0, 105.0))
    assert actor == (7, 4.0, (1.0, 3.0), spans)
    critic = TotalUsage.of_workers([[Usage(None, 6.0, 0.0, 99.0)]], "critic")
    total = TotalUsage.of_groups([actor, critic, TotalUsage.of_workers([[], []])])
    assert total == (7, 6.0, (1.0, 3.0), (*spans, ("critic 0", 99.0, 105.0)))


def check_two_ranks(rank: int) -> None:
    phases = Phases(World.current())
    with phases.timed("generate"), resident(1 + rank * 256):
        pass
    phases.busy("generate", [1.0, 2.0][rank])
    phases.busy("generate", [1.0, 6.0][rank])
    phases.busy("reward", 0.0)
    metrics = phases.metrics()
    assert metrics["idle_share_generate"] == pytest.approx(1 - (2 + 8) / 2 / 8)
    assert metrics["idle_share_reward"] == 0
    assert metrics["memory_gib_generate"] >= phases.peak_bytes["generate"] / 2**30 * (1 - 1e-6)
    assert (metrics["memory_gib_generate"] - phases.peak_bytes["generate"] / 2**30 > 128 / 1024) == (rank == 0)


@pytest.mark.dist
@requires_proc
def test_the_numbers_are_those_of_all_ranks():
    run_distributed(check_two_ranks, 2)
