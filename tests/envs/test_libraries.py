"""Environments of other libraries are taken by their names."""

import asyncio
import importlib.util
import json
import threading
from pathlib import Path

import pytest
from aiohttp import web

from rlft_fast.envs import Failed
from rlft_fast.envs.doors import find_doors, find_tools
from rlft_fast.envs.libraries import find_library
from tests.envs.players import bare
from tests.envs.test_pool import pool, says  # noqa: F401 - a fixture

HERE = Path(__file__).with_name("players.py")


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.fixture
def play():
    """Plays an episode in this process; returns the answers to a reset and to messages, and the tools."""
    opened = []

    def run(spec, messages, row=None, **options):
        row = {"prompt": [says("Play.")], "seed": 3} | (row or {})
        doors = find_doors(spec, find_library(spec), options, [*row])
        opened.append(doors.open())
        begun = opened[-1].reset(row)
        return begun, [opened[-1].step(message) for message in messages], doors.tools

    yield run
    for door in opened:
        door.end()


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_is_one_turn(play):
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=1, min_terms=2, max_terms=2)[0]
    right = says(f"So <answer>{entry['answer']}</answer>")
    options = {"min_terms": 2, "max_terms": 2}
    begun, (answer,), _ = play("reasoning_gym:chain_sum", [right], **options)
    assert begun == [{"content": f"\n\n{entry['question']}"}]
    assert answer == ([], 1.0, True)


@needs("reasoning_gym")
def test_an_answer_that_a_task_of_reasoning_gym_cannot_read_has_no_reward(play):
    """As in `reasoning_gym_reward`. The episode is not left out."""
    _, answers, _ = play("reasoning_gym:prime_factorization", [says("no idea"), says("<answer>a, b</answer>")])
    assert answers == [([], 0.0, True)] * 2


ECHO = """
import gymnasium

class Echo(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(50)
    action_space = gymnasium.spaces.Text(5, charset="0123456789")

    def reset(self, seed=None, options=None):
        return f"seed {seed}, options {sorted(options)}", {}

    def step(self, action):
        return f"heard {action}", len(action) / 2, action == "99", False, {}

gymnasium.register("Echo-v0", Echo)
gymnasium.register("Numbers-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv")
"""


