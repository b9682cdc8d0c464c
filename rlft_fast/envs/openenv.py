"""Environments behind an OpenEnv server, by the JSON of its WebSocket. A connection is an episode."""

import functools
import json
import urllib.request
from typing import Any, ClassVar

from rlft_fast.envs.doors import Message, opening_words

_SECONDS = 10.0  # for the schema, before the run starts
_STAMPS = ("metadata", "done", "reward")
_LONGEST = 1 << 24  # bytes of an observation, which is cut to far less
_ASK = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # aiohttp's WebSocket takes no proxy either


class OpenEnv:
    """The environment at a URL. ``reset`` gets the columns of a row, such as ``seed``.

    Where an action has one text, the policy's words are this text. Any other action is a tool of the policy's, ``act``,
    with the fields of the action as arguments. Observations with one text are this text, others are JSON. An action
    that the server cannot read costs a turn, and the policy reads why.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        try:
            import aiohttp  # noqa: F401 - before the run starts, not in an episode
        except ModuleNotFoundError as error:
            raise ValueError(
                f"openenv:{self.name} needs aiohttp, which is not installed: pip install aiohttp"
            ) from error
        self.url = self.name.rstrip("/")
        schema = _action_schema(self.url)
        fields = {name: kind for name, kind in schema.get("properties", {}).items() if name not in _STAMPS}
        needed = [name for name in fields if name in schema.get("required", [])] or [*fields]
        self.field = needed[0] if len(needed) == 1 and fields[needed[0]].get("type") == "string" else None
        self.tools = [] if self.field else [_tool(schema, fields)]
        self.session: Any = None

    async def reset(self, prompt: Any = None, **row: Any) -> str | None:
        import aiohttp

        self.session = aiohttp.ClientSession()
        url = self.url.replace("http", "ws", 1) + "/ws"
        self.socket = await self.session.ws_connect(url, max_msg_size=_LONGEST)
        observation, *_ = await self._ask("reset", row)
        return opening_words(observation, prompt)

    async def step(self, message: Message) -> tuple[list[Message], float | None, bool]:
        if self.field is not None:
            observation, reward, done = await self._ask("step", {self.field: message["content"]})
            return [{"role": "user", "content": observation}], reward, done
        calls = [call["function"] for call in message.get("tool_calls", [])]
        results: list[Message] = []
        total, done = 0.0, not calls
        for call in calls:
            if done or call["name"] != "act":
                words = "the episode has ended" if done else f"there is no tool {call['name']!r}, only act"
            else:
                words, reward, done = await self._ask("step", call["arguments"])
                total += reward or 0.0
            results.append({"role": "tool", "name": call["name"], "content": words})
        return results, total, done

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> tuple[str, float | None, bool]:
        await self.socket.send_str(json.dumps({"type": kind, "data": data}, default=str))
        answer = json.loads(await self.socket.receive_str())
        if answer.get("type") != "observation":
            error = answer.get("data", {})
            if kind == "step" and error.get("code") == "VALIDATION_ERROR":  # the policy reads it, and may try again
                return f"This is no action: {_mistakes(error)}", None, False
            raise RuntimeError(f"the server {self.url} answers {error.get('code')}: {error.get('message')}")
        data = answer["data"]
        return _words(data.get("observation")), data.get("reward"), bool(data.get("done"))


@functools.cache  # the worker asks; the processes of episodes inherit the answer
def _action_schema(url: str) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"openenv:{url} is no address: expected openenv:http://HOST:PORT")
    try:
        with _ASK.open(f"{url}/schema", timeout=_SECONDS) as answer:
            schema = json.loads(answer.read(_LONGEST))["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no OpenEnv server answers at {url}/schema: {error}") from error
    return schema


def _tool(schema: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    required = [name for name in schema.get("required", []) if name in fields]
    parameters = schema | {"type": "object", "properties": fields, "required": required}
    description = schema.get("description", "Acts in the environment.")
    return {"type": "function", "function": {"name": "act", "description": description, "parameters": parameters}}


def _mistakes(error: dict[str, Any]) -> str:
    """What pydantic has found in an action, as the server tells it."""
    found = [
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
        for each in error.get("errors") or ()
        if isinstance(each, dict)
    ]
    return "; ".join(found) or str(error.get("message"))


def _words(observation: Any) -> str:
    if isinstance(observation, dict):
        own = {name: value for name, value in observation.items() if name not in _STAMPS and value is not None}
        observation = next(iter(own.values())) if len(own) == 1 else own
    return observation if isinstance(observation, str) else json.dumps(observation)
