"""Calls of tools in what a policy has written, in the form of its family. What a policy thinks is never executed."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from transformers.utils.chat_parsing import parse_response

from rlft_fast.trainer.episodes.forms import THINKING, Form
from rlft_fast.trainer.prompts import Message

_SHOWN = 200  # characters of a call in a message


class Vocabulary(Protocol):
    """The part of a transformers tokenizer that reading needs."""

    def get_added_vocab(self) -> dict[str, int]: ...

    def decode(self, token_ids: Any) -> Any: ...


class Parsed(NamedTuple):
    """What a policy has written."""

    content: str
    """Without thoughts and calls."""
    calls: list[dict[str, Any]]
    """Each with a name and arguments, and an id where the policy has written one."""
    mistake: str | None = None
    """Why the calls of the reply cannot be read. None of them is then made."""
    thought: str = ""
    """What the policy has thought before, without its begin and end."""

    @property
    def message(self) -> Message:
        """The assistant's message, as chat templates and environments take it."""
        return said_message(self.content, self.calls)


def said_message(content: str, calls: Sequence[dict[str, Any]]) -> Message:
    """An assistant's message with calls, whose ids have the nine letters that Mistral's templates require."""
    own = [
        {"type": "function", "id": call_id(call, i), "function": {k: call[k] for k in ("name", "arguments")}}
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": own} if own else {})


def call_id(call: dict[str, Any], number: int) -> str:
    """The id of a call; `number` counts the calls of a reply from 0."""
    own = call.get("id")
    return own if isinstance(own, str) and len(own) == 9 and own.isalnum() else f"call{number:05d}"


def parse(text: str, form: Form, tools: Sequence[dict[str, Any]] = (), *, is_thinking: bool = False) -> Parsed:
    """Reads a reply.

    Args:
        text: without the token that ended it. A thought without an end takes all that follows.
        form: of calls.
        tools: JSON schemas, for the types of arguments that a form writes as text.
        is_thinking: whether the prompt has opened a thought.
    """
    opened, close = form.thought
    before, closed, _ = text.partition(close)
    begun = is_thinking or (bool(closed) and opened not in before)
    try:
        read = parse_response(text, form.template, prefix=opened if begun else "", tools=[*tools])
        calls = [_call(found) for found in read.get("tool_calls", [])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Parsed("", [], _mistake(form, text, f"the call is not readable ({_last_line(error)})"))
    content = read.get("content", "").strip()
    thought = _joined(next((read[name] for name in THINKING if name in read), ""))
    if re.search(form.mark, content):
        return Parsed("", [], _mistake(form, content, "the call is not readable"), thought)
    return Parsed(content, calls, None, thought)


def text_of(tokenizer: Vocabulary, token_ids: Sequence[int], form: Form) -> str:
    """The text of a reply, in which a call has the token that calls of its form have.

    Where the tokenizer has this token, the same letters in other tokens are no call: a space goes behind the first.
    """
    token = tokenizer.get_added_vocab().get(form.token)
    if token is None:
        return str(tokenizer.decode(token_ids))
    spelled = f"{form.token[0]} {form.token[1:]}"
    runs = [(is_token, [*run]) for is_token, run in groupby(token_ids, key=lambda i: i == token)]
    return "".join(
        form.token * len(run) if is_token else str(tokenizer.decode(run)).replace(form.token, spelled)
        for is_token, run in runs
    )


def _joined(thoughts: str | Sequence[str]) -> str:
    return thoughts if isinstance(thoughts, str) else "\n".join(thoughts)


def _mistake(form: Form, text: str, error: str) -> str:
    return f"{error}: expected {form.expected}, got {text.strip()[:_SHOWN]!r}"


def _last_line(error: Exception) -> str:
    """The line that says what is wrong; the lines before it repeat the call."""
    return (str(error).splitlines() or [type(error).__name__])[-1].removeprefix("Error: ")[:_SHOWN]


def _call(found: Any) -> dict[str, Any]:
    call = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("the call names no tool")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of the call are no object")
    own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"name": call["name"], "arguments": arguments} | own
