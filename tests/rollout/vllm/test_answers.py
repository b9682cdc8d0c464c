"""What servers may answer: everything else is refused, by a sentence that says what is wrong."""

import json
import math
import re
from typing import Any

import pytest

from rlft_fast.rollout.types import Span
from rlft_fast.rollout.vllm.answers import (
    CUT_OFF,
    AnswerError,
    Asked,
    Models,
    Outcome,
    Part,
    WeightInfo,
    WorkersChecksums,
    WorkersFacts,
    read_answer,
    read_part,
)
from rlft_fast.rollout.vllm.scheduling import Patience, ServerError
from tests.rollout.vllm.lying_server import FACTS, choice, token

SENT = {"run:0": 0, "run:1": 1, "run:2": 2}
ASKED = Asked(max_tokens=4, vocab_size=256, num_logprobs=0, versions=SENT, oldest=1)
LIKELY = Asked(max_tokens=4, vocab_size=256, num_logprobs=2, versions=SENT, oldest=1)


def event(part: Any) -> bytes:
    return json.dumps({"choices": [part]}).encode()


def of(tokens: list[dict[str, Any]], **changes: Any) -> bytes:
    """An answer that ends with these tokens."""
    return event(choice(tokens, "length" if len(tokens) == 4 else "stop", "run:1") | changes)


