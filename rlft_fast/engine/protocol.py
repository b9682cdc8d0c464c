"""`Engine`: what a trainer asks of an engine, wherever it lives; and `Future`, a result that is asked for later."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from rlft_fast.config import ModelConfig
from rlft_fast.data import Batch
from rlft_fast.engine.facts import EngineFacts
from rlft_fast.engine.loss import Loss, Output
from rlft_fast.errors import brief

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a call that has begun.

    Args:
        wait: returns the result, or raises the call's error. It is called once, at the first `result`.
    """

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait
        self._found: list[T] = []
        self._error: Exception | None = None

    def result(self) -> T:
        """Waits for the call. Raises what the call raised, at every time."""
        if not self._found and self._error is None:
            try:
                self._found.append(self._wait())
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._found[0]


def results(futures: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """The results by name. All calls are waited for, also where one of them fails.

    Args:
        futures: by name, in the order in which an error counts.

    Raises:
        Exception: the first error. A note on it names every other call that failed, and says why.
    """
    found: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except Exception as error:
            errors[name] = error
    if not errors:
        return found
    first, *others = errors
    for name in others:
        errors[first].add_note(f"{name} failed, too: {type(errors[name]).__name__}: {brief(errors[name])}")
    raise errors[first]


class Engine(Protocol):
    """The methods that a trainer or a loop of one's own calls. `FSDPEngine` says what each does.

    ``submit_infer`` and ``submit_train_step`` begin a call, so that engines with processes of their own work at the
    same time. An engine in this process computes at once. Calls of one engine run in the order in which they began.
    """

    @property
    def config(self) -> ModelConfig:
        """Dtypes, sharding, token cap and, of an engine that trains, the optimizer."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """What stays as it is while the engine works."""
        ...

    def infer(self, batch: Batch, outputs: Sequence[Output]) -> dict[Output, Tensor]: ...

    def submit_infer(self, batch: Batch, outputs: Sequence[Output]) -> Future[dict[Output, Tensor]]: ...

    def score(self, batch: Batch) -> Tensor: ...

    def train_step(
        self, batch: Batch, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> dict[str, float]: ...  # fmt: skip

    def submit_train_step(
        self, batch: Batch, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> Future[dict[str, float]]: ...  # fmt: skip

    def zero_grad(self) -> None: ...

    def forward_backward(
        self, batch: Batch, loss: Loss, *, is_last: bool = True, outputs: dict[Output, Tensor] | None = None
    ) -> dict[str, Tensor]: ...

    def optimizer_step(self, schedule_step: int | None = None) -> dict[str, float]: ...

    def train_mode(self) -> contextlib.AbstractContextManager[None]: ...

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]: ...

    def non_finite_weights(self) -> list[str]: ...
