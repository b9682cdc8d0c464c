import json
import math
import re
import sys
import time

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlft_fast.rewards import (
    RewardError,
    compute_rewards,
    exact_match,
    last_number,
    reasoning_gym_reward,
    regex_match,
    response_length,
)


def score(function, completions: list[str], **columns) -> list[float | None]:
    return function([""] * len(completions), completions, [[]] * len(completions), **columns)


# Texts that language models write around a number, and texts that look like another number.
@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("7, or rather 8", "7", 0.0),
        ("The answer is 7.", 7, 1.0),
        ("$1,234,567.50", "1234567.5", 1.0),
        ("7.000", 7.0, 1.0),
        ("007", "7", 1.0),
        ("-4", "-4", 1.0),
        ("-4", "4", 0.0),
        ("\u22124", -4, 1.0),
        ("+4", "4", 1.0),
        ("\\boxed{-4}", "-4", 1.0),
        ("9-4", "4", 1.0),
        ("1,2,3", "3", 1.0),
        ("1,2345", "2345", 1.0),
        ("it is .5", "0.5", 1.0),
        ("version 1.2.3", "3", 1.0),
        ("0.1", 0.1, 1.0),
        ("-1" + 30 * "0", "-1" + 29 * "0" + "1", 0.0),  # more digits than arithmetic on Decimal keeps
        ("I do not know", "0", 0.0),
        ("", "0", 0.0),
        ("so 72", "She sold 48 / 2 = 24 clips.\n#### 72", 1.0),
        ("1200", "1,200", 1.0),
        ("{-}18", "-18", 1.0),
        ("{-}18", "18", 0.0),
        (r"\boxed{{-}18}", "-18", 1.0),
        ("20{-}18", "18", 1.0),
        ("-18", "{-}18", 1.0),
        ("-$5", "-5", 1.0),
        ("-$5", "5", 0.0),
        ("between $3-$5", "5", 1.0),
        ("\u20135", "5", 0.0),
        ("1/2", "2", 0.0),
        ("(x + 1) / 2", "2", 0.0),
        ("1/2 = 0.5", "0.5", 1.0),
        ("at 60 km/h it takes 2", "2", 1.0),
        (r"\boxed{\frac{1}{2}}", "2", 0.0),
        (r"\frac12", "12", 0.0),
        (r"\sqrt{2}", "2", 0.0),
        ("10^2", "2", 0.0),
        ("10^{-2}", "-2", 0.0),
        ("1e5", "5", 0.0),
        ("2.5E-3", "3", 0.0),
        ("10^2 = 100", "100", 1.0),
        # Separators of thousands: no-break spaces, LaTeX, and the spelling of the MATH data set.
        ("1\u00a0000", "1000", 1.0),
        ("-12\u202f345.5", "-12345.5", 1.0),
        ("1\u2009234\u2009567", "1234567", 1.0),
        (r"\boxed{12\,345}", "12345", 1.0),
        (r"$2\ 000\ 000$", "2000000", 1.0),
        (r"1{,}234", "1234", 1.0),
        (r"10,\!000", "10000", 1.0),
        ("10000", "10\u00a0000", 1.0),
        ("80 90 100", "100", 1.0),
        ("3 4 5", "5", 1.0),
        ("12 3456", "3456", 1.0),
        ("in 2020 300", "300", 1.0),
        ("1,234 567", "567", 1.0),
        ("x2 100", "100", 1.0),
        ("1.5 300", "300", 1.0),
        ("1\n000", "0", 1.0),
        # Ratios and times have no number; a colon that ends a phrase changes nothing.
        ("2:30", "30", 0.0),
        ("day 2: 30", "30", 1.0),
        ("answer:30", "30", 1.0),
    ],
)
def test_last_number(completion, answer, expected):
    assert score(last_number, [completion], answer=[answer], question=["unused"]) == [expected]