@needs("gymnasium")
def test_gymnasium_reads_and_writes_text(play, tmp_path, monkeypatch):
    (tmp_path / "echoing.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    begun, answers, _ = play("gymnasium:echoing:Echo-v0", [says("7"), says("seven"), says("99")])
    assert begun == [{"content": "\n\nseed 3, options []"}]
    assert answers[0] == ([{"role": "user", "content": "heard 7"}], 0.5, False)
    assert "expected Text(1, 5, charset=0123456789)" in answers[1].messages[0]["content"]
    assert answers[2].done
    with pytest.raises(ValueError, match=r"has the observation space Box.*, but a policy reads and writes text"):
        play("gymnasium:echoing:Numbers-v0", [])


@needs("textarena")  # in a run it has a process of its own: it seeds Python's random numbers
def test_a_game_of_textarena(play):
    begun, answers, _ = play("textarena:GuessTheNumber-v0", [says(f"[{i}]") for i in (1, 20, 99, 99)])
    assert "between 1 and 20" in begun[0]["content"]
    assert answers[0].messages == [{"role": "user", "content": "The target number is higher."}]
    assert answers[1].messages == [{"role": "user", "content": "The target number is lower."}]
    assert (answers[3].done, 0 <= answers[3].reward < 1) == (True, True)  # two invalid moves
    with pytest.raises(ValueError, match="is no game for one player"):
        play("textarena:TicTacToe-v0", [])


@pytest.fixture
def server():
    """A server of OpenEnv's protocol; returns its address, and a list of the messages that it gets."""
    heard, loop = [], asyncio.new_event_loop()
    schemas = {"text": {"message": {"type": "string"}}, "move": {"x": {"type": "integer"}, "y": {"type": "integer"}}}

    async def schema(request):
        fields = schemas[request.match_info["kind"]]
        stamp = {"metadata": {"type": "object"}}
        return web.json_response({"action": {"properties": fields | stamp, "required": [*fields]}})

    async def play(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            heard.append(asked)
            if asked["type"] == "step" and asked["data"].get("message") == "break":
                await socket.send_json({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}})
                continue
            if not isinstance(asked["data"].get("x", 0), int):  # as OpenEnv answers to pydantic's ValidationError
                errors = [{"type": "int_parsing", "loc": ["x"], "msg": "Input should be a valid integer", "input": "a"}]
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                await socket.send_json({"type": "error", "data": data})
                continue
            observation = {"text": f"got {asked['data']}", "metadata": {}}
            data = {"observation": observation, "reward": 0.5, "done": asked["data"].get("message") == "bye"}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    async def start():
        app = web.Application()
        app.add_routes([web.get("/{kind}/schema", schema), web.get("/{kind}/ws", play)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", heard
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_openenv_takes_words_as_an_action(pool, server):  # noqa: F811
    address, heard = server
    games = pool(f"openenv:{address}/text", columns=("prompt", "seed"))
    first, second = games.open(["", ""])
    begun = games.reset({number: {"prompt": [says("Play.")], "seed": number} for number in (first, second)})
    assert begun[second] == {"messages": [{"content": f"\n\ngot {{'seed': {second}}}"}]}
    answers = games.step({first: says("hi"), second: says("break")})
    assert answers[first]["messages"] == [{"role": "user", "content": "got {'message': 'hi'}"}]
    assert isinstance(answers[second], Failed)
    assert "EXECUTION_ERROR: it broke" in answers[second]
    last = games.step({first: says("bye")})[first]
    assert (last["reward"], last["done"]) == (0.5, True)
    assert heard[-1] == {"type": "step", "data": {"message": "bye"}}


def test_openenv_has_a_tool_for_other_actions(play, server):
    """One that is no action costs its turn, and not the episode."""
    call, wrong = ({"function": {"name": "act", "arguments": {"x": x, "y": 2}}} for x in (1, "a"))
    said = [says("") | {"tool_calls": [call, wrong, call]}, says("done")]
    _, answers, tools = play(f"openenv:{server[0]}/move", said)
    assert tools[0]["function"]["parameters"]["required"] == ["x", "y"]
    result = {"role": "tool", "name": "act", "content": "got {'x': 1, 'y': 2}"}
    refused = result | {"content": "This is no action: x: Input should be a valid integer"}
    assert answers[0] == ([result, refused, result], 1.0, False)
    assert answers[1].done


def test_openenv_is_asked_without_a_proxy(play, server, monkeypatch):
    """For its schema, as for the WebSocket of an episode."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    _, answers, _ = play(f"openenv:{server[0]}/text", [says("hi")])
    assert answers[0].messages == [{"role": "user", "content": "got {'message': 'hi'}"}]


VERL_TOOL = """
{imports}

class Till({base}):
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name, self.prices = tool_schema.function.name, {{}}

    async def create(self, instance_id=None, **kwargs):
        self.prices["one"] = kwargs["create_kwargs"].get("price", 1)
        return "one", {response}()

    async def execute(self, instance_id, parameters, **kwargs):
        price = self.prices[instance_id] * parameters["count"]
        return {response}(text=f"{{price}} {{self.config['currency']}}"), price / 10, {{}}

    async def release(self, instance_id, **kwargs):
        del self.prices[instance_id]
"""
VERL_FILE = """
tools:
  - class_name: {module}.Till
    config: {{type: native, currency: crowns}}
    tool_schema:
      type: function
      function:
        name: pay
        description: Pays for eggs.
        parameters: {{type: object, properties: {{count: {{type: integer, description: eggs}}}}, required: [count]}}
"""
ALIKE = {"imports": "from types import SimpleNamespace as Response", "base": "object", "response": "Response"}
OF_VERL = {
    "imports": "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse",
    "base": "BaseTool", "response": "ToolResponse",
}  # fmt: skip


@pytest.mark.parametrize("parts", [ALIKE, pytest.param(OF_VERL, marks=[pytest.mark.peers, needs("verl")])])
def test_tools_of_verl(parts, play, tmp_path, monkeypatch):
    module = f"till_{'of_verl' if parts is OF_VERL else 'alike'}"
    (tmp_path / f"{module}.py").write_text(VERL_TOOL.format(**parts))
    (tmp_path / "tools.yaml").write_text(VERL_FILE.format(module=module))
    monkeypatch.syspath_prepend(tmp_path)
    row = {"tools_kwargs": {"pay": {"create_kwargs": {"price": 3}}}}
    calls = [[("pay", {"count": 2}), ("pay", {"count": 1}), ("steal", {})], [("pay", {"number": 2})], []]
    said = [
        says("") | {"tool_calls": [{"function": {"name": name, "arguments": own}} for name, own in turn]}
        for turn in calls
    ]
    begun, answers, tools = play(f"verl:{tmp_path / 'tools.yaml'}", said, row=row)
    assert begun == []
    assert [tool["function"]["name"] for tool in tools] == ["pay"]
    words = [[message["content"] for message in answer.messages] for answer in answers]
    assert words[0] == ["6 crowns", "3 crowns", "There is no tool 'steal', only pay"]
    assert words[1:] == [["Error executing tool 'pay': 'count'"], []]
    assert [(answer.reward, answer.done) for answer in answers] == [
        (pytest.approx(0.9), False),
        (0.0, False),
        (None, True),
    ]


def test_files_that_list_no_tools_of_verl_are_refused(play, tmp_path, monkeypatch):
    (tmp_path / "bare_tool.py").write_text("class Bare:\n    async def create(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text, words in [
        ("tools: []", "has no list tools"),
        ("tools: [{class_name: bare_tool.Bare}]", "bare_tool.Bare in .* has no method execute"),
    ]:
        (tmp_path / "tools.yaml").write_text(text)
        with pytest.raises(ValueError, match=words):
            play(f"verl:{tmp_path / 'tools.yaml'}", [])
    with pytest.raises(ValueError, match=r"verl:missing.yaml cannot be read"):
        play("verl:missing.yaml", [])


def test_functions_are_tools(pool):  # noqa: F811
    made = pool([f"{HERE}:add"])
    assert made.tools[""][0]["function"]["parameters"]["required"] == ["a"]
    (number,) = made.open([""])
    assert made.reset({number: {"prompt": "Count."}}) == {number: {"messages": []}}
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    answer = made.step({number: says("") | {"tool_calls": [call]}})[number]
    assert answer == {"messages": [{"role": "tool", "name": "add", "content": "5"}], "reward": None, "done": False}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http://127.0.0.1:1", "no OpenEnv server answers at http://127.0.0.1:1/schema"),
        ("here", "expected openenv:http://HOST:PORT"),
    ],
)
def test_an_address_without_a_server_is_refused(play, name, words):
    with pytest.raises(ValueError, match=words):
        play(f"openenv:{name}", [])


def test_a_function_without_hints_is_refused():
    with pytest.raises(ValueError, match="x:bare cannot be described to the policy"):
        find_tools({"x:bare": bare})
