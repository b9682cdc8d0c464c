"""Which steps a generator may collect ahead of the training, in simulated runs."""

import heapq
import random

import pytest

from rlft_fast.trainer.collect.schedule import Schedule


def simulated(seed: int, max_staleness: int, *, fails: float, groups_per_step: int = 1, drains: bool = True) -> list:
    """The most staleness of each step of a run with random latencies: heavy-tailed ones of generation, and failures."""
    rng = random.Random(seed)
    num_steps, num_threads = rng.randrange(1, 13), 1 if drains else rng.randrange(1, 9)
    schedule = Schedule(max_staleness, num_steps, groups_per_step=groups_per_step, drains=drains)
    threads = [0.0] * num_threads  # when each is free
    in_flight: dict[int, float] = {}  # when a group comes
    versions: dict[int, int] = {}  # of the first token
    finished, trained, staleness = [], [], []
    now = 0.0
    while len(trained) < num_steps:
        if schedule.wants_weights:
            assert not (drains and in_flight)  # the weights of an answer never change
            schedule.renew()
        for group in schedule.start():
            begins = max(now, heapq.heappop(threads))
            in_flight[group], versions[group] = begins + rng.paretovariate(1.1), schedule.version
            heapq.heappush(threads, in_flight[group])
        group = min(in_flight, key=in_flight.__getitem__, default=None)
        if group is not None and (in_flight[group] <= now or not schedule.can_train):
            now = max(now, in_flight.pop(group))
            if rng.random() < fails:
                schedule.fail(group)
            else:
                schedule.finish(group)
                finished.append(group)
        elif schedule.can_train:
            step = schedule.trained
            staleness.append(max(step - versions[own] for own in schedule.groups_of(step)))
            trained.append(step)
            now += rng.expovariate(1.0)
            schedule.train()
        else:
            pytest.fail(f"training waits for step {schedule.trained}, and no group is in flight")
    assert trained == [*range(num_steps)]
    assert sorted(finished) == [*range(num_steps * groups_per_step)]  # each once: nothing is thrown away
    return staleness


@pytest.mark.parametrize("num_schedules", [500, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drains", [True, False])
def test_the_bound_holds_whatever_takes_how_long(drains, num_schedules):
    for seed in range(num_schedules):
        max_staleness, groups_per_step = 1 + seed % 5, 1 + seed // 5 % 4
        found = simulated(seed, max_staleness, fails=0.2, groups_per_step=groups_per_step, drains=drains)
        assert max(found) <= max_staleness


def test_a_generator_that_does_not_drain_takes_all_weights():
    """After each update, while groups are under way; a group of a further step begins with each update."""
    schedule = Schedule(1, 9, groups_per_step=2, drains=False)
    schedule.renew()
    assert schedule.start() == [0, 1, 2, 3]
    for group in (3, 1, 0):
        schedule.finish(group)
    schedule.train()
    assert (schedule.wants_weights, schedule.start(), schedule.missing) == (True, [], [2])
    schedule.renew()
    assert (schedule.version, schedule.wants_weights, schedule.start()) == (1, False, [4, 5])


@pytest.mark.parametrize(
    ("max_staleness", "expected"),
    [(1, [0, 1, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 1, 2, 1, 2]), (3, [0, 1, 2, 3, 1, 2, 3]), (20, [0, 1, 2, 3, 4, 5, 6])],
)
def test_time_does_not_decide(max_staleness, expected):
    """Without failures the version of a step is a function of the step."""
    for seed in range(100):
        found = simulated(seed, max_staleness, fails=0.0)
        assert found == [expected[i] if i < 7 else found[i] for i in range(len(found))]
    assert expected[1:] == [1 + (step - 1) % max_staleness for step in range(1, 7)]


def test_going_on_with_samples_that_are_there():
    """Steps 4 and 5 are finished: the generator takes weights when 5 is to be trained, not before."""
    schedule = Schedule(2, 9, trained=4, finished=[4, 5])
    assert (schedule.can_train, schedule.wants_weights, schedule.start()) == (True, False, [])
    schedule.train()
    assert schedule.wants_weights
    schedule.renew()
    assert (schedule.version, schedule.start()) == (5, [6, 7])
