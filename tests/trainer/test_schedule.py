"""Which steps a generator may collect ahead of the training, in simulated runs."""

import random

import pytest

from rlft_fast.trainer.schedule import Schedule


def simulated(seed: int, max_staleness: int, *, fails: float) -> list[int]:
    """The staleness of each step of a run with random latencies: heavy-tailed ones of generation, and failures."""
    rng = random.Random(seed)
    num_steps = rng.randrange(1, 13)
    schedule = Schedule(max_staleness, num_steps)
    in_flight: dict[int, float] = {}  # when a step comes
    versions: dict[int, int] = {}
    finished, trained, staleness = [], [], []
    now = 0.0
    while len(trained) < num_steps:
        if schedule.wants_weights:
            assert not in_flight  # the weights of an answer never change
            schedule.renew()
        for step in schedule.start():
            begins = max([now, *in_flight.values()])
            in_flight[step], versions[step] = begins + rng.paretovariate(1.1), schedule.version
        step = min(in_flight, key=in_flight.__getitem__, default=None)
        if step is not None and (in_flight[step] <= now or not schedule.can_train):
            now = max(now, in_flight.pop(step))
            if rng.random() < fails:
                schedule.fail(step)
            else:
                schedule.finish(step)
                finished.append(step)
        elif schedule.can_train:
            staleness.append(schedule.trained - versions[schedule.trained])
            trained.append(schedule.trained)
            now += rng.expovariate(1.0)
            schedule.train()
        else:
            pytest.fail(f"training waits for step {schedule.trained}, and no step is in flight")
    assert trained == [*range(num_steps)]
    assert sorted(finished) == trained  # each once: nothing is thrown away
    return staleness


def test_the_bound_holds_whatever_takes_how_long():
    for seed in range(10_000):
        max_staleness = 1 + seed % 5
        assert max(simulated(seed, max_staleness, fails=0.2)) <= max_staleness


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
