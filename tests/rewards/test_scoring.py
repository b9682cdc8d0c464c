import asyncio
import functools
import math
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from rlft_fast.rewards import (
    IsolatedReward,
    RewardError,
    check_columns,
    compute_rewards,
    last_number,
    warn_of_missing_values,
)

PROMPTS, COMPLETIONS, COMPLETION_IDS = ["1 + 1 =", "2 + 2 ="], ["2", "5"], [[17], [20]]


def returning(result):
    def made_reward(prompts, completions, completion_ids, **columns):
        return result

    return made_reward


def compute(function, **columns) -> list[float | None]:
    return compute_rewards(function, PROMPTS, COMPLETIONS, COMPLETION_IDS, columns)


def test_function_receives_the_batch_and_the_columns():
    def reward(prompts, completions, completion_ids, level, **columns):
        assert (prompts, completions, completion_ids) == (PROMPTS, COMPLETIONS, COMPLETION_IDS)
        assert columns == {"answer": ["2", "4"]}
        return level

    assert compute(reward, level=[0.25, 0.5], answer=["2", "4"]) == [0.25, 0.5]
    assert compute(last_number, answer=["2", "4"]) == [1.0, 0.0]


# Types that user code plausibly returns for "one number per sample".
@pytest.mark.parametrize(
    "result",
    [
        [1, None],
        (True, None),
        (x for x in [1.0, None]),
        [Fraction(1), None],
        [Decimal("1"), None],
        [np.float32(1), None],
        [np.bool_(True), None],
        [np.array(1), None],
        [torch.tensor(1.0), None],
        [torch.tensor([True]), None],
        [1, pd.NA],
        pd.Series([1, None], dtype="Int64"),
    ],
    ids=[
        "int",
        "tuple of bool",
        "generator",
        "fraction",
        "decimal",
        "numpy scalar",
        "numpy bool",
        "0-d array",
        "0-d tensor",
        "1-element tensor",
        "pandas NA",
        "pandas column",
    ],
)
def test_numbers_become_floats_and_none_stays(result):
    rewards = compute(returning(result))
    assert rewards == [1.0, None]
    assert type(rewards[0]) is float


@pytest.mark.parametrize("result", [np.array([1.0, 0.0]), torch.tensor([1.0, 0.0])], ids=["array", "tensor"])
def test_arrays_are_accepted(result):
    assert compute(returning(result)) == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        [1.0],
        1j,
        10**400,
        1e31,
        Decimal("sNaN"),
        np.ones(2),
        torch.ones(2),
        pd.NaT,
    ],
)
def test_a_bad_reward_names_function_and_sample(value):
    message = r"made_reward returned .* for sample 1 \(prompt '2 \+ 2 =', completion '5'\)"
    with pytest.raises(RewardError, match=message):
        compute(returning([1.0, value]))


def test_long_texts_are_shortened_in_the_message():
    with pytest.raises(RewardError) as error:
        compute_rewards(returning([math.nan]), ["begin" + "x" * 5000 + "end"], ["y" * 5000], [[1]], {})
    assert len(str(error.value)) < 500
    assert "begin" in str(error.value)
    assert "xend" in str(error.value)


def test_an_exception_is_chained():
    with pytest.raises(RewardError, match=r"last_number raised TypeError on a batch of 2 samples: .*'answer'") as error:
        compute(last_number)
    assert isinstance(error.value.__cause__, TypeError)


def test_a_function_written_for_the_other_form_of_completions_is_told():
    def of_messages(completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    def of_texts(completions, **columns):
        return [float(len(re.sub(" ", "", completion))) for completion in completions]

    messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    assert compute_rewards(of_messages, PROMPTS, messages, COMPLETION_IDS, {}) == compute(of_texts) == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"\(completions are texts; reward.conversational: true gives messages\)$"):
        compute(of_messages)
    with pytest.raises(RewardError, match=r"completions are lists of messages; reward.conversational: false gives te"):
        compute_rewards(of_texts, PROMPTS, messages, COMPLETION_IDS, {})
    with pytest.raises(RewardError, match=r"'answer'$"):
        compute(last_number)


# One number for the batch, nothing, a text, and numbers without an order.
@pytest.mark.parametrize("result", [1.0, None, "11", b"11", {1.0: 0, 2.0: 0}, {1.0, 2.0}, torch.tensor(1.0)])
def test_other_types_are_refused(result):
    with pytest.raises(RewardError, match=r"made_reward returned \w+, expected a list"):
        compute(returning(result))


def test_an_async_function_is_awaited():
    async def one(completion):
        await asyncio.sleep(0.01)
        return float(completion)

    async def reward(completions, **columns):
        return await asyncio.gather(*map(one, completions))

    async def fails(**columns):
        raise KeyError("judge")

    assert compute(reward) == [2.0, 5.0]
    with pytest.raises(RewardError, match="fails raised KeyError on a batch of 2 samples: 'judge'"):
        compute(fails)


def test_async_functions_share_a_loop_wherever_they_are_called():
    """A client belongs to the loop that it was made in; a notebook has a loop of its own, which runs."""
    loops = set()

    async def reward(completions, **columns):
        loops.add(asyncio.get_running_loop())
        return [float(text) for text in completions]

    async def leaves(completions, **columns):
        await asyncio.gather(asyncio.to_thread(sys.exit, "no key"))

    async def in_a_notebook():
        return compute(reward)

    with ThreadPoolExecutor(1) as pool:
        assert compute(reward) == asyncio.run(in_a_notebook()) == pool.submit(compute, reward).result() == [2.0, 5.0]
    with pytest.raises(RewardError, match="leaves raised SystemExit on a batch of 2 samples: no key"):
        compute(leaves)
    assert compute(reward) == [2.0, 5.0]
    assert len(loops) == 1


