"""Reward functions that compare a completion with a known answer."""

import json
import re
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, cast

from rlft_fast.plugins import suggestion
from rlft_fast.rewards.scoring import RewardFunction, Text, as_texts, is_missing

# A sign after a word, a digit or a bracket is no part of the number: 3-5 is a difference. A comma or a no-break space
# is part of a number only if it separates thousands: 1,234 is one number, 1,2,3 are three numbers. A plain space always
# separates numbers: a list may end in 90 100.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])(?P<sign>[-+\u2212\u2013]|\{-\})(?:\\?[$€£])?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?P<comma>,(?:\\!)?|\{,\})[0-9]{3}(?:(?P=comma)[0-9]{3})*(?![0-9])"
    r"|(?<![\w.,])[1-9][0-9]{0,2}(?P<space>\\[, ]|[\u00a0\u2009\u202f])[0-9]{3}(?:(?P=space)[0-9]{3})*(?![0-9])"
    r"|[0-9]+|(?<![0-9.])(?=\.[0-9]))"
    r"(?:\.[0-9]+)?)"
)
_SEPARATOR = re.compile(r"[^0-9.]+")
# Text before digits that are only part of a number: the 2 in 1/2, 1:2, \frac{1}{2}, \sqrt{2}, 10^2, 10^{-2} and 1e-2.
_PART = re.compile(r"(?:[0-9)}]\s{0,3}/\s{0,3}|[0-9]:|\}\{|\\(?:sqrt|[dt]?frac)\{?|\^\{?|[0-9][eE][-+]?)$")
_LONGEST_PART = 10  # characters


def last_number(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str | int | float],
    **columns: Any,
) -> list[float | None]:
    """1.0 if the last number in the completion equals the answer, else 0.0.

    Numbers are compared by value: 1,200.0 equals 1200. Signs, decimals and separators of thousands (commas, no-break
    spaces, LaTeX spaces) are read. Fractions, ratios, times, roots, powers and exponents are not read: if the last
    number of a text is part of such an expression, the text has no number. `math_verify` reads most of them.

    Args:
        prompts: Not read.
        completions: B texts, or lists of messages, of which the last one counts.
        completion_ids: Not read.
        answer: B numbers, or texts. The last number of a text is the answer, as in GSM8K's "… #### 72".
        **columns: Not read.

    Returns:
        B rewards. None, and a warning, where an answer holds no number; None where it is missing.
    """
    targets = [_number(expected) for expected in answer]
    _warn_of_unreadable("last_number", "holds no number", answer, targets)
    return [
        None if target is None else float(_last_number(completion) == target)
        for completion, target in zip(as_texts(completions), targets, strict=True)
    ]


def exact_match(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """1.0 if the completion equals the answer, apart from white space at the ends, else 0.0.

    Args:
        prompts: Not read.
        completions: B texts, or lists of messages, of which the last one counts.
        completion_ids: Not read.
        answer: B texts.
        **columns: Not read.

    Returns:
        B rewards. None, and a warning, where an answer is empty, as CSV has missing ones, or is no text, as a list of
        answers; None where it is missing.
    """
    targets = [None if is_missing(expected) else _written(expected) for expected in answer]
    _warn_of_unreadable("exact_match", "is empty or no text", answer, targets)
    return [
        None if target is None else float(completion.strip() == target)
        for completion, target in zip(as_texts(completions), targets, strict=True)
    ]


def regex_match(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    pattern: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """1.0 if the regular expression in the column `pattern` matches a part of the completion, else 0.0.

    The reward is None, with a warning, where the pattern is no regular expression, or is empty, which any text would
    match, and None where it is missing.
    """
    expressions = [_compiled(expression) if expression else None for expression in pattern]
    _warn_of_unreadable("regex_match", "is empty or no regular expression", pattern, expressions)
    return [
        None if expression is None else float(expression.search(completion) is not None)
        for completion, expression in zip(as_texts(completions), expressions, strict=True)
    ]


def response_length(
    prompts: Sequence[Text], completions: Sequence[Text], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float | None]:
    """Number of tokens of each completion. With a negative weight, it is a cost of length beside another reward."""
    return [float(len(ids)) for ids in completion_ids]


def reasoning_gym_reward(task_name: str) -> RewardFunction:
    """Makes the reward function of a reasoning-gym task (https://github.com/open-thought/reasoning-gym).

    The function scores the text within the last `<answer>…</answer>`, or the whole completion if it has no such tags.
    Many tasks give a part of the reward to a text that merely contains the right answer. Where a task raises an error
    because it cannot read an answer, the reward is 0.0.

    Args:
        task_name: Name of a task, such as "chain_sum".

    Returns:
        A reward function that reads the column `entry`: B data set entries of the task, as dicts or JSON texts.

    Raises:
        ImportError: reasoning_gym is not installed.
        ValueError: There is no such task. The message suggests close names.
    """
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ImportError("reasoning_gym is not installed: pip install reasoning-gym") from error
    if task_name not in DATASETS:
        raise ValueError(f"reasoning_gym has no task {task_name!r}{suggestion(task_name, DATASETS)}")
    # reasoning_gym annotates the scoring function as one without arguments.
    score_answer = cast(Callable[[str, dict[str, Any]], float], get_score_answer_fn(task_name))

    def reward(
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        entry: Sequence[dict[str, Any] | str],
        **columns: Any,
    ) -> list[float | None]:
        entries = [json.loads(item) if isinstance(item, str) else item for item in entry]
        return [
            score(_tagged_answer(completion), item)
            for completion, item in zip(as_texts(completions), entries, strict=True)
        ]

    def score(answer: str, entry: dict[str, Any]) -> float:
        try:
            return float(score_answer(answer, entry))
        except Exception:
            score_answer(entry["answer"], entry)  # raises where the entry is at fault, and not the answer
            return 0.0

    reward.__qualname__ = f"reasoning_gym_reward({task_name!r})"
    return reward


def _warn_of_unreadable(function: str, problem: str, values: Sequence[Any], read: Sequence[Any]) -> None:
    """Warns of the first value that is there, and was read as None."""
    if bad := [value for value, found in zip(values, read, strict=True) if found is None and not is_missing(value)]:
        message = f"{function} leaves out samples: {bad[0]!r} {problem}"
        warnings.warn(message, stacklevel=3)


def _written(answer: Any) -> str | None:
    """The answer as a text; None if it is empty, or a list or the like, which no completion equals."""
    return None if isinstance(answer, (list, tuple, dict)) else str(answer).strip() or None


def _compiled(expression: Any) -> re.Pattern[str] | None:
    try:
        return re.compile(expression)
    except (re.error, TypeError):
        return None


def _number(answer: Any) -> Decimal | None:
    """The answer as a number, or the last number in its text; None if there is none, as in a missing answer."""
    if isinstance(answer, str):
        return _last_number(answer)
    try:
        number = Decimal(answer if type(answer) is int else str(answer))  # Python writes at most 4300 digits
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _last_number(text: str) -> Decimal | None:
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or _PART.search(text[max(last.start() - _LONGEST_PART, 0) : last.start()]):
        return None
    number = Decimal(_SEPARATOR.sub("", last["digits"]))
    return number if last["sign"] in (None, "+") else number.copy_negate()  # exact; the minus operator rounds


def _tagged_answer(completion: str) -> str:
    """The text within the last <answer>…</answer>, or the whole completion.

    The search begins at the end: a regular expression takes quadratic time if a model opens tag after tag.
    """
    before, _, _ = completion.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return (inside.partition("</answer>")[0] if opened else completion).strip()
