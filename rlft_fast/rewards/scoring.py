"""Calls a reward function on a batch, and refuses results that would spoil the update."""

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from typing import Any

from rlft_fast.errors import StepError, brief, text_of
from rlft_fast.foreign import LARGEST_REWARD, ForeignCode
from rlft_fast.plugins import function_name

# Called as f(prompts=..., completions=..., completion_ids=..., **columns), once for a batch.
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]

Text = str | Sequence[Mapping[str, Any]]
"""A text, or with `reward.conversational` a list of messages, dicts with role and content."""

FAILED = float("nan")
"""In the place of a reward: the function failed on this sample, which is left out whatever other functions say."""
_SHOWN_ROWS = 5
ARGUMENTS = ("prompts", "completions", "completion_ids")


class RewardError(StepError, ValueError):
    """A reward function raised an error, or returned something that is no reward."""

    part = "reward function"


def compute_rewards(
    function: RewardFunction,
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[float | None]:
    """Rewards of a batch from one call of `function`. The function gets copies: it may change its arguments.

    Args:
        function: Called as `f(prompts=, completions=, completion_ids=, **columns)`; may be async. All async functions
            of a process run in one event loop, in a thread of its own: a client of a server may be kept between calls.
            The result is any series of numbers: a list, a generator, an array, a tensor, a column of pandas.
        prompts: B prompts, texts or lists of messages.
        completions: B completions, texts or lists of messages: an answer, or the turns of an episode.
        completion_ids: B lists of token ids.
        columns: The other columns of the data set, each of B values. A function names the columns that it reads, and
            collects the rest in `**columns`.

    Returns:
        B rewards, numbers up to `LARGEST_REWARD` in size, None where the function does not judge the sample, or
        `FAILED`.

    Raises:
        ValueError: The arguments differ in length, or a column is named like an argument.
        RewardError: The function raised an error, returned another number of rewards, or returned a value that is
            neither such a number nor None. The message names the function and the sample.
    """
    _check_arguments(prompts, completions, completion_ids, columns)
    name = function_name(function)
    given = {**columns, "prompts": prompts, "completions": completions}
    copies = {name: [copy.deepcopy(value) for value in values] for name, values in given.items()}  # one per sample
    copies["completion_ids"] = [[*ids] for ids in completion_ids]
    call = ForeignCode(f"reward function {name}")
    try:
        with call:
            return _judged(function(**copies), name, prompts, completions)
    except RewardError:
        raise
    except BaseException as error:  # sys.exit in a function must not end the run without a checkpoint
        if call.is_interrupted(error):
            raise
        raise RewardError(
            f"reward function {name} raised {type(error).__name__} on a batch of {len(prompts)} samples: "
            f"{brief(error)}{_hint(error, completions)}"
        ) from error


def check_columns(function: RewardFunction, columns: Collection[str], what: str) -> None:
    """Checks before the run that the function can be called with the columns of a data set.

    Args:
        function: a reward function, as in `compute_rewards`.
        columns: names of the other columns of the data set.
        what: name of the data set in messages.

    Raises:
        ValueError: the function needs a column that is missing, or does not accept a column, or a column is named like
            an argument.
    """
    _check_names(columns)
    try:
        signature = _signature(function)
    except ValueError:
        return
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *columns)))
    except TypeError as error:
        raise ValueError(
            f"reward function {function_name(function)} cannot be called with {', '.join(ARGUMENTS)} and the columns "
            f"of {what}, {sorted(columns)}: {error} (a parameter **columns collects unused columns)"
        ) from error


def warn_of_missing_values(function: RewardFunction, columns: Mapping[str, Sequence[Any]], what: str) -> None:
    """Warns before the run of rows without a value in a column that the function needs.

    Args:
        function: a reward function, as in `compute_rewards`.
        columns: the other columns of the data set.
        what: name of the data set in messages.
    """
    try:
        parameters = _signature(function).parameters
    except ValueError:
        return
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    for name in sorted(needed & columns.keys()):
        if rows := [i for i, value in enumerate(columns[name]) if is_missing(value)]:
            shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (" and more" if len(rows) > _SHOWN_ROWS else "")
            warnings.warn(
                f"{len(rows)} rows of {what} ({shown}, counted from 0) have no {name!r}, which reward function "
                f"{function_name(function)} reads. It must return None for these rows, which leaves their samples out; "
                "otherwise fill the column in, or leave the rows out",
                stacklevel=3,
            )


