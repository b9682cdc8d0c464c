"""Which prompts a step takes: prompts of the stream, and prompts drawn again because answers to them differ."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlft_fast.config import Config
from rlft_fast.data import Samples
from rlft_fast.trainer.collect.experience import compared_rewards
from rlft_fast.trainer.prompts import Prompts

_MEMORY = 0.5  # the policy has moved on since the last group of a prompt

Numbers = npt.NDArray[np.float64]


class Chosen(NamedTuple):
    """Prompts for a rollout."""

    rows: list[int]
    """Rows of the data: first the prompts of the stream, then the prompts drawn again."""
    num_streamed: int
    """How many come from the stream."""


class _Planned(NamedTuple):
    first_prompt: int
    chosen: Chosen


class Curriculum:
    """Draws a share of the prompts by the running variance of their rewards: p(1-p) of the pass rate p.

    The variance is "learnability" (arXiv 2502.12272). Each new group of a prompt halves the weight of the prompt's
    earlier groups. A prompt whose rewards were all equal has the variance 0: it comes back with the stream.

    Choices depend on the seed, the step and the rewards of the steps before, and are the same on every rank. With
    ``rollout.max_staleness: S``, `plan` chooses for a step when it is S updates away: by the rewards of all steps that
    are more than S before it, never by what time has brought.

    Args:
        prompts: to learn from, in N rows.
        config: of the run.
    """

    def __init__(self, prompts: Prompts, config: Config) -> None:
        self.prompts, self.config = prompts, config
        self.share = config.algorithm.curriculum
        self._plan: dict[int, _Planned] = {}  # by step; threads read it
        self.forget()

    def forget(self) -> None:
        """Starts without estimates and plan."""
        self._plan = {}
        self.count_N, self.mean_N, self.squares_N = np.zeros((3, len(self.prompts)))

    def plan(self, first_step: int, first_prompt: int, last_step: int) -> None:
        """Chooses for the steps that have no choice yet, by the rewards of now.

        Args:
            first_step: the next to be trained. The plan of earlier steps is forgotten.
            first_prompt: number of prompts of the stream that the steps before it have taken.
            last_step: the last to be chosen for.
        """
        plan = {step: planned for step, planned in self._plan.items() if step >= first_step}
        for step in range(first_step, last_step + 1):
            if step not in plan:
                plan[step] = _Planned(first_prompt, self.choose(step, first_prompt))
            first_prompt = plan[step].first_prompt + plan[step].chosen.num_streamed
        self._plan = plan

    def planned(self, step: int) -> Chosen:
        """What `plan` has chosen for a step."""
        return self._plan[step].chosen

    def choose(self, step: int, first_prompt: int, taken: Sequence[int] = ()) -> Chosen:
        """``prompts_per_step`` prompts.

        Fewer than the configured share are drawn again where fewer have a variance above 0.

        Args:
            step: counts from 0.
            first_prompt: number of prompts of the stream that were taken before.
            taken: rows of earlier rollouts of the step.
        """
        seed, count = self.config.seed, self.config.rollout.prompts_per_step
        stream = self.prompts.order(first_prompt, count, seed)
        weight_N = self._variance_N
        weight_N[[*stream, *taken]] = 0.0
        generator = np.random.Generator(np.random.PCG64((seed, step, len(taken))))
        again = _draw(weight_N, int(self.share * count), generator) if self.share else []
        num_streamed = count - len(again)
        return Chosen(stream[:num_streamed] + again, num_streamed)

    def learn(self, rows: Sequence[int], scored: Samples) -> None:
        """Takes the rewards of a step into the estimates.

        Args:
            rows: row of the data of each prompt of the step.
            scored: samples of all ranks, before their rewards are clipped and penalized.
        """
        if not self.share:
            return
        row_B, value_B = compared_rewards(scored, self.config.algorithm.filter_by, self.config.reward.clip)
        row_B, value_B = row_B[~np.isnan(value_B)], value_B[~np.isnan(value_B)]  # a part may be missing
        row_G, group_B = np.unique(np.array(rows, dtype=np.int64)[row_B], return_inverse=True)
        count_G, mean_G, squares_G = _moments(value_B, group_B, len(row_G))
        before_G, gap_G = _MEMORY * self.count_N[row_G], mean_G - self.mean_N[row_G]
        total_G = before_G + count_G
        self.squares_N[row_G] = _MEMORY * self.squares_N[row_G] + squares_G + gap_G**2 * before_G * (count_G / total_G)
        self.mean_N[row_G] += gap_G * (count_G / total_G)
        self.count_N[row_G] = total_G

    def metrics(self) -> dict[str, float]:
        """The mean of the running mean rewards (the pass rate, if rewards are 0 or 1) of all prompts seen so far."""
        seen_N = self.count_N > 0
        return {"pass_rate_estimate": float(self.mean_N[seen_N].mean())} if seen_N.any() else {}

    def state(self) -> dict[str, Any]:
        """The estimates of the prompts seen so far, and the plan where prompts are drawn, as JSON."""
        (rows,) = self.count_N.nonzero()
        columns = {"count": self.count_N, "mean": self.mean_N, "squares": self.squares_N}
        plan = [[step, planned.first_prompt, *planned.chosen] for step, planned in self._plan.items() if self.share]
        estimates = {name: column_N[rows].tolist() for name, column_N in columns.items()}
        return {"row": rows.tolist(), **estimates} | ({"plan": plan} if plan else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave; {}: there are no estimates yet. A plan of steps of another size is forgotten.

        Raises:
            ValueError: the estimates are of other data.
        """
        self.forget()
        if not (self.share and (rows := state.get("row"))):
            return
        if self.config.rollout.max_staleness:
            plan, count = state.get("plan", ()), self.config.rollout.prompts_per_step
            self._plan = {
                step: _Planned(first, Chosen(own, num)) for step, first, own, num in plan if len(own) == count
            }
        highest = max(rows[-1], *(row for planned in self._plan.values() for row in planned.chosen.rows), 0)
        if highest >= len(self.prompts):
            raise ValueError(
                f"the checkpoint has the rewards of row {highest} of the training data, which now has "
                f"{len(self.prompts)} rows: give the data that the run had, or set algorithm.curriculum to 0"
            )
        self.count_N[rows], self.mean_N[rows], self.squares_N[rows] = (
            state[name] for name in ("count", "mean", "squares")
        )

    @property
    def _variance_N(self) -> Numbers:
        return self.squares_N / np.maximum(self.count_N, 1.0)


