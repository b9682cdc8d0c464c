"""An environment answers within its deadline, and can cost its episode alone."""

import asyncio
import os
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import get_json_schema

from rlft_fast.envs import EnvironmentClass, EnvironmentPool, Failed
from rlft_fast.envs.doors import find_doors, find_tools
from rlft_fast.envs.server import _cut
from rlft_fast.plugins import load_function
from tests.envs.players import painted
from tests.support.machine.processes import assert_ends

HERE = Path(__file__).with_name("players.py")


@pytest.fixture
def pool():
    pools = []

    def make(
        name: str | list[str], timeout_s: float = 10.0, columns: tuple[str, ...] = ("prompt", "answer"), **options
    ):
        spec = name if ":" in name or isinstance(name, list) else f"{HERE}:{name}"
        pools.append(EnvironmentPool({"": EnvironmentClass(spec, options, columns, timeout_s, 100)}))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def says(content: str) -> dict:
    return {"role": "assistant", "content": content}


def test_a_game(pool):
    games = pool("GuessNumber", most=2)
    first, second = games.open(["", ""])
    assert games.reset({first: {"answer": 7}, second: {"answer": 3}})[second] == {"messages": [{"content": " Guess."}]}
    answers = games.step({first: says("It is 5"), second: says("3!")})
    assert answers[first] == {"messages": [{"role": "user", "content": "too low"}], "reward": 0.0, "done": False}
    assert (answers[second]["reward"], answers[second]["done"]) == (1.0, True)
    assert games.step({first: says("8")})[first]["done"]
    assert games.end([first, second]) == {first: {"reward": None}, second: {"reward": None}}


