"""When the samples of a step may be collected, so that the weights that sample them are at most S updates old.

The steps of a run are trained in order, one update each. A generator that has the weights after v updates, its version,
serves the steps up to v + S. It takes new weights when the last of these steps is to be trained. So the version that
samples a step depends on the step alone, never on time: a run with staleness has the same numbers again.

With S = 2, where a row has the steps of one version, and is collected while the steps of the row above are trained::

    v = 0    0 1 2
    v = 2          3 4
    v = 4              5 6
"""

from collections.abc import Iterable


class Schedule:
    """Decides which steps may be collected, and when the generator takes new weights. It starts nothing itself.

    Args:
        max_staleness: S, at least 1: most updates between the weights that sample a step and the step's own update.
        num_steps: of the whole run.
        trained: steps that have been trained.
        finished: later steps whose samples are there.

    Attributes:
        trained: number of the step to be trained next.
        version: updates before the weights that the generator has; None: it has no weights to start a step with.
    """

    def __init__(self, max_staleness: int, num_steps: int, trained: int = 0, finished: Iterable[int] = ()) -> None:
        self.max_staleness, self.num_steps, self.trained = max_staleness, num_steps, trained
        self.version: int | None = None
        self._running: set[int] = set()
        self._finished = set(finished)

    @property
    def wants_weights(self) -> bool:
        """Whether the generator has to take the weights of now before more steps are started.

        No step is being collected then, since all tokens of a step come from one version.
        """
        waiting = self._not_started(self.trained + self.max_staleness)
        return bool(waiting) and waiting[0] <= self.trained + 1 and not self._running and not self._startable()

    def renew(self) -> None:
        """Notes that the generator has the weights of now."""
        assert not self._running
        self.version = self.trained

    def start(self) -> list[int]:
        """The steps to be collected from now on, in this order."""
        steps = self._startable()
        self._running.update(steps)
        return steps

    def finish(self, step: int) -> None:
        """Notes that a step's samples are there."""
        self._running.remove(step)
        self._finished.add(step)

    def fail(self, step: int) -> None:
        """Notes that a step has to be started again, after the generator has taken weights."""
        self._running.remove(step)
        self.version = None

    @property
    def can_train(self) -> bool:
        """Whether the samples of the step to be trained next are there."""
        return self.trained in self._finished

    def train(self) -> None:
        """Notes an update."""
        self._finished.remove(self.trained)
        self.trained += 1

    def _startable(self) -> list[int]:
        return [] if self.version is None else self._not_started(self.version + self.max_staleness)

    def _not_started(self, last: int) -> list[int]:
        steps = range(self.trained, min(last + 1, self.num_steps))
        return [step for step in steps if step not in self._running and step not in self._finished]
