"""Learning-rate schedules: the share of the peak learning rate at each optimizer step.

A schedule is a function of the step alone, so a resumed run needs no state of it.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from rlft_fast.config import OptimizerConfig
from rlft_fast.errors import brief
from rlft_fast.foreign import ForeignCode
from rlft_fast.plugins import find_function, parameter_names, required_names


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": _constant, "linear": _linear, "cosine": _cosine, "wsd": _linear,
}  # fmt: skip


class Schedule:
    """Linear warm-up, then a decay; or a function of the user's.

    Args:
        config: the schedule's settings.
        num_steps: optimizer steps of the whole run.

    Raises:
        ValueError: the user's function does not exist, does not take ``step`` and ``num_steps``, raises, or returns
            something else than a number from 0 on at any step.
    """

    def __init__(self, config: OptimizerConfig, num_steps: int) -> None:
        self.num_steps = num_steps
        self._floor = config.min_learning_rate / config.learning_rate
        self._warmup = config.warmup_steps or math.ceil(config.warmup_ratio * num_steps)
        self._decay = _DECAYS.get(config.schedule)
        num_decayed = math.ceil(config.decay_ratio * num_steps) if config.schedule == "wsd" else num_steps
        self._start = max(self._warmup, num_steps - num_decayed)
        self._own = [] if self._decay else _own_factors(config.schedule, num_steps)

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at an optimizer step, counted from 0. Steps after the last have its end."""
        if self._decay is None:
            return self._own[min(step, self.num_steps - 1)]
        if step < self._warmup:
            return (step + 1) / self._warmup
        progress = min(max(step - self._start, 0) / max(self.num_steps - self._start, 1), 1.0)
        return self._decay(progress) * (1.0 - self._floor) + self._floor


def _own_factors(name: str, num_steps: int) -> list[float]:
    """The factors of a user's function at all steps: what is wrong with one of them is told before the first step."""
    call = ForeignCode(f"schedule {name}")
    with call:
        function = find_function("schedule", _DECAYS, name)
    names = ("step", "num_steps")
    if not {*required_names(function)} <= {*names} <= {*parameter_names(function)}:
        raise ValueError(f"schedule {name} takes {', '.join(parameter_names(function))}, expected step and num_steps")
    with call:
        return [_checked(name, function, step, num_steps) for step in range(num_steps)]


def _checked(name: str, function: Callable[..., Any], step: int, num_steps: int) -> float:
    try:
        found = function(step=step, num_steps=num_steps)
    except Exception as error:
        raise ValueError(f"schedule {name} raises {type(error).__name__} at step {step}: {brief(error)}") from error
    if isinstance(found, bool) or not isinstance(found, Real) or not 0 <= float(found) < math.inf:
        raise ValueError(
            f"schedule {name} returns {brief(found)} at step {step}, expected the share of learning_rate: a number "
            "from 0 on"
        )
    return float(found)
