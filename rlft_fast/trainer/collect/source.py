"""The samples of each step: collected for it, or ahead of it while earlier steps train, or kept by another run."""

import contextlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlft_fast.cluster import TotalUsage
from rlft_fast.rollout import Rollout
from rlft_fast.run import Phases, differences, read_rollout
from rlft_fast.trainer.collect.collector import Collected, Collector
from rlft_fast.trainer.collect.overlap import Overlap
from rlft_fast.trainer.collect.schedule import Schedule
from rlft_fast.world import STOP, LeftEarlyError, World

_AHEAD = "ahead."  # of the names of tensors in a checkpoint; then number of the group, ".", name
_RUN = "run_of_samples_ahead"  # name of a value in a checkpoint: the identity of the run that made them, in JSON
_MOST_GROUPS = 256  # collected at once; a thread each
_GATHER_S = 0.01  # groups that begin together ask the generator together


class SampleSource:
    """Gives each step its samples, and the generator the weights that it samples them with.

    With ``rollout.max_staleness``, samples come from threads that collect them while earlier steps train, see
    `Schedule`.

    Args:
        collector: of the steps. Steps ahead have phases of their own.
        identity: of the run, see `Trainer.identity`. Samples that a run of another identity has kept are dropped.
        replay: folder of a run with ``log_samples``, whose samples each step gets; None: they are collected.

    Attributes:
        num_updates: of the weights of now.
    """

    def __init__(self, collector: Collector, identity: Mapping[str, Any], replay: Path | None = None) -> None:
        self.collector, self.identity, self.replay = collector, identity, replay
        self.config, self.world, self.phases = collector.config, collector.world, collector.phases
        self.curriculum, self.rollout = collector.curriculum, collector.models.rollout
        self.num_updates = 0
        self._overlap: Overlap[Collected] | None = None
        self._kept: dict[str, Any] = {}  # samples of a checkpoint, and their run, before a step takes them

    def start(self, step: int) -> None:
        """Gives the generator the weights, as those of this step."""
        self.num_updates = step
        self._sync()

    def take(self, step: int, first_prompt: int) -> Collected:
        """The samples of a step.

        Args:
            step: counts from 0; it decides every random draw.
            first_prompt: number of prompts of the stream that the steps before have taken.
        """
        staleness = self.config.rollout.max_staleness
        if self.replay is not None:
            collected = self.collector.again(read_rollout(self.replay, step + 1))
        elif staleness:
            collected = self._take_ahead(step, first_prompt)
        else:
            collected = self.collector.collect(step, first_prompt)
            with self.phases.timed("generate"):
                self.rollout.sleep()  # not before: only the sync after the update wakes it
        self.curriculum.learn(collected.rows, collected.samples)
        if staleness and self.replay is None:
            self.curriculum.plan(step + 1, first_prompt + collected.num_streamed, step + 1 + staleness)
        return collected

    def update(self, step: int) -> None:
        """Notes that this step has updated the weights: the generator gets them now, or when the schedule wants."""
        self.num_updates = step + 1
        if self._overlap is None:
            self._sync()
        else:
            self._overlap.train()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, nothing trains, no sample is collected, and the generator has the weights of now.

        A generator that fails may be started again at once.
        """
        if self._overlap is None:
            yield
            return
        with _leaving_together(self.world):
            self._overlap.drain()
        self._sync()
        rollout = self.rollout
        assert isinstance(rollout, Rollout)  # also beside the workers of a cluster
        rollout.restarts = True
        try:
            yield
        finally:
            rollout.restarts = False

    def ahead(self, *, waits: bool) -> dict[str, Any]:
        """See `Trainer.ahead`: the samples of coming steps, and which run has made them."""
        if self._overlap is None:
            return self._kept
        ready = self._overlap.ready(waits=waits and not self._is_in_flight)
        samples = {
            f"{_AHEAD}{group}.{name}": x
            for group, collected in ready.items()
            for name, x in collected.tensors().items()
        }
        return {_RUN: json.dumps(self.identity), **samples}

    def load_ahead(self, values: Mapping[str, Any]) -> None:
        """See `Trainer.load_ahead`."""
        self.close()
        self._overlap = None
        self._kept = {name: x for name, x in values.items() if name.startswith(_AHEAD) or name == _RUN}

    def close(self) -> None:
        """Collects no further step."""
        if self._overlap is not None:
            self._overlap.close()

    def join(self) -> None:
        """After `close` and the end of the generator: waits some seconds for the threads."""
        if self._overlap is not None:
            self._overlap.join()

    def _sync(self) -> None:
        self.rollout.weight_version = self.num_updates
        with self.phases.timed("sync"):
            self.rollout.sync()

    def _take_ahead(self, step: int, first_prompt: int) -> Collected:
        """The samples of a step from the threads, which collect further steps meanwhile."""
        if self._overlap is None:
            self._overlap = self._begin_to_overlap(step, first_prompt)
        assert self._overlap.schedule.trained == step
        started = time.perf_counter()
        with _leaving_together(self.world):
            groups = self._overlap.take()
        self.phases.within("wait", time.perf_counter() - started)
        collected = self.collector.joined(step, groups) if self._is_in_flight else groups[0]
        for name, seconds in collected.seconds.items():
            self.phases.seconds[name] = seconds
        return collected

    @property
    def _is_in_flight(self) -> bool:
        """Whether each prompt of a step is collected alone, and answers go on across updates."""
        return self.config.rollout.update == "in-flight"

    def _begin_to_overlap(self, first_step: int, first_prompt: int) -> Overlap[Collected]:
        rollout, count = self.rollout, self.config.rollout.prompts_per_step
        assert isinstance(rollout, Rollout)  # also beside the workers of a cluster
        rollout.restarts = False
        if self.config.algorithm.rollout_correction == "none":  # as in the configuration of a run without max_staleness
            warnings.warn(
                "algorithm.rollout_correction is none, so the loss does not weigh what up to "
                f"{self.config.rollout.max_staleness} updates change between sampling and training: "
                "token-truncate does",
                stacklevel=2,
            )
        num_groups, num_threads = 1, 1
        if self._is_in_flight:
            num_groups, num_threads = count, min(count * (1 + self.config.rollout.max_staleness), _MOST_GROUPS)
            rollout.joined.gather_s = _GATHER_S
        last_step = first_step + self.config.rollout.max_staleness
        self.curriculum.plan(first_step, first_prompt, last_step)

        def collect(group: int) -> Collected:
            step, place = divmod(group, num_groups)
            beside = self.collector.timed_by(Phases(self.world, elsewhere=TotalUsage))  # memory is measured here
            collected = beside.collect_group(step, place) if self._is_in_flight else beside.collect(step, None)
            return collected._replace(seconds=beside.phases.seconds)

        is_same = not differences(json.loads(self._kept.pop(_RUN, "null")), self.identity)

        def known(group: int, tensors: dict[str, Tensor]) -> Collected | None:
            step, place = divmod(group, num_groups)
            if not (is_same and first_step <= step <= last_step):
                return None
            return self.collector.of_tensors(step, tensors, place if self._is_in_flight else None)

        found = {group: known(group, own) for group, own in _by_group(self._kept).items()}
        ready = {group: collected for group, collected in found.items() if collected is not None}
        self._kept = {}
        if len(ready) < len(found):
            warnings.warn(
                f"{len(found) - len(ready)} of the checkpoint's {len(found)} groups of samples of coming steps do not "
                "fit the run, whose data, models or settings have changed: their prompts are sampled again",
                stacklevel=2,
            )
        schedule = Schedule(
            self.config.rollout.max_staleness, self.config.steps, first_step, ready, num_groups,
            drains=not self._is_in_flight,
        )  # fmt: skip
        longest_wait_s = 60 * self.config.timeout_minutes
        return Overlap(schedule, ready, collect, self._sync, rollout.generator.name, longest_wait_s, num_threads)


@contextlib.contextmanager
def _leaving_together(world: World) -> Iterator[None]:
    """Around a wait that a signal may end: the run stops then."""
    try:
        yield
    except LeftEarlyError:
        STOP.leave_together(world)
        raise


def _by_group(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """What `SampleSource.ahead` gave, by group."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, own = name.removeprefix(_AHEAD).split(".", 1)
        found.setdefault(int(group), {})[own] = tensor
    return found
