"""Tools of verl, as the YAML file of its ``multi_turn.tool_config_path`` lists them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml

from rlft_fast.envs.doors import Message
from rlft_fast.plugins import load_function


class VerlTools:
    """Classes with the interface of verl 0.9.1's `BaseTool`, which verl's loop of tools uses in the same way.

    Each call has an instance of its own: ``create``, ``execute``, ``release``. The rewards of the calls in a reply are
    the reward of the turn. As in verl's loop, ``calc_reward`` is not called. The column ``tools_kwargs`` of a row, also
    within ``extra_info``, has the arguments of ``create``. A reply without a call ends the episode.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        listed = [_tool(self.name, entry) for entry in _entries(self.name)]
        self.tools = [schema for schema, _ in listed]
        self.own = {schema["function"]["name"]: tool for schema, tool in listed}
        if len(self.own) < len(listed):
            raise ValueError(f"two of the tools in {self.name} have the same name: rename one of them")

    def reset(self, tools_kwargs: Any = None, extra_info: Any = None, **row: Any) -> None:
        inner = extra_info.get("tools_kwargs") if isinstance(extra_info, Mapping) else None
        self.arguments: Mapping[str, Any] = tools_kwargs or inner or {}

    async def step(self, message: Message) -> tuple[list[Message], float | None, bool]:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        results = [(call["name"], *await self._call(call["name"], call["arguments"])) for call in calls]
        messages = [{"role": "tool", "name": name, "content": words} for name, words, _ in results]
        return messages, sum((reward for *_, reward in results), start=0.0) if calls else None, not calls

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        """What the policy reads, and the reward of the call."""
        if (tool := self.own.get(name)) is None:
            return f"There is no tool {name!r}, only {', '.join(sorted(self.own))}", 0.0
        try:
            own = (self.arguments.get(name) or {}).get("create_kwargs") or {}
            instance_id, _ = await tool.create(create_kwargs=own)
            try:
                response, reward, _ = await tool.execute(instance_id, arguments)
            finally:
                await tool.release(instance_id)
        except Exception as error:  # the policy reads it, and may try again
            return f"Error executing tool {name!r}: {error}", 0.0
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise ValueError(f"the tool {name} answers with images or videos, but environments answer in words")
        return response.text or "", float(reward or 0.0)


def _entries(path: str) -> list[dict[str, Any]]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"verl:{path} cannot be read: expected verl:FILE.yaml with a list tools: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(map(_is_entry, entries)):
        raise ValueError(f"{path} has no list tools of mappings with class_name, which verl's tool_config_path has")
    return entries


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("class_name"), str)


def _tool(path: str, entry: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The JSON schema of a tool, and the tool."""
    name = entry["class_name"]
    kind: Any = load_function("tool", ":".join(name.rsplit(".", 1)))
    if missing := [own for own in ("create", "execute", "release") if not callable(getattr(kind, own, None))]:
        raise ValueError(f"{name} in {path} has no method {missing[0]}, which verl's BaseTool has")
    given = entry.get("tool_schema")
    tool = kind(config=entry.get("config") or {}, tool_schema=None if given is None else _as_verl_has_it(given))
    schema = given if given is not None else tool.get_openai_tool_schema()
    return (schema if isinstance(schema, dict) else schema.model_dump(exclude_none=True)), tool


def _as_verl_has_it(schema: dict[str, Any]) -> Any:
    """The schema with fields as attributes: verl's own class where the tool's module has imported verl."""
    if (schemas := sys.modules.get("verl.tools.schemas")) is not None:
        return schemas.OpenAIFunctionToolSchema.model_validate(schema)
    return json.loads(json.dumps(schema), object_hook=lambda fields: SimpleNamespace(**fields))