def test_tools_as_trl_writes_them(pool):
    shop = pool("Shop")
    assert [tool["function"]["name"] for tool in shop.tools[""]] == ["add", "pay"]
    assert shop.tools[""][0]["function"]["parameters"]["required"] == ["item"]
    (number,) = shop.open([""])
    shop.reset({number: {}})
    calls = [("add", {"item": "egg", "count": 2}), ("pay", {}), ("add", {"thing": "egg"}), ("close", {})]
    message = says("") | {"tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls]}
    answer = shop.step({number: message})[number]
    added, paid, wrong, unknown = [result["content"] for result in answer["messages"]]
    assert (added, paid, answer["done"]) == ("egg, egg", '{"price": 2}', False)
    assert "unexpected keyword argument 'thing'" in wrong
    assert "there is no tool 'close', only add, pay" in unknown
    assert shop.step({number: says("done")})[number]["done"]
    assert shop.end([number]) == {number: {"reward": 2.0}}


@pytest.mark.parametrize(
    "imports", [("import numpy as np, numpy.random", ""), ("import numpy as np", ""), ("", "import numpy as np")]
)
def test_the_seed_of_an_episode_decides_what_it_draws(imports, pool, tmp_path):
    """Episodes are forked from one process, whose random states never change. NumPy makes its own at the first draw."""
    (tmp_path / "dice.py").write_text(
        "import random\n{}\nclass Dice:\n    def step(self, message): ...\n    def reset(self, **row):\n"
        "        {}\n        return f'{{random.getrandbits(30)}} {{np.random.randint(1 << 30)}}'\n".format(*imports)
    )
    dice = pool(f"{tmp_path}/dice.py:Dice")

    def thrown(*seeds: int) -> list[list[str]]:
        numbers = dice.open([""] * len(seeds))
        begun = dice.reset({number: {} for number in numbers}, dict(zip(numbers, seeds, strict=True)))
        return [begun[number]["messages"][0]["content"].split() for number in numbers]

    first = thrown(5, 2**63 - 1, 2**62)
    assert [len({*column}) for column in zip(*first, strict=True)] == [3, 3]
    assert thrown(2**62, 5) == [first[2], first[0]]
    assert first[0] == [str(random.Random(5).getrandbits(30)), str(np.random.RandomState(5).randint(1 << 30))]


class Calculator:
    """Its tool needs no episode."""

    def reset(self, **row) -> list:
        return self.show("b")

    @staticmethod
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: any
        """
        return 2 * number

    def show(self, name: str) -> list:
        """Shows something.

        Args:
            name: of it
        """
        words = [{"type": "text", "text": text} for text in ("a ", name)]
        if name == "loose":
            return [5, {"type": "text"}, {"type": "image", "image": painted(1)}]
        return [*words, {"type": "image", "image": painted(1)}] if name == "picture" else words


@pytest.mark.parametrize(
    ("name", "argument", "content"),
    [
        ("double", {"number": 4}, "8"),
        ("show", {"name": "b"}, "a b"),
        ("show", {"name": "picture"}, ["a ", "picture"]),
        ("show", {"name": "loose"}, ["5", '{"type": "text"}']),
    ],
)
def test_tools_are_called_and_answer_as_in_trl(name, argument, content):
    """A static method has no self. A list of texts and images is a content."""
    doors = find_doors("x:Calculator", Calculator, {}, ["prompt"])
    assert [tool["function"]["parameters"]["required"] for tool in doors.tools] == [["number"], ["name"]]
    door, call = doors.open(), {"function": {"name": name, "arguments": argument}}
    assert _cut(door.reset({}), 100) == [{"content": "a b"}]
    messages, *_ = door.step({"tool_calls": [call]})
    (result,) = _cut(messages, 100)
    if isinstance(content, list):  # the trainer refuses an image in the result of a tool, by name
        *texts, image = result["content"]
        assert [part["text"] for part in texts] == content
        assert image.keys() == {"type", "image"}
    else:
        assert result["content"] == content


class Loops:
    """Its ``reset`` is async, and needs the loop that its instance was made in; ``step`` runs a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tools = [{"type": "function", "function": {"name": "look"}}]

    async def reset(self, **row) -> str:
        await asyncio.sleep(0)
        return str(asyncio.get_running_loop() is self.loop)

    def step(self, message):
        return asyncio.run(self._echo(message["content"])), None, True

    async def _echo(self, words: str) -> str:
        return words

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop


def test_a_method_that_is_not_async_may_run_an_event_loop():
    doors = find_doors("x:Loops", Loops, {}, ["prompt"])  # which makes one to ask for its tools
    assert [tool["function"]["name"] for tool in doors.tools] == ["look"]
    door = doors.open()
    assert door.reset({}) == [{"content": "True"}]
    assert door.step(says("hello")) == ([{"content": "hello"}], None, True)
    assert door.end() is None


def test_a_column_and_an_argument_may_have_any_name(pool):
    functions = pool("Functions", columns=("prompt", "function"))
    (number,) = functions.open([""])
    assert functions.reset({number: {"function": "f"}})[number] == {"messages": [{"content": "Write f."}]}
    call = {"function": {"name": "run", "arguments": {"function": "g"}}}
    assert functions.step({number: says("") | {"tool_calls": [call]}})[number]["messages"][0]["content"] == "ran g"


def test_tools_do_not_import_torch(pool):
    """It takes 2 s and 180 MB of each worker. Hints of tensors are still what transformers makes of them."""
    modules = pool("Modules")
    (number,) = modules.open([""])
    modules.reset({number: {}})
    calls = [{"function": {"name": "imported", "arguments": {"name": name}}} for name in ("json", "torch")]
    answer = modules.step({number: says("") | {"tool_calls": calls}})[number]
    assert [result["content"] for result in answer["messages"]] == ["True", "False"]

    def hear(sound: torch.Tensor) -> str:
        """Hears.

        Args:
            sound: what is heard
        """

    (tool,) = find_tools({"hear": hear}).tools
    assert tool["function"] == get_json_schema(hear)["function"]
    assert tool["function"]["parameters"]["properties"]["sound"]["type"] == "audio"


HARMS = {
    "hang": ("no answer within 3 s", "timeout"), "die": ("its process ended", "died"),
    "raise": ("KeyError: 'no such door'", "raised"), "exit": ("SystemExit: enough", "raised"),
    "nan": ("nan", "no_answer"), "huge": ("its reward is -1e+31", "no_answer"),
    "wrong": ("expected (messages, reward, done)", "raised"),
    "says it is the assistant": ("no role", "no_answer"),
}  # fmt: skip


def test_an_environment_costs_its_episode_alone(pool):
    strange = pool("Strange", timeout_s=3.0)
    numbers = strange.open([""] * (len(HARMS) + 3))
    strange.reset({number: {} for number in numbers})
    words = [*HARMS, "print", "long", "hello"]
    started = time.monotonic()
    answers = strange.step({n: says(word) for n, word in zip(numbers, words, strict=True)})
    assert time.monotonic() - started < 8
    for number, (words, kind) in zip(numbers, HARMS.values(), strict=False):
        assert isinstance(answers[number], Failed), words
        assert words in answers[number]
        assert answers[number].kind == kind
    assert strange.seconds[numbers[0]][1] == 3.0  # the call that hung; the first one was reset
    printed, long, hello = (answers[number] for number in numbers[-3:])
    assert (printed["messages"][0]["content"], hello["reward"]) == ("heard print", 0.5)
    assert long["messages"][0]["content"] == "z" * 100 + "… (9999900 characters left out)"
    again = strange.step({number: says("hello") for number in numbers[-3:]})  # the others have ended
    assert [answer["reward"] for answer in again.values()] == [0.5] * 3


def test_parts_of_a_content_that_are_texts_are_joined(pool):
    """As those of a row. Any other list becomes JSON."""
    strange = pool("Strange")
    numbers = strange.open([""] * 2)
    strange.reset({number: {} for number in numbers})
    answers = strange.step(dict(zip(numbers, map(says, ("parts", "data")), strict=True)))
    contents = [answers[number]["messages"][0]["content"] for number in numbers]
    assert contents == ["a b", '[{"text": "a "}, {"text": "b"}]']


def test_many_wait_at_once(pool):
    strange = pool("Strange")
    numbers = strange.open([""] * 24)
    strange.reset({number: {} for number in numbers})
    started = time.monotonic()
    assert all(answer["reward"] == 0.5 for answer in strange.step(dict.fromkeys(numbers, says("wait"))).values())
    assert time.monotonic() - started < 6  # one after the other would take 12 seconds


def test_more_episodes_than_files_that_may_be_open(pool):
    """Systems have a soft limit, often of 1,024, and a hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 20
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        strange = pool("Strange")
        numbers = strange.open([""] * 40)
        answers = strange.reset({number: {} for number in numbers})
        assert answers == {number: {"messages": []} for number in numbers}
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(OSError, match="no more episodes can begin beside 40, because each has an open file"):
            strange.open([""])
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert strange.step({numbers[0]: says("hello")})[numbers[0]]["reward"] == 0.5  # no worker was killed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_threads_open_and_end_at_once(pool, monkeypatch):
    monkeypatch.setattr("rlft_fast.envs.pool.MOST_FORKS", 3)
    strange = pool("Strange")

    def play(_thread: int) -> list[int]:
        pids = []
        for _ in range(2):
            numbers = strange.open([""] * 4)
            pids += [strange._episodes[number].pid for number in numbers]
            strange.reset({number: {} for number in numbers})
            answers = strange.step({number: says(f"number {number}") for number in numbers})
            heard = {number: answer["messages"][0]["content"] for number, answer in answers.items()}
            assert heard == {number: f"heard number {number}" for number in numbers}
            assert strange.end(numbers) == {number: {"reward": None} for number in numbers}
        return pids

    with ThreadPoolExecutor(5) as threads:
        pids = [pid for own in threads.map(play, range(5)) for pid in own]
    assert len({*pids}) == 5 * 2 * 4
    assert_ends(pids)


def test_each_class_has_its_own_limit():
    slow, quick = (EnvironmentClass(f"{HERE}:Strange", {}, ("prompt",), limit, 100) for limit in (20.0, 0.2))
    mixed = EnvironmentPool({"slow": slow, "quick": quick})
    numbers = mixed.open(["quick", "slow", "quick"])
    mixed.reset({number: {} for number in numbers})
    words = ["wait0.5", "wait0.5", "hello"]
    late, *answers = mixed.step({n: says(word) for n, word in zip(numbers, words, strict=True)}).values()
    mixed.close()
    assert late == "no answer within 0.2 s"
    assert [answer["messages"][0]["content"] for answer in answers] == ["heard wait0.5", "heard hello"]
    assert [mixed.seconds[n][1] >= least for n, least in zip(numbers, (0.2, 0.5, 0), strict=True)] == [True] * 3


def test_answers_are_taken_as_they_come(pool):
    """Also later than the limit, if they were there in time."""
    strange = pool("Strange")
    numbers = strange.open([""] * 3)
    strange.reset({number: {} for number in numbers})
    strange.classes[""] = strange.classes[""]._replace(timeout_s=1.0)
    words = dict(zip(("wait0.3", "hello", "wait30"), numbers, strict=True))
    with strange.steps() as steps:
        steps.give({number: says(word) for word, number in words.items()})
        assert [*steps.some()] == [words["hello"]]
        assert words["hello"] not in steps
        steps.give({words["hello"]: says("hello")})
        time.sleep(1.3)
        found = steps.rest()
        assert steps.some() == {}
    assert not any(number in steps for number in numbers)
    assert {word: isinstance(found[number], Failed) for word, number in words.items()} == {
        "wait0.3": False, "hello": False, "wait30": True,
    }  # fmt: skip


@pytest.mark.slow
def test_slow_tools_cost_their_latency_once(pool):
    """Calls that block for 2 seconds, in 64 episodes: T calls of each take at most 2 T + 1 seconds."""
    strange = pool("Strange")
    numbers = strange.open([""] * 64)
    strange.reset({number: {} for number in numbers})
    started = time.monotonic()
    for _ in range(3):
        answers = strange.step(dict.fromkeys(numbers, says("wait2")))
        assert all(answer["reward"] == 0.5 for answer in answers.values())
    assert time.monotonic() - started <= 3 * 2 + 1


def test_processes_that_an_environment_leaves_end_with_the_pool(pool):
    strange = pool("Strange")
    (number,) = strange.open([""])
    strange.reset({number: {}})
    pid = int(strange.step({number: says("leave a process")})[number]["messages"][0]["content"])
    assert Path(f"/proc/{pid}").exists()
    strange.close()
    assert_ends([pid])
    (number,) = strange.open([""])  # a new worker
    assert strange.reset({number: {}}) == {number: {"messages": []}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoReset", "has no method reset"),
        ("NoTools", "neither a method step nor a public method"),
        ("NoHints", "NoHints.look cannot be described"),
        ("Undescribed", "tools of .*Undescribed are JSON schemas, .*, got <function add"),
        ("Missing", "has no function 'Missing'"),
    ],
)
def test_bad_classes_are_refused(name, words):
    """As in a worker, which takes longer to start."""
    spec = f"{HERE}:{name}"
    with pytest.raises(ValueError, match=words):
        find_doors(spec, load_function("environment", spec), {}, [])


def test_sets_of_words_have_one_order_in_all_workers(pool, tmp_path):
    """Otherwise no run could be repeated whose environment draws from one."""
    (tmp_path / "cards.py").write_text(
        "class Cards:\n    def step(self, message): ...\n    def reset(self, **row):\n"
        "        return ' '.join({f'card{i}' for i in range(20)})\n"
    )

    def drawn() -> str:
        cards = pool(f"{tmp_path}/cards.py:Cards")
        (number,) = cards.open([""])
        return cards.reset({number: {}})[number]["messages"][0]["content"]

    first = drawn()
    assert len(first.split()) == 20
    assert drawn() == first


def test_what_a_worker_refuses_is_told_before_anything_runs(pool):
    message = r"players\.py:GuessNumber, which cannot be used: .*cannot be called with the columns \['prompt'\]"
    with pytest.raises(ValueError, match=message):
        pool("GuessNumber", columns=("prompt",))
