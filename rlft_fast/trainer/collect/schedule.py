"""When the answers to a prompt may be collected, so that the weights that sample them are at most S updates old.

The steps of a run are trained in order, one update each. A group is what is collected at once: the samples of one
prompt, or of a whole step. A generator that has the weights after v updates, its version, starts the groups of the
steps up to v + S.

A generator that drains takes new weights when the last of these steps is to be trained, and nothing is being collected.
So the version that samples a step depends on the step alone, never on time: a run has the same numbers again.

With S = 2, where a row has the steps of one version, and is collected while the steps of the row above are trained::

    v = 0    0 1 2
    v = 2          3 4
    v = 4              5 6

Another generator takes new weights after each update, while groups are being collected. Later tokens of a group then
have a newer version than its first token, which obeys the bound.
"""

from collections.abc import Iterable


class Schedule:
    """Decides which groups may be collected, and when the generator takes new weights. It starts nothing itself.

    Args:
        max_staleness: S, at least 1: most updates between the weights that sample a token and the step's own update.
        num_steps: of the whole run.
        trained: steps that have been trained.
        finished: groups of later steps whose samples are there.
        groups_per_step: of equal size; group g belongs to step g // groups_per_step.
        drains: whether all tokens of a group come from one version.

    Attributes:
        trained: number of the step to be trained next.
        version: updates before the weights that the generator has; None: it has no weights to start a group with.
    """

    def __init__(
        self, max_staleness: int, num_steps: int, trained: int = 0, finished: Iterable[int] = (),
        groups_per_step: int = 1, drains: bool = True,
    ) -> None:  # fmt: skip
        self.max_staleness, self.num_steps, self.trained = max_staleness, num_steps, trained
        self.groups_per_step, self.drains = groups_per_step, drains
        self.version: int | None = None
        self._running: set[int] = set()
        self._finished = set(finished)

    @property
    def wants_weights(self) -> bool:
        """Whether the generator has to take the weights of now before more groups are started."""
        if self.version == self.trained or (self._running and (self.drains or self.version is None)):
            return False
        waiting = self._not_started(self.trained + self.max_staleness)
        if not self.drains:
            return bool(waiting or self._running)
        is_due = bool(waiting) and self.step_of(waiting[0]) <= self.trained + 1
        return is_due and not self._startable()

    def renew(self) -> None:
        """Notes that the generator has the weights of now."""
        assert not (self.drains and self._running)
        self.version = self.trained

    def start(self) -> list[int]:
        """The groups to be collected from now on, in this order."""
        groups = self._startable()
        self._running.update(groups)
        return groups

    def finish(self, group: int) -> None:
        """Notes that a group's samples are there."""
        self._running.remove(group)
        self._finished.add(group)

    def fail(self, group: int) -> None:
        """Notes that a group has to be started again, after the generator has taken weights."""
        self._running.remove(group)
        self.version = None

    def step_of(self, group: int) -> int:
        """The step whose update trains a group."""
        return group // self.groups_per_step

    def groups_of(self, step: int) -> range:
        """The groups of a step."""
        return range(step * self.groups_per_step, (step + 1) * self.groups_per_step)

    @property
    def missing(self) -> list[int]:
        """Groups of the step to be trained next whose samples are not there."""
        return [group for group in self.groups_of(self.trained) if group not in self._finished]

    @property
    def can_train(self) -> bool:
        """Whether the samples of the step to be trained next are there."""
        return not self.missing

    def train(self) -> None:
        """Notes an update."""
        assert self.can_train
        self._finished.difference_update(self.groups_of(self.trained))
        self.trained += 1

    def _startable(self) -> list[int]:
        return [] if self.version is None else self._not_started(self.version + self.max_staleness)

    def _not_started(self, last: int) -> list[int]:
        groups = range(self.groups_of(self.trained).start, self.groups_of(min(last, self.num_steps - 1)).stop)
        return [group for group in groups if group not in self._running and group not in self._finished]
