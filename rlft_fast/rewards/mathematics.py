"""A reward function that compares mathematics, as Math-Verify reads it."""

import math
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from rlft_fast.rewards.scoring import Text, as_texts, is_missing

# Math-Verify reads none of these: LaTeX's minus as an ordinary symbol, an escaped currency, code, tags.
_REPLACED = (("\u2212", "-"), ("{-}", "-"), ("`", ""), ("<answer>", " "), ("</answer>", " "))
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)\\\$")
_EMPHASIS = re.compile(r"(?<![\w)*])(\*{1,3})(?=\S)([^*\n]*)(?<=\S)\1(?![\w(*])")
_PERCENT = re.compile(r"(?<=[0-9])\s?percent\b")
_SCIENTIFIC = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,2}(?![\w.]*\w)")
_DELIMITED = re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\[(.*)\\\]|\\\((.*)\\\)", re.DOTALL)
_DELIMITER = re.compile(r"\$|\\[(\[]|\\boxed")
_BOXED = re.compile(r"\\boxed\{([^{}]{1,100})\}")
_AMOUNT = re.compile(
    r"(?P<before>(?:[A-Za-z]+[:.]?\s+)*)(?P<number>[-+]?[$€£]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?)"
    r"(?P<after>(?:\s+[A-Za-z]{2,}(?:/[A-Za-z]+)?)*)[.!]?"
)
_BEFORE = re.compile(
    r"(?:(?:the|final|answer|total|is|are|equals|about|around|approximately|roughly|exactly)[:.]?\s+)*"
)
# Words after a number that give it another value.
_OTHER_VALUE = re.compile(
    r"\b(?:or|and|plus|minus|times|over|than|more|less|fewer|not|below|negative|ago|squared|cubed|factorial|mod|base|per"
    r"|hal(?:f|ves)|thirds?|fourths?|quarters?|fifths?|tenths?|hundred|thousand|[mbtr]+illion|bn|k|m|dozen|pi|e|i|sqrt"
    r"|sin|cos|tan|log|ln|exp|am|pm)\b",
    re.IGNORECASE,
)


def math_verify(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str | int | float],
    **columns: Any,
) -> list[float | None]:
    """1.0 if the completion's final answer is mathematically equal to the column `answer`, else 0.0.

    math-verify (https://github.com/huggingface/Math-Verify) reads both texts: LaTeX, fractions, sets, intervals. An
    answer of the data may be bare mathematics, or one number among words: "18 dollars", "about 18". Units are not
    compared. The reward is None if the answer is missing, or if math-verify cannot read it. math-verify has time
    limits, 5 seconds to read and 5 seconds to compare; over time the reward is 0.0. The limits work only in the main
    thread: in another thread there are none, and 10^{10^{10}} never ends.

    Raises:
        ImportError: math_verify is not installed.
    """
    try:
        from math_verify import parse, verify  # pyrefly: ignore[missing-import]  (optional)
    except ModuleNotFoundError as error:
        if error.name != "math_verify":
            raise
        raise ImportError("math_verify is not installed: pip install math-verify") from error
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    rewards: list[float | None] = []
    for completion, expected in zip(as_texts(completions), answer, strict=True):
        if is_missing(expected):  # None and NaN would be read as products of letters
            rewards.append(None)
            continue
        gold, found = _read_answer(parse, expected, limit), _read(parse, _readable(completion), limit)
        is_right = verify(gold, found, float_rounding=_decimals(gold), timeout_seconds=limit)
        rewards.append(float(is_right) if gold else None)
    return rewards


def _read_answer(parse: Callable[..., list[Any]], expected: Any, limit: int | None) -> list[Any]:
    """What Math-Verify reads in an answer of the data, which may be bare mathematics, or a number among words."""
    if isinstance(expected, float):
        expected = f"{Decimal(str(expected)):f}"
    text = _readable(str(expected).strip())
    if delimited := _DELIMITED.fullmatch(text):
        text = next(filter(None, delimited.groups()), "")
    amount = _amount(text)
    # Math-Verify reads a bare 1/2 as text, and $1/2$ as mathematics.
    forms = [f"${amount or text}$", text]
    if amount is None and _DELIMITER.search(text):
        forms.reverse()
    return next(filter(None, (_read(parse, form, limit) for form in forms)), [])


def _read(parse: Callable[..., list[Any]], text: str, limit: int | None) -> list[Any]:
    return parse(text, parsing_timeout=limit)


def _readable(text: str) -> str:
    """The text in words that Math-Verify reads, with the same value."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _EMPHASIS.sub(r"\2", _ESCAPED_DOLLAR.sub("", text))
    text = _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", _PERCENT.sub("%", text))
    return _BOXED.sub(lambda box: f"\\boxed{{{_amount(box[1].strip()) or box[1]}}}", text)


def _amount(text: str) -> str | None:
    """The only number in a text of words: 18 in "about 18", "18 dollars" and "18 km/h". None in any other text."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return None
    is_value = _BEFORE.fullmatch(found["before"].lower()) and not _OTHER_VALUE.search(found["after"])
    return re.sub("[$€£]", "", found["number"]) if is_value else None


def _decimals(gold: list[Any]) -> int:
    """How many decimals are compared: 6, and so many of a small number that 3 of its digits are."""
    try:
        size = abs(float(gold[0]))
    except (IndexError, TypeError, ValueError, OverflowError):
        return 6
    return max(6, 3 - math.floor(math.log10(size))) if 1e-300 < size < 1 else 6
