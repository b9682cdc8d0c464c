"""Needs Math-Verify (extra math). What it reads alone is a test of its own; here are texts of models and of data."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlft_fast.rewards import math_verify
from rlft_fast.rewards.mathematics import _amount, _readable

pytest.importorskip("math_verify")


def test_math_verify():
    completions = [r"so $\frac{1}{2}$", "The answer is $x=3$", r"\boxed{0.5}", "7", "no idea", r"$\{2, 1\}$"]
    answers = ["1/2", "3", r"\frac12", 7, "4", r"\{1,2\}"]
    assert math_verify([], completions, [], answer=answers) == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\boxed{\boxed{3}}", "3", 1.0),
        (r"\boxed{-3}", "3", 0.0),
        ("\\boxed{\u22123}", "-3", 1.0),
        (r"\boxed{50\%}", "50%", 1.0),
        (r"\boxed{1{,}234}", "1,234", 1.0),
        (r"\boxed{5\text{ cm}}", "5 cm", 1.0),
        (r"\boxed{72}", "48 / 2 = 24, 48 + 24 = 72\n#### 72", 1.0),
        (r"\boxed{}", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{3}", "", None),
        (r"\boxed{3}", None, None),
        (r"\boxed{3}", math.nan, None),
        # Would never end; math-verify stops it after 5 seconds.
        pytest.param(r"\boxed{10^{10^{10}}}", "3", 0.0, marks=pytest.mark.slow),
    ],
)
def test_math_verify_reads_what_models_write(completion, answer, expected):
    assert math_verify([], [completion], [], answer=[answer]) == [expected]


def test_math_verify_off_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_verify, [], [r"\boxed{3}"], [], answer=["3"]).result() == [1.0]


# The same value in the words of data sets and models.
EIGHTEEN = [
    "18", "18 dollars", "18 km/h", "about 18", "**18**", r"\[18\]", r"\(18\)", "$18$", "$18", r"\$18", "18 m", "18.",
    "The answer is 18.", "Answer: **18**", "`18`", "*18*", "1.8e1", "1.8E+01", "18 USD", "18€", r"\boxed{18}", "18.0",
    r"\boxed{18 dollars}", r"\boxed{18\text{ dollars}}", r"$\boxed{18}$", r"\boxed{\$18}", r"\boxed{**18**}", "36/2",
]  # fmt: skip
EIGHTEEN_OF_MODELS = [
    "<answer>18</answer>", "first 20, but then 18", "20? No: 18", r"the answer is \$18", r"**Final answer:** \[18\]",
    "It costs 20 euros less 2, so **18 euros**.",
]  # fmt: skip
# Other values, also where 18 stands before the final answer.
OTHER = [
    "-18", "\u221218", "{-}18", "20", "1.8", "180", "18/5", "1.8e2", "18e-1", "18 or 20", "**20**", r"\[20\]", "2**18",
    r"\boxed{20 dollars}", r"\boxed{-18 dollars}", "18 of them are red, so the answer is 20", "18\n\n20", "about 20",
    "It is 18, no: 20.", "$18 + 2 = 20$", "",
]  # fmt: skip
# Math-Verify alone reads 18 in these words of a model, but the data has another value.
OTHER_OF_DATA = [
    "18 million",
    "18 dozen",
    "18 squared",
    "18 pi",
    "2pi",
    "18x",
    "18 x",
    "18 < x",
    "18 or 20",
    "18 more than x",
]


@pytest.mark.parametrize("answer", EIGHTEEN)
@pytest.mark.thin(4)
def test_the_words_around_a_number_change_nothing(answer):
    right = [*EIGHTEEN, *EIGHTEEN_OF_MODELS]
    rewards = math_verify([], [*right, *OTHER], [], answer=[answer] * len([*right, *OTHER]))
    scored = dict(zip([*right, *OTHER], rewards, strict=True))
    assert [text for text in right if scored[text] != 1.0] == []
    assert [text for text in OTHER if scored[text] != 0.0] == []


@pytest.mark.parametrize("answer", [*OTHER[:12], "about 20", *OTHER_OF_DATA])
def test_an_answer_of_another_value_is_not_18(answer):
    right = ["18", "18 dollars", r"\[18\]", r"\boxed{18 dollars}"]  # products of words take long to compare
    assert 1.0 not in math_verify([], right, [], answer=[answer] * len(right))


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("-18", "{-}18", 1.0),
        ("{-}18 degrees", "-18", 1.0),
        ("18", "{-}18", 0.0),
        ("1e-05", 1e-05, 1.0),
        ("0.00001", "1e-05", 1.0),
        (r"$1 \times 10^{-5}$", 1e-05, 1.0),
        ("2e-05", 1e-05, 0.0),
        ("1", 1e-05, 0.0),
        ("-5", "1e-05", 0.0),
        ("0.0000002", 1e-07, 0.0),  # six decimals of both are 0
        ("0.0000001", 1e-07, 1.0),
        ("0.333333", "1/3", 1.0),
        ("3/4", "3/4 cup", 1.0),
        ("3", "3/4 cup", 0.0),
        ("1,234 dollars", "$1,234", 1.0),
        ("1.5", "1.5 million", 0.0),
        ("2", "2pi", 0.0),
        (r"$2\pi$", r"2\pi", 1.0),
        ("20", "18 or 20", 0.0),
        ("$3x+2$", "3x+2", 1.0),
        ("2 ** 3 and 3 ** 2 give 17", "17", 1.0),
        ("18", "The answer is \\(18\\)", 1.0),
    ],
)
def test_numbers_of_data_sets(completion, answer, expected):
    assert math_verify([], [completion], [], answer=[answer]) == [expected]


def test_reading_takes_linear_time():
    for piece in ("*a", "**", "a ", "1e", "\\boxed{a", "`", "{-}"):
        text = piece * (400_000 // len(piece))
        started = time.perf_counter()
        _readable(text)
        _amount(text)
        assert time.perf_counter() - started < 2
