"""Calls of tools in what a policy has written. Pure functions.

A call is JSON between ``<tool_call>`` and ``</tool_call>``, as Qwen2.5, Qwen3 and Hermes are trained to write it:
``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``. What a policy thinks is never executed.
"""

import json
import re
from typing import Any, NamedTuple

from rlft_fast.trainer.prompts import Message

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_EXPECTED = 'expected {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>'


class Parsed(NamedTuple):
    """What a policy has written."""

    content: str
    """Without thoughts and calls."""
    calls: list[dict[str, Any]]
    """Each with a name and arguments."""
    mistakes: list[str]
    """One for each call that cannot be read."""

    @property
    def message(self) -> Message:
        """The assistant's message, as chat templates and environments take it."""
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})


def parse(text: str) -> Parsed:
    """Reads a reply.

    Args:
        text: without the token that ended it. A thought that the prompt has opened ends at ``</think>``; a thought
            without an end takes all that follows.
    """
    _, _, said = text.rpartition("</think>") if "<think>" not in text else ("", "", text)
    said = _THOUGHT.sub("", said)
    calls, mistakes = [], []
    for found in _CALL.finditer(said):
        try:
            calls.append(_call(found[1]))
        except ValueError as error:
            mistakes.append(f"{error}: {_EXPECTED}, got {found[1].strip()[:200]!r}")
    return Parsed(_CALL.sub("", said).strip(), calls, mistakes)


def _call(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not JSON ({error})") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("the call names no tool")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of the call are no object")
    return {"name": call["name"], "arguments": arguments}