def is_missing(value: Any) -> bool:
    """Whether a row has no value in a column: None, or NaN, as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _signature(function: RewardFunction) -> inspect.Signature:
    """Raises ValueError for a compiled function, which may have none."""
    return inspect.signature(function, follow_wrapped=False)  # a wrapper may fill in an argument of the inner function


def _hint(error: BaseException, completions: Sequence[Text]) -> str:
    """Ending of the message about an error of a function that is written for the other form of completions."""
    if not isinstance(error, (TypeError, AttributeError)) or not completions:
        return ""
    said = brief(error)
    if isinstance(completions[0], str):
        is_likely, form, other = re.search("string indices|'str' object", said), "texts", "true gives messages"
    else:
        is_likely, form, other = re.search("'?list'?", said), "lists of messages", "false gives texts"
    return f" (completions are {form}; reward.conversational: {other})" if is_likely else ""


def _check_names(columns: Collection[str]) -> None:
    taken = sorted(set(columns) & set(ARGUMENTS))
    if taken:
        raise ValueError(
            f"the data set has a column named {taken[0]!r}, but reward functions have an argument of this name: "
            "rename the column"
        )


def _check_arguments(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> None:
    _check_names(columns)
    for name, values in {"completions": completions, "completion_ids": completion_ids, **columns}.items():
        if len(values) != len(prompts):
            raise ValueError(f"{name} has {len(values)} entries, expected one for each of the {len(prompts)} prompts")


def as_texts(values: Sequence[Text]) -> list[str]:
    """Texts as they are, and the last message's words of lists of messages."""
    return [value if isinstance(value, str) else value[-1]["content"] for value in values]


def _judged(result: Any, name: str, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float | None]:
    """What a function has returned, as `compute_rewards` returns it. Awaiting, iterating, converting run its code."""
    values = _as_list(_wait(result) if inspect.isawaitable(result) else result, name, len(prompts))
    for i, value in enumerate(values):
        if not (value is None or value is FAILED or is_reward(value)):
            raise RewardError(
                f"reward function {name} returned {text_of(value, 200, repr)} for sample {i} "
                f"(prompt {_shorten(prompts[i])}, completion {_shorten(completions[i])}), expected a number of at most "
                f"{LARGEST_REWARD:g} in size, or None where the function does not judge the sample"
            )
    return [None if value is None else float(value) for value in values]


def _wait(result: Awaitable[Any]) -> Any:
    """What an async function returns. A signal that ends the wait ends the function, too."""
    future = asyncio.run_coroutine_threadsafe(_finish(result), _event_loop())
    try:
        return future.result()
    finally:
        future.cancel()


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all async functions. The caller's thread may have a loop that runs, as in a notebook."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with contextlib.suppress(BaseException):  # sys.exit or KeyboardInterrupt of a function, see `_wait`
                loop.run_forever()

    threading.Thread(target=run, name="rlft_fast rewards", daemon=True).start()
    return loop


def _as_list(result: Any, name: str, num_samples: int) -> list[Any]:
    """The result of a reward function as a list of `num_samples` Python numbers."""
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        raise RewardError(f"reward function {name} returned {type(result).__name__}, expected a list of numbers")
    values = [_as_python(value) for value in values]
    if len(values) != num_samples:
        raise RewardError(f"reward function {name} returned {len(values)} rewards for {num_samples} samples")
    return values


def _as_python(value: Any) -> Any:
    """A scalar of NumPy, torch or pandas as a Python number; None for pandas.NA."""
    if type(value).__name__ == "NAType":
        return None
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # it has several numbers
            return value.item()
    return value


def is_reward(value: Any) -> bool:
    """Whether the value is a number whose square is still finite."""
    try:
        return isinstance(value, (Real, Decimal)) and abs(float(value)) <= LARGEST_REWARD
    except (OverflowError, ValueError):  # an integer larger than any float; a Decimal that signals
        return False


def _shorten(value: Text, limit: int = 80) -> str:
    """Both ends of a text: a prompt is recognised by its beginning, and an answer stands at the end."""
    text = value if isinstance(value, str) else str(value)
    return repr(text) if len(text) <= limit else repr(f"{text[: limit // 2]} … {text[-limit // 2 :]}")
