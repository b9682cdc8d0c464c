import math

import pytest

from rlft_fast.rewards import RewardError, WeightedRewards, overlong_penalty, weighted_sum
from rlft_fast.rewards.scoring import FAILED


def level(level, **columns):
    return level


def half(prompts, **columns):
    return [0.5, None]


def test_parts_and_their_weighted_sum():
    rewards = WeightedRewards({"level": level, "half": half}, {"level": 2.0, "half": -1.0})
    parts = rewards.score(["a", "b"], ["", ""], [[1], [1]], {"level": [3, 4]})
    assert parts == [{"level": 3.0, "half": 0.5}, {"level": 4.0, "half": None}]
    assert [weighted_sum(part, rewards.weights) for part in parts] == [5.5, 8.0]


def test_the_sum_is_over_the_parts_that_are_there():
    weights = {"a": 2.0, "b": 1e3}
    assert weighted_sum({"a": 1.5, "b": None}, weights) == 3.0
    assert weighted_sum({"a": None, "b": None}, weights) is None
    assert weighted_sum({}, {}) is None
    assert math.isnan(weighted_sum({"a": 1.5, "b": FAILED}, weights))


def test_a_failing_function_is_named():
    rewards = WeightedRewards({"half": half, "level": level}, {"half": 1.0, "level": 1.0})
    with pytest.raises(RewardError, match="reward function level raised TypeError"):
        rewards.score(["a", "b"], ["", ""], [[1], [1]], {})


# Of 100 tokens the last 20 are the buffer.
@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (85, 0.25), (100, 1.0), (120, 1.0)])
def test_overlong_penalty(num_tokens, expected):
    assert overlong_penalty(num_tokens, 100, 20) == expected
    assert overlong_penalty(num_tokens, 100, 0) == 0.0


def test_functions_get_copies():
    """A function that changes its arguments changes them for no one else: trainer, other functions, other samples."""

    def spoil(prompts, completions, completion_ids, answer, **_):
        for ids, notes in zip(completion_ids, answer, strict=True):
            ids.pop()
            notes["seen"].append(len(ids))
        lengths = [len(notes["seen"]) for notes in answer]
        for values in (prompts, completions, completion_ids, answer):
            values.clear()
        return lengths

    note = {"seen": []}
    arguments = ["p", "p"], ["c", "d"], [[1, 2], [3, 4]], {"answer": [note, note]}  # of one prompt with two samples
    rewards = WeightedRewards({"first": spoil, "second": spoil}, {"first": 1.0, "second": 1.0})
    assert rewards.score(*arguments) == [{"first": 1.0, "second": 1.0}] * 2
    assert arguments == (["p", "p"], ["c", "d"], [[1, 2], [3, 4]], {"answer": [{"seen": []}, {"seen": []}]})
