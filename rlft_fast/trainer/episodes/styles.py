"""How tools, calls and results stand in a conversation: as the chat template has them, or as plain messages."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlft_fast.trainer.episodes.calls import Parsed, parse
from rlft_fast.trainer.prompts import MARK, RESULT_MARK, Conversation, Limits, Message, Tokenizer, words_of

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
        tools: JSON schemas of the tools.
    """

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
    if _carries(tokenizer, tools):
        return TemplateStyle(tools)
    try:
        told = [{"role": "system", "content": "Yes."}, {"role": "user", "content": "Is it so?"}]
        Conversation(told).render(tokenizer, Limits())
    except Exception:  # a template is code of the model's, and raises its own errors
        return PlainStyle(tools, role="user")
    return PlainStyle(tools)


def _carries(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> bool:
    """Whether the chat template shows these tools, their results, and calls in a form that `parse` reads."""
    names = [name_of(tool) for tool in tools]
    call = {"name": names[0], "arguments": {"mark": MARK}}
    asked: list[Message] = [{"role": "user", "content": "Is it so?"}]
    reply = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    result = {"role": "tool", "name": names[0], "content": RESULT_MARK}
    limits = Limits()
    try:
        prompt = Conversation(asked, tools).render(tokenizer, limits)
        text = Conversation([*asked, reply, result], tools).render(tokenizer, limits)
    except Exception:  # a template is code of the model's, and raises its own errors
        return False
    said, shown, _ = text.removeprefix(prompt).partition(RESULT_MARK)
    return all(name in prompt for name in names) and bool(shown) and call in parse(said).calls


def name_of(tool: dict[str, Any]) -> str:
    """The name in a tool's JSON schema."""
    return tool.get("function", tool)["name"]