def _moments(value_B: Numbers, group_B: npt.NDArray[np.int64], num_groups: int) -> tuple[Numbers, Numbers, Numbers]:
    """(G,) count, mean, and sum of squared differences from the mean, which is exactly 0 for equal values."""
    lowest_G, (count_G, above_G, squares_G) = np.full(num_groups, np.inf), np.zeros((3, num_groups))
    np.minimum.at(lowest_G, group_B, value_B)
    above_B = value_B - lowest_G[group_B]
    np.add.at(count_G, group_B, 1.0)
    np.add.at(above_G, group_B, above_B)
    np.add.at(squares_G, group_B, (above_B - (above_G / count_G)[group_B]) ** 2)
    return count_G, lowest_G + above_G / count_G, squares_G


def _draw(weight_N: Numbers, count: int, generator: np.random.Generator) -> list[int]:
    """At most so many rows of weights above 0, without replacement, with probabilities in proportion to the weights.

    The largest log(u) / w win, u uniform in [0, 1): Efraimidis and Spirakis, "Weighted random sampling", 2006.
    """
    (rows,) = weight_N.nonzero()
    with np.errstate(divide="ignore"):
        key = np.log(generator.random(len(rows))) / weight_N[rows]
    return rows[np.argsort(-key, kind="stable")[:count]].tolist()
