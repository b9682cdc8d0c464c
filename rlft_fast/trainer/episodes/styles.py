"""How tools, calls and results stand in a conversation: as the chat template has them, or as plain messages."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlft_fast.errors import brief
from rlft_fast.trainer.episodes.calls import Parsed, parse
from rlft_fast.trainer.prompts import Conversation, Limits, Message, Tokenizer, words_of

MARK = "xqmarkxq"  # a plain word, which templates leave as it is
_RESULT = "xqresultxq"

_EXPLAINED = """You can call these tools, each described by a line of JSON:
<tools>
{tools}
</tools>
To call a tool, write JSON with its name and arguments, like this:
<tool_call>{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}</tool_call>
The results follow between <tool_response> and </tool_response>."""


class Style(Protocol):
    """A form of conversations.

    Attributes:
        name: in messages.
        tools: JSON schemas of the tools.
    """

    name: str
    tools: list[dict[str, Any]]

    def with_tools(self, conversation: Conversation) -> Conversation:
        """The conversation whose prompt tells the policy of the tools."""
        ...

    def marked(self, reply: Parsed) -> Message:
        """The policy's message with `MARK` in place of the last of its words."""
        ...

    def said(self, reply: Parsed, text: str) -> Message:
        """The policy's message in the history.

        Args:
            reply: what the policy has written.
            text: the same, as it was written.
        """
        ...

    def results(self, messages: Sequence[Message]) -> list[Message]:
        """The environment's messages as the template takes them."""
        ...


class TemplateStyle:
    """The chat template has tools, calls and results."""

    name = "the chat template's own"

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools

    def with_tools(self, conversation: Conversation) -> Conversation:
        return replace(conversation, tools=self.tools)

    def marked(self, reply: Parsed) -> Message:
        if not (reply.calls or reply.mistakes):
            return {"role": "assistant", "content": MARK}
        *before, last = [*reply.calls, *[{"name": "unknown", "arguments": {}}] * len(reply.mistakes)]
        calls = [*before, {"name": last["name"], "arguments": {MARK: MARK}}]
        return {
            "role": "assistant", "content": reply.content,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }  # fmt: skip

    def said(self, reply: Parsed, text: str) -> Message:
        return reply.message

    def results(self, messages: Sequence[Message]) -> list[Message]:
        return [*messages]


class PlainStyle:
    """Tools stand in the system prompt, calls in the policy's words, and results in a user's message.

    Args:
        tools: JSON schemas.
        role: of the message that tells of the tools, for a template that refuses system prompts.
    """

    name = "plain messages"

    def __init__(self, tools: list[dict[str, Any]], role: str = "system") -> None:
        self.tools, self.role = tools, role

    def with_tools(self, conversation: Conversation) -> Conversation:
        if not self.tools:
            return conversation
        lines = "\n".join(json.dumps(tool.get("function", tool)) for tool in self.tools)
        words = _EXPLAINED.format(tools=lines)
        messages = [*conversation.messages]
        if messages[0]["role"] == self.role:
            given = words_of(messages.pop(0)["content"])
            words = f"{given}\n\n{words}" if self.role == "system" else f"{words}\n\n{given}"
        return replace(conversation, messages=[{"role": self.role, "content": words}, *messages])

    def marked(self, reply: Parsed) -> Message:
        return {"role": "assistant", "content": MARK}

    def said(self, reply: Parsed, text: str) -> Message:
        return {"role": "assistant", "content": text}

    def results(self, messages: Sequence[Message]) -> list[Message]:
        """Results of tools are joined in one message: templates expect that roles alternate."""
        results = [message["content"] for message in messages if message["role"] == "tool"]
        others = [message for message in messages if message["role"] != "tool"]
        if not results:
            return others
        joined = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return [{"role": "user", "content": joined}, *others]


def choose_style(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> Style:
    """The chat template's own style where it shows tools, calls in a form that `parse` reads, and results."""
    if not tools:
        return PlainStyle([])
    if find_flaw(tokenizer, tools) is None:
        return TemplateStyle(tools)
    try:
        told = [{"role": "system", "content": "Yes."}, {"role": "user", "content": "Is it so?"}]
        Conversation(told).render(tokenizer, Limits())
    except Exception:  # a template is code of the model's, and raises its own errors
        return PlainStyle(tools, role="user")
    return PlainStyle(tools)


def find_flaw(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> str | None:
    """Why the chat template cannot carry these tools; None: it can."""
    name = tools[0].get("function", tools[0])["name"]
    call = {"name": name, "arguments": {"mark": MARK}}
    asked: list[Message] = [{"role": "user", "content": "Is it so?"}]
    reply = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    result = {"role": "tool", "name": name, "content": _RESULT}
    limits = Limits()
    try:
        prompt = Conversation(asked, tools).render(tokenizer, limits)
        if any(tool.get("function", tool)["name"] not in prompt for tool in tools):
            return "it does not show the tools"
        text = Conversation([*asked, reply, result], tools).render(tokenizer, limits)
    except Exception as error:  # a template is code of the model's
        return brief(error)
    said, shown, _ = text.removeprefix(prompt).partition(_RESULT)
    if not shown:
        return "it does not show results"
    return None if call in parse(said).calls else "it writes calls in another form than <tool_call> with JSON"
