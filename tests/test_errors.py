"""Texts of exceptions and values that other code has made."""

import pytest

from rlft_fast.errors import brief, text_of


class MuteError(Exception):
    def __str__(self):
        raise SystemExit

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (KeyError("a"), "'a'"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("a\n  b"), "a b"),
        (ValueError("abcdefghijklmnopqrstuvwxyz" * 10**6), "abcdefghij ... qrstuvwxyz"),
        (MuteError(), "(MuteError cannot be shown: str() raises SystemExit)"),
        (ValueError(10**5000), "(ValueError cannot be shown: str() raises ValueError)"),
    ],
)
def test_any_exception_has_a_short_text(value, said):
    assert brief(value, 20) == said


def test_a_value_whose_repr_raises():
    assert text_of([MuteError()], 20, repr) == "(list cannot be shown: repr() raises SystemExit)"
    assert text_of("a\nb", 20) == "a\nb"
