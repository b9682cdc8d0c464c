"""A language model as a judge: what it is asked, how its score is read, and that equal questions are asked once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlft_fast.config.schema.run import JudgeConfig
from rlft_fast.rewards import LanguageModelJudge, ServerReward, compute_rewards

NUMBER = JudgeConfig.model_fields["score"].default


class _Handler(BaseHTTPRequestHandler):
    """Says the question again."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        question = asked["messages"][0]["content"]
        reason = "length" if self.server.cuts else "stop"
        content = b"{}" if "broken" in question else json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": question}, "finish_reason": reason}]}
        ).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.cuts = [], False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def reward_of(server, prompt: str, score: str = NUMBER) -> ServerReward:
    url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    return ServerReward(url, 20.0, 0, LanguageModelJudge("m", prompt, score, 64))


def test_equal_questions_are_asked_once(server):
    function = reward_of(server, "{{ prompt }}? 10 points: {{ completion }} of {{ answer }} is -2.5")
    columns = {"answer": ["a", "a", "b"]}
    for _ in range(2):
        assert compute_rewards(function, ["p"] * 3, ["c"] * 3, [[1]] * 3, columns) == [-2.5] * 3
    questions = sorted(asked["messages"][0]["content"] for asked in server.asked)
    assert questions == [f"p? 10 points: c of {answer} is -2.5" for answer in "ab"]
    wanted = {"model": "m", "temperature": 0, "max_tokens": 64}
    assert all({name: asked[name] for name in wanted} == wanted for asked in server.asked)


def test_the_last_match_of_the_pattern_is_the_score(server):
    function = reward_of(server, "{{ completion }}", r"Score: (\S+)")
    answers = ["Score: 1 Score: 3", "Score: 1e1 9", "7", "Score: x", "Score: nan", "broken", f"Score: 1{'0' * 31}"]
    with pytest.warns(UserWarning, match=r"5 of 7 samples have no reward from http"):
        rewards = compute_rewards(function, ["p"] * 7, answers, [[1]] * 7, {})
    assert rewards[:2] == [3.0, 10.0]
    assert all(reward != reward for reward in rewards[2:])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("I give it 8/10.", 8), ("Score: **8**/10", 8), ("8.5 out of 10 points", 8.5), ("2 / 3, and style 1 / 2", 1),
        ("Of 10 points it has 7", 7), ("-1", -1),
    ],
)  # fmt: skip
def test_points_of_points_are_the_score_by_default(text, score, server):
    assert compute_rewards(reward_of(server, text), ["p"], ["c"], [[1]], {}) == [score]


def test_an_answer_that_is_cut_off_has_no_score(server):
    """Its last number is one of the reasons, unless there is nothing else."""
    server.cuts = True
    function = reward_of(server, "{{ completion }}")
    with pytest.warns(UserWarning, match=r"1 of 2 .* cut off at reward\.server\.judge\.max_tokens=64, before"):
        rewards = compute_rewards(function, ["p"] * 2, ["It has 3 mistakes, and", " 7\n"], [[1]] * 2, {})
    assert (rewards[0] != rewards[0], rewards[1]) == (True, 7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing", "its answer names no score: 'nothing'"),
        ("broken", "is no chat completion"),
        ("-1" + "0" * 31, r"its score is -1e\+31, expected a number of at most 1e\+30 in size"),
    ],
)
def test_why_there_is_no_score(text, reason, server):
    with pytest.warns(UserWarning, match=reason):
        compute_rewards(reward_of(server, text), ["p"], ["c"], [[1]], {})


def test_what_cannot_be_used(server):
    for prompt, score, reason in [
        ("{{ a", NUMBER, "judge.prompt is no Jinja template"),
        ("", "(", "judge.score is no pattern"),
        ("", "a", "judge.score has 0 groups, expected one"),
    ]:
        with pytest.raises(ValueError, match=reason):
            LanguageModelJudge("m", prompt, score, 1)
    with pytest.raises(ValueError, match=r"judge\.prompt cannot be applied: 'answer' is undefined"):
        reward_of(server, "{{ answer }}").check("p", "c", {})
    with pytest.raises(ValueError, match=r"judge\.prompt cannot be applied: .*unsafe"):
        reward_of(server, "{{ prompt.__class__.__mro__ }}").check("p", "c", {})