def test_last_number_scores_each_sample():
    assert score(last_number, ["1", "2", "3"], answer=["1", "1", 3]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("answer", ["seven", "", "1/2", "2:30", 1e999])
def test_last_number_leaves_out_an_answer_without_a_number(answer):
    with pytest.warns(UserWarning, match=f"last_number leaves out samples: {answer!r} holds no number"):
        assert score(last_number, ["7", "7", "8"], answer=["7", answer, "7"]) == [1.0, None, 0.0]


@pytest.mark.parametrize("missing", [None, math.nan])
@pytest.mark.parametrize(
    ("function", "column"), [(last_number, "answer"), (exact_match, "answer"), (regex_match, "pattern")]
)
@pytest.mark.filterwarnings("error")
def test_rows_without_an_answer_are_left_out(function, column, missing):
    assert score(function, ["7", "7", "None", "nan"], **{column: ["7", *[missing] * 3]}) == [1.0, None, None, None]


# A model may repeat a text until it is cut off. Some texts would take minutes if a search restarted at each repetition.
@pytest.mark.parametrize(
    "text",
    ["1", "1,", "111,", "111\u00a0", "1\\,", "1:", "1.", ".1", "-", "-1", "a", "\u2212", "<answer>", "</answer>"],
)
def test_scoring_takes_linear_time(text):
    completion = text * (300_000 // len(text))
    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=1)[0]
    start = time.perf_counter()
    assert score(last_number, [completion], answer=["7"]) == [0.0]
    assert score(reasoning_gym_reward("chain_sum"), [completion], entry=[entry])[0] < 0.1
    assert time.perf_counter() - start < 10


def test_exact_match():
    assert score(exact_match, [" Paris\n", "paris", "Paris."], answer=["Paris"] * 3) == [1.0, 0.0, 0.0]
    for bad in (" ", ["Paris", "paris"], {"value": "Paris"}):
        with pytest.warns(UserWarning, match=f"leaves out samples: {re.escape(repr(bad))} is empty or no text"):
            assert score(exact_match, ["Paris", "0", ""], answer=[bad, 0, None]) == [None, 1.0, None]


# chain_sum compares numbers, countdown evaluates the expression with the entry's metadata.
@pytest.mark.parametrize("task", ["chain_sum", "countdown"])
# A data set read from JSON lines may hold its entries as text.
@pytest.mark.parametrize("convert", [lambda entry: entry, json.dumps], ids=["dict", "json"])
def test_reasoning_gym_reward(task, convert):
    entries = [reasoning_gym.create_dataset(task, seed=3, size=4)[i] for i in (0, 1, 2, 3, 0)]
    answers = [entry["answer"] for entry in entries]
    completions = [
        answers[0],
        f"<think>hm</think><answer> {answers[1]} </answer>",
        f"<answer>0</answer> no: <answer>\n{answers[2]}\n</answer> done",
        "<answer>no idea</answer>",
        f"<answer>or rather <answer>{answers[0]}</answer></answer>",
    ]
    rewards = score(reasoning_gym_reward(task), completions, entry=[convert(entry) for entry in entries], other=[0] * 5)
    assert rewards[:3] == [1.0, 1.0, 1.0]
    assert rewards[3] < 0.1
    assert rewards[4] == 1.0


# What models write where they do not know: other kinds of values, and values that overflow.
WRONG = ("", "42", "wrong", "[1, 2]", '[{"a": 1}]', '{"a": 1}', "x = 5", "1,2;3", "1 -> 2", "1e999", "9" * 5000, "é\n∞")
RAISES = {"boxnet", "coin_flip", "game_of_life", "prime_factorization"}  # on one of them
ALL_TASKS = sorted(set(DATASETS) - {"composite"})  # whose entries are of other tasks


def require_no_reward_for_wrong_answers(task):
    entry = reasoning_gym.create_dataset(task, seed=0, size=1)[0]
    rewards = score(reasoning_gym_reward(task), [*WRONG], entry=[entry] * len(WRONG))
    most = 1.0 if task == "game_of_life_halting" else 0.99  # which takes every text for True
    assert all(reward is not None and 0 <= reward <= most for reward in rewards)


@pytest.mark.parametrize("task", sorted(RAISES))
def test_reasoning_gym_gives_nothing_for_an_answer_that_a_task_cannot_read(task):
    require_no_reward_for_wrong_answers(task)


@pytest.mark.parametrize("task", ALL_TASKS)
@pytest.mark.thin(60)
def test_reasoning_gym_scores_wrong_answers_of_every_task(task):
    require_no_reward_for_wrong_answers(task)


def test_reasoning_gym_refuses_what_is_no_entry():
    entry = {"question": "12"}
    with pytest.raises(RewardError, match="raised KeyError"):
        compute_rewards(reasoning_gym_reward("prime_factorization"), ["p"], ["x"], [[1]], {"entry": [entry]})


def test_unknown_reasoning_gym_task_suggests_names():
    with pytest.raises(ValueError, match=r"no task 'chain_sums' \(did you mean chain_sum"):
        reasoning_gym_reward("chain_sums")


def test_missing_reasoning_gym_names_the_extra(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ImportError, match="pip install reasoning-gym"):
        reasoning_gym_reward("chain_sum")


def test_regex_match():
    rewards = regex_match([], ["<a>1</a>", "<a>1", "x\ny"], [], pattern=[r"<a>\d</a>$", r"<a>\d</a>$", r"x.y"])
    assert rewards == [1.0, 0.0, 0.0]
    with pytest.warns(UserWarning, match=r"regex_match leaves out samples: '\(' is empty or no regular expression"):
        assert regex_match([], ["x", "x", "7", "y"], [], pattern=["(", "x", 7, ""]) == [None, 1.0, None, None]


def test_response_length():
    assert response_length([], ["ab", ""], [[7, 8, 9], []]) == [3.0, 0.0]
