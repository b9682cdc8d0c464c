"""Collects the samples of coming steps in a thread, while the steps before them are trained."""

import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from rlft_fast.rollout import RolloutError
from rlft_fast.trainer.schedule import Schedule

T = TypeVar("T")
_NAMED_AFTER_S = 30.0


class Overlap(Generic[T]):
    """Runs a schedule with one generator, which collects one step after the other.

    A generator that has failed is started again between two updates, because it takes the policy's weights, which an
    update changes. The steps that failed are then collected again.

    Args:
        schedule: which steps, and when.
        ready: the samples of steps that the schedule knows to be finished.
        collect: collects a step, in a thread. It must not start a generator again.
        renew: gives the generator the weights of now, and starts it again if it has ended.
        name: of the generator, in messages.
        named_after_s: a wait for samples is told every so many seconds.
    """

    def __init__(
        self, schedule: Schedule, ready: Mapping[int, T], collect: Callable[[int], T], renew: Callable[[], None],
        name: str, named_after_s: float = _NAMED_AFTER_S,
    ) -> None:  # fmt: skip
        self.schedule, self.collect, self.renew = schedule, collect, renew
        self.name, self.named_after_s = name, named_after_s
        self._running: dict[int, Future[T]] = {}
        self._ready = {**ready}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def take(self) -> T:
        """The samples of the step to be trained next. The steps that may run beside its update are started before.

        Raises:
            RolloutError: the generator failed, was started again, and failed again; or it cannot sample at all.
            StepError: another part of collecting the step failed.
        """
        has_failed = False
        self._start()
        while not self.schedule.can_train:
            step = self.schedule.trained
            self._wait_for(step)
            failure = self._running[step].exception()
            if failure is None:
                self._finish(step)
            elif not isinstance(failure, RolloutError) or failure.is_divergence or has_failed:
                raise failure
            else:
                has_failed = True
                warnings.warn(
                    f"{failure}. {self.name} is started again, and samples step {step + 1} again", stacklevel=2
                )
                self._collect_again()
            self._start()
        return self._ready[self.schedule.trained]

    def train(self) -> None:
        """Notes the update of the step whose samples were taken."""
        del self._ready[self.schedule.trained]
        self.schedule.train()

    def drain(self) -> None:
        """Returns when nothing is being collected. A failure is raised when its step is taken."""
        for step in self._running:
            self._wait_for(step)

    def ready(self, *, waits: bool = True) -> dict[int, T]:
        """The samples of the steps that are collected and not trained, after `drain` if it ``waits``."""
        if waits:
            self.drain()
        for step in [step for step, x in self._running.items() if x.done() and x.exception() is None]:
            self._finish(step)
        return {step: self._ready[step] for step in sorted(self._ready)}

    def close(self) -> None:
        """Starts no more steps. It does not wait for the step that is being collected."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self.schedule.wants_weights:
            self.renew()
            self.schedule.renew()
        for step in self.schedule.start():
            self._running[step] = self._thread.submit(self.collect, step)

    def _finish(self, step: int) -> None:
        self._ready[step] = self._running.pop(step).result()
        self.schedule.finish(step)

    def _collect_again(self) -> None:
        """Has every step that failed started again."""
        self.ready()
        for step in self._running:
            self.schedule.fail(step)
        self._running.clear()

    def _wait_for(self, step: int) -> None:
        started = time.monotonic()
        while wait([self._running[step]], timeout=self.named_after_s).not_done:
            warnings.warn(
                f"training has waited {time.monotonic() - started:.0f} s for the samples of step {step + 1}: "
                f"{self.name} or a reward function is slow, or stuck",
                stacklevel=3,
            )
