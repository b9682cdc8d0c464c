"""How a method (an advantage, a policy loss, a choice of tokens) says what it reads, and how it is given that.

The parameters of a method name the fields of the `Batch` and the settings that it reads. Two fields cost something and
are made only for a method that declares its need with `needs`: ``baseline_B`` and ``selected_T``. A policy loss that
declares its need of an advantage does not run for tokens without one.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rlft_fast.data import Batch
from rlft_fast.errors import StepError, brief
from rlft_fast.foreign import ForeignCode
from rlft_fast.plugins import function_name, parameter_names

TokenSelection = Callable[..., Tensor]
"""Chooses tokens of the whole batch: (T,) float32, 1 at the chosen ones, else 0. See `clip_cov_tokens`."""

_ATTRIBUTE = "rlft_fast_needs"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Needs(NamedTuple):
    """What a method declares, see `needs`."""

    advantage: bool = False
    greedy: bool = False
    selection: TokenSelection | None = None
    clipped: Callable[..., Tensor] | None = None


def needs(
    *, advantage: bool = False, greedy: bool = False, selection: TokenSelection | None = None,
    clipped: Callable[..., Tensor] | None = None,
) -> Callable[[_Method], _Method]:  # fmt: skip
    """A decorator that declares what a method needs.

    Args:
        advantage: for a policy loss: the loss of a token and its gradient are 0 where the token's advantage is 0, so
            that such tokens need not run.
        greedy: for an advantage: sample a greedy answer to every prompt; its reward is ``baseline_B``.
        selection: for a policy loss: a function that chooses ``selected_T`` when the update starts. Its parameters name
            fields of the `Batch`; ``seed`` is another number in every step.
        clipped: for a policy loss that bounds the weight of a token and keeps the token's gradient: a function with the
            loss's tensors and options among its parameters, which returns (T,) bool, True at the bounded tokens.
            ``clip_share`` in the log counts them. None: it counts the tokens without a gradient.
    """

    def declare(method: _Method) -> _Method:
        setattr(method, _ATTRIBUTE, (method, Needs(advantage, greedy, selection, clipped)))
        return method

    return declare


def needs_of(method: Callable[..., Any]) -> Needs:
    """What the method declares; nothing where it declares nothing.

    A wrapper made by `functools.wraps` has what the function inside declares, but for the promise about its advantage,
    which the wrapper may break.
    """
    owner, found = getattr(method, _ATTRIBUTE, (method, Needs()))
    return found if owner is method else found._replace(advantage=False)


def call_method(what: str, method: Callable[..., Any], arguments: Mapping[str, Any], error: type[StepError]) -> Any:
    """Calls a method that may be a user's.

    Args:
        what: the kind of method, for messages.
        method: see the module.
        arguments: by name.
        error: class of the error.

    Raises:
        StepError: of this class: the method raised.
    """
    name = function_name(method)
    call = ForeignCode(f"{what} {name}")
    try:
        with call:
            return method(**arguments)
    except BaseException as raised:
        if call.is_interrupted(raised):
            raise
        raise error(f"{what} {name} raised {type(raised).__name__}: {brief(raised)}") from raised


def arguments_of(what: str, method: Callable[..., Any], batch: Batch, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a method reads; a parameter that is neither a setting nor a field keeps its default.

    Args:
        what: the kind of method, for messages.
        method: see the module.
        batch: the whole batch.
        settings: numbers by name, which go before fields.

    Raises:
        ValueError: a field that the method reads is missing.
    """
    arguments: dict[str, Any] = {}
    for name in parameter_names(method):
        if name in settings:
            arguments[name] = settings[name]
        elif hasattr(batch, name):
            arguments[name] = getattr(batch, name)
            if arguments[name] is None:
                raise ValueError(f"{what} {function_name(method)} reads {name}, which this batch does not have")
    return arguments