class MuteError(Exception):
    def __str__(self):
        raise OSError

    __repr__ = __str__


class Wrong:
    """A number, and a series, that raise."""

    def __float__(self):
        raise asyncio.CancelledError

    __iter__ = item = __float__


ENDS = {
    "CancelledError": asyncio.CancelledError(), "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(), "SystemExit: 3": SystemExit(3), "BaseException: b": BaseException("b"),
    "MuteError: (MuteError cannot be shown": MuteError(), "KeyError: (KeyError cannot be shown": KeyError(MuteError()),
    "ValueError: xxx": ValueError("x" * 10**7), "ValueError: (ValueError cannot be shown": ValueError(10**5000),
}  # fmt: skip


@pytest.mark.parametrize("said", ENDS)
def test_however_a_function_ends_the_step_is_left_with_a_sentence(said):
    def ends(**columns):
        raise ENDS[said]

    async def ends_later(**columns):
        raise ENDS[said]

    kind, _, message = said.partition(": ")
    for function in (ends, ends_later):
        with pytest.raises(RewardError) as error:
            compute(function)
        assert f"{function.__name__} raised {kind} on a batch of 2 samples: {message}" in str(error.value)
        assert len(str(error.value)) < 1300
    assert compute(returning([1.0, None])) == [1.0, None]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([1.0, 10**5000], "returned (int cannot be shown: repr() raises ValueError) for sample 1"),
        ([1.0, MuteError()], "returned (MuteError cannot be shown: repr() raises OSError) for sample 1"),
        ([1.0, "x" * 10**7], "returned 'xxx"),
        (Wrong(), "raised CancelledError"),
        ([Wrong(), 1.0], "raised CancelledError"),
    ],
)
def test_a_result_that_cannot_be_shown_or_read(result, said):
    with pytest.raises(RewardError) as error:
        compute(returning(result))
    assert said in str(error.value)
    assert len(str(error.value)) < 600


def test_a_signal_ends_more_than_the_function():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compute(lambda **columns: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, handler)


def test_what_a_function_changes_of_the_process_is_put_back():
    async def doubles(completions, **columns):
        torch.set_default_dtype(torch.float64)
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="reward function .*doubles changes the process of the run: default dtype"):
        assert compute(doubles) == [1.0, 1.0]
    assert torch.tensor(1.0).dtype == torch.float32


def test_a_generator_that_raises_is_named():
    with pytest.raises(RewardError, match="made_reward raised ZeroDivisionError"):
        compute(returning(1 / n for n in (1, 0)))


@pytest.mark.parametrize("result", [[], [1.0], [1.0] * 3])
def test_a_wrong_number_of_rewards_is_refused(result):
    with pytest.raises(RewardError, match=f"returned {len(result)} rewards for 2 samples"):
        compute(returning(result))


def test_bad_arguments_are_refused_before_the_call():
    def never(**columns):
        raise AssertionError

    with pytest.raises(ValueError, match="answer has 1 entries, expected one for each of the 2 prompts"):
        compute(never, answer=["2"])
    with pytest.raises(ValueError, match="completions has 1 entries"):
        compute_rewards(never, PROMPTS, ["2"], COMPLETION_IDS, {})
    with pytest.raises(ValueError, match="column named 'prompts'"):
        compute_rewards(never, PROMPTS, COMPLETIONS, COMPLETION_IDS, {"prompts": PROMPTS})


def test_an_empty_batch():
    assert compute_rewards(returning([]), [], [], [], {}) == []


def picky(prompts, completions, completion_ids, level):
    return [0.0] * len(prompts)


def test_data_that_a_function_cannot_be_called_with():
    check_columns(last_number, ["answer", "level"], "the data")
    check_columns(picky, ["level"], "the data")
    filled_in = functools.wraps(picky)(lambda **columns: picky(**columns, level=1))
    check_columns(filled_in, [], "the data")
    check_columns(returning([]), [], "the data")
    with pytest.raises(
        ValueError, match=r"last_number cannot .* columns of the data, \['level'\]: missing .* 'answer'"
    ):
        check_columns(last_number, ["level"], "the data")
    with pytest.raises(ValueError, match=r"picky cannot .* unexpected keyword argument 'answer'"):
        check_columns(picky, ["answer", "level"], "the data")
    with pytest.raises(ValueError, match="column named 'prompts'"):
        check_columns(picky, ["level", "prompts"], "the data")
    with pytest.raises(ValueError, match="last_number cannot"):  # in a worker process, too
        check_columns(IsolatedReward("rlft_fast.rewards:last_number", timeout_s=1.0), [], "the data")


def test_rows_without_a_value_that_a_function_needs_are_named():
    answers = ["1", None, math.nan, "", 0, *[None] * 5]
    with pytest.warns(UserWarning, match="7 rows") as warned:
        warn_of_missing_values(needs_answer, {"answer": answers, "level": [None] * 10, "hint": [None] * 10}, "the data")
    (warning,) = warned
    assert str(warning.message).startswith(
        "7 rows of the data (1, 2, 5, 6, 7 and more, counted from 0) have no 'answer', which reward function "
        "needs_answer reads. It must return None for these rows"
    )


def needs_answer(prompts, completions, completion_ids, answer, hint="", **columns):
    return [0.0] * len(prompts)


@pytest.mark.filterwarnings("error")
def test_complete_columns_are_not_warned_of():
    warn_of_missing_values(needs_answer, {"answer": ["", 0]}, "the data")
    warn_of_missing_values(returning([]), {"answer": [None]}, "the data")
