"""Collects the samples of coming steps in threads, while the steps before them are trained."""

import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from rlft_fast.rollout import RolloutError
from rlft_fast.trainer.collect.schedule import Schedule
from rlft_fast.world import STOP, DaemonThreads

T = TypeVar("T")
_NAMED_AFTER_S = 30.0
_JOINED_WITHIN_S = 10.0


class StuckError(RolloutError):
    """The samples of a step did not come in time."""


class Overlap(Generic[T]):
    """Runs a schedule with one generator. The threads begin the schedule's groups in their order.

    A generator that has failed is started again between two updates, because it takes the policy's weights, which an
    update changes. The groups that failed are then collected again.

    Args:
        schedule: which groups, and when.
        ready: the samples of groups that the schedule knows to be finished.
        collect: collects a group, in a thread. It must not start a generator again.
        renew: gives the generator the weights of now, and starts it again if it has ended.
        name: of the generator, in messages.
        longest_wait_s: a wait for one group's samples that takes longer is an error. No later wait is begun then.
        num_threads: groups that are collected at once.
        named_after_s: a wait for samples is told every so many seconds.
    """

    def __init__(
        self, schedule: Schedule, ready: Mapping[int, T], collect: Callable[[int], T], renew: Callable[[], None],
        name: str, longest_wait_s: float, num_threads: int = 1, named_after_s: float = _NAMED_AFTER_S,
    ) -> None:  # fmt: skip
        self.schedule, self.collect, self.renew = schedule, collect, renew
        self.name, self.longest_wait_s, self.named_after_s = name, longest_wait_s, named_after_s
        self._running: dict[int, Future[T]] = {}
        self._ready = {**ready}
        self._threads = DaemonThreads(num_threads, "rollout")
        self._is_stuck = False

    def take(self) -> list[T]:
        """The samples of the groups to be trained next. The groups that may run beside their update are started before.

        Raises:
            RolloutError: the generator failed, was started again, and failed again; or it cannot sample at all.
            StuckError: the samples did not come in time.
            StepError: another part of collecting the step failed.
            LeftEarlyError: a signal ended the wait, see `StopRequest.alone`.
        """
        has_failed = False
        self._start()
        while not self.schedule.can_train:
            group, number = self.schedule.missing[0], self.schedule.trained + 1
            self._wait_for(group)
            failure = self._running[group].exception()
            if failure is None:
                self._finish(group)
            elif not isinstance(failure, RolloutError) or failure.is_divergence or has_failed:
                raise failure
            else:
                has_failed = True
                warnings.warn(
                    f"{failure}. {self.name} is started again, and samples step {number} again",
                    stacklevel=2,
                )
                self._collect_again()
            self._start()
        return [self._ready[group] for group in self.schedule.groups_of(self.schedule.trained)]

    def train(self) -> None:
        """Notes the update of the step whose samples were taken."""
        for group in self.schedule.groups_of(self.schedule.trained):
            del self._ready[group]
        self.schedule.train()

    def drain(self) -> None:
        """Returns when nothing is being collected. A failure is raised when its step is taken.

        Raises:
            StuckError: see `take`.
            LeftEarlyError: see `take`.
        """
        for group in self._running:
            self._wait_for(group)

    def ready(self, *, waits: bool = True) -> dict[int, T]:
        """The samples of the groups that are collected and not trained, after `drain` if it ``waits``."""
        if waits and not self._is_stuck:
            self.drain()
        for group in [group for group, x in self._running.items() if x.done() and x.exception() is None]:
            self._finish(group)
        return {group: self._ready[group] for group in sorted(self._ready)}

    def close(self) -> None:
        """Starts no more groups, and forgets the groups that are being collected."""
        self._threads.close()

    def join(self) -> None:
        """After `close` and the end of the generator: waits some seconds for the threads."""
        self._threads.join(_JOINED_WITHIN_S)

    def _start(self) -> None:
        if self.schedule.wants_weights:
            self.renew()
            self.schedule.renew()
        for group in self.schedule.start():
            self._running[group] = self._threads.submit(self.collect, group)

    def _finish(self, group: int) -> None:
        self._ready[group] = self._running.pop(group).result()
        self.schedule.finish(group)

    def _collect_again(self) -> None:
        """Has every group that failed started again."""
        self.ready()
        for group in self._running:
            self.schedule.fail(group)
        self._running.clear()

    def _wait_for(self, group: int) -> None:
        step = self.schedule.step_of(group)
        started = time.monotonic()
        while (left_s := started + self.longest_wait_s - time.monotonic()) > 0:
            with STOP.alone():
                waited = wait([self._running[group]], timeout=min(self.named_after_s, left_s))
            if waited.done:
                return
            warnings.warn(
                f"training has waited {time.monotonic() - started:.0f} s for the samples of step {step + 1}: "
                f"{self.name} or a reward function is slow, or stuck",
                stacklevel=3,
            )
        self._is_stuck = True
        raise StuckError(
            f"the samples of step {step + 1} did not come within {self.longest_wait_s:.0f} s: {self.name} or a reward "
            "function is stuck. If a step may take longer, raise timeout_minutes"
        )