def named(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


FOUR = [token(7, -1.5), token(255, 0.0), token(0, CUT_OFF), token(7, -0.5)]
ROW = [{"token_id": 9, "logprob": math.log(0.5)}, {"token_id": 8, "logprob": math.log(0.25)}]


def test_an_honest_answer_is_read():
    first, last = choice(FOUR[:1]), choice(FOUR[1:], "length", "run:1")
    last["weight_versions"] = [{"version": f"run:{i}", "start": a, "end": b} for i, a, b in ((1, 0, 3), (2, 3, 4))]
    assert read_part(event(first), ASKED, 0) == Part([[(7, -1.5)]], None)
    assert read_part(event(last), ASKED, 1) == Part(
        [[(255, 0.0)], [(0, CUT_OFF)], [(7, -0.5)]], "length", (Span(3, 1), Span(1, 2))
    )
    assert read_part(b'{"choices": [], "usage": {"total_tokens": 3}}', ASKED, 2) == Part([], None)
    assert read_part(of([token(7)]), ASKED, 0) == Part([[(7, -1.0)]], "stop", (Span(1, 1),))


def test_the_likeliest_tokens_are_read():
    """The sampled token is among those that are told, or beside them; of a logit that is nan nothing more is told."""
    sampled = token(9, math.log(0.5), ROW)
    beside = token(5, math.log(0.25), ROW)
    found = read_part(of([sampled, beside, token(3, CUT_OFF)]), LIKELY, 0).likely
    pairs = [(9, math.log(0.5)), (8, math.log(0.25))]
    assert found == [pairs, [(5, math.log(0.25)), *pairs], [(3, CUT_OFF)]]


WRONG = {
    "nothing": (b"", "Invalid JSON"),
    "HTML": (b"<html>", "Invalid JSON"),
    "null": (b"null", "should be an object, got None"),
    "a list": (b"[1]", r"should be an object, got \[1\]"),
    "a text": (b'"hello"', "should be an object"),
    "deep": (b"[" * 10**5, "recursion limit"),
    "5,000 digits": (b'{"choices": ' + b"9" * 5000 + b"}", "out of range"),
    "UTF-16": (of(FOUR).decode().encode("utf-16"), "Invalid JSON"),
    "no choices": (b"{}", "an event has no choices"),
    "null for choices": (b'{"choices": null}', "an event has no choices"),
    "null for a choice": (event(None), "choices.0: .* object, got None"),
    "two choices": (json.dumps({"choices": [choice(FOUR)] * 2}).encode(), "at most 1 item"),
    "another sample": (of(FOUR, index=1), "choices.0.index: Input should be 0, got 1"),
    **{
        f"token {x!r:.9}": (of([token(x)] * 4), r"token_ids.0: .*integer, got")
        for x in ("a", 7.5, True, None, [7], {}, "7")
    },
    "token -1": (of([token(-1)] * 4), "greater than or equal to 0, got -1"),
    "token 256": (of([token(7), token(256)]), "token 256, and the vocabulary has 256"),
    "a likely token 256": (of([token(7, -1.0, [{"token_id": 256, "logprob": -1.0}])]), "token 256, and the vocab"),
    "token 2^31": (of([token(2**31)] * 4), "less than 2147483648"),
    "token 10^30": (of([token(10**30)] * 4), "less than 2147483648"),
    **{f"logprob {x}": (of([token(7, x)] * 4), "finite number, got") for x in (math.nan, math.inf, -math.inf)},
    **{f"logprob {x!r}": (of([token(7, x)] * 4), "valid number, got") for x in ("-1", None, True, [-1.0])},
    "logprob -1e999": (of(FOUR).replace(b"-0.5", b"-1e999"), "finite number, got -inf"),
    "logprob 3": (of([token(7, 3.0)] * 4), "token 7 has log-probability 3: probabilities of"),
    "logprob 1e308": (of([token(7, 1e308)] * 4), "token 7 has log-probability 1e.308"),
    "logprob 0.01": (of([token(7, 0.01)] * 4), "probabilities of 1.01005 together"),
    "too few logprobs": (of(FOUR[:3], token_ids=[7, 255, 0, 7]), "3 log-probabilities of 4 tokens"),
    "too many logprobs": (of(FOUR, token_ids=[7]), "4 log-probabilities of 1 tokens"),
    "no logprobs": (of(FOUR, logprobs=None), "0 log-probabilities of 4 tokens"),
    "a logprob of another token": (of(FOUR, token_ids=[8, 255, 0, 7]), "of token 7 came with token 8"),
    "too many tokens": (of([*FOUR, token(7)]), "5 tokens, and at most 4 were asked for"),
    "no end": (of(FOUR, finish_reason=None), "no end with the last of 4 tokens"),
    "an end without tokens": (of([]), "ended after 0 of 4 tokens by stop"),
    "too short": (of(FOUR[:3], finish_reason="length"), "ended after 3 of 4 tokens by length"),
    "reason 5": (of(FOUR, finish_reason=5), "finish_reason: .*string, got 5"),
    "no versions": (of(FOUR, weight_versions=None), "names the weights of 0 of 4 tokens"),
    "empty versions": (of(FOUR, weight_versions=[]), "names the weights of 0 of 4 tokens"),
    "a text for versions": (of(FOUR, weight_versions="run:1"), "weight_versions: .* array, got 'run:1'"),
    **{
        f"versions of [{a}, {b})": (of(FOUR, weight_versions=[{"version": "run:1", "start": a, "end": b}]), message)
        for a, b, message in ((0, 2, "of 2 of 4"), (1, 4, "of 0 of 4"), (0, 9, "of 9 of 4"))
    },
    **{
        f"weights {names}": (of(FOUR, weight_versions=[named(*span) for span in spans]), message)
        for names, spans, message in (
            ("of another run", [("x:1", 0, 4)], "has other weights than"),
            ("of later", [("run:3", 0, 4)], "has other weights than"),
            ("of before", [("run:0", 0, 4)], "has other weights than"),
            ("back in time", [("run:2", 0, 3), ("run:1", 3, 4)], "has other weights than"),
            ("with a gap", [("run:1", 0, 2), ("run:2", 3, 4)], "of 2 of 4"),
            ("that overlap", [("run:1", 0, 5), ("run:2", 5, 4)], "of 5 of 4"),
        )
    },
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer(content, message):
    with pytest.raises(AnswerError, match=message) as caught:
        read_part(content, ASKED, 0)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([], "0 likeliest tokens, and 2 were asked for"),
        (ROW[:1], "1 likeliest tokens, and 2"),
        ([*ROW, *ROW], "4 likeliest tokens, and 2"),
        ([ROW[0], ROW[0]], "stands twice"),
        ([{"token_id": i, "logprob": -0.1} for i in (9, 8)], "probabilities of 2.17"),
        ([{"token_id": 9, "logprob": math.nan}] * 2, "finite number, got nan"),
        (5, "array, got 5"),
    ],
)
def test_wrong_likeliest_tokens(told, message):
    with pytest.raises(AnswerError, match=message):
        read_part(of([token(5, -1.0) | {"top_logprobs": told}]), LIKELY, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"error": {"message": "CUDA"}}', "CUDA"), (of(FOUR, finish_reason="abort"), "gave up a sample: abort")],
)
def test_a_failure_is_no_wrong_answer(content, message):
    with pytest.raises(ServerError, match=message) as caught:
        read_part(content, ASKED, 0)
    assert not isinstance(caught.value, AnswerError)  # whose tokens would be dropped


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (Models, {"data": []}, "data: .*at least 1"),
        (Models, {"data": [{"id": 5}]}, "data.0.id: .*string, got 5"),
        (Models, None, "an object, got None"),
        (WeightInfo, {}, "weight_version: Field required"),
        (WeightInfo, {"weight_version": 3}, "string"),
        (WorkersFacts, {"results": []}, "at least 1"),
        (WorkersFacts, {"results": [FACTS] * 2000}, "at most 1024"),
        *(
            (WorkersFacts, {"results": [FACTS | {name: value}]}, rf"results.0.{name}: .*, got")
            for name, value in {"max_model_len": "64", "model": 5, "max_logprobs": True, "dtype": None}.items()
        ),
        (WorkersFacts, {"results": [{}]}, "results.0.identity: Field required"),
        (WorkersChecksums, {"results": [{"weight": 5}]}, "results.0.weight: .*string"),
        (Outcome, [], "an object"),
        (Outcome, {"success": "yes"}, "success: .*boolean"),
    ],
)
def test_wrong_answers_of_other_routes(kind, content, message):
    with pytest.raises(AnswerError, match=message):
        read_answer(kind, json.dumps(content).encode())


def test_a_busy_server_is_waited_for():
    assert [Patience().pause_s(status, "3") for status in (200, 400, 500, 429, 503)] == [None, None, None, 3, 3]
    assert [Patience().pause_s(429, header) for header in (None, "soon", "-3", "0", "²")] == [0.5, 0.5, 0.5, 0.1, 0.5]
    patience = Patience()
    assert [patience.pause_s(503, None) for _ in range(10)] == [0.5, 1.0, 2.0, 4.0] + [8.0] * 6
    with pytest.raises(ServerError, match=r"it is busy \(status 503\) after 55.5 s, and wants 8 s more"):
        patience.pause_s(503, None)
    with pytest.raises(ServerError, match=re.escape("wants 1e+09 s more")):
        Patience().pause_s(429, "9" * 5000)
