"""How tools, calls and results stand in a conversation: as the chat template has them, or as plain messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, Protocol

from rlft_fast.errors import brief
from rlft_fast.trainer.episodes.calls import Parsed, parse, said_message
from rlft_fast.trainer.episodes.forms import FORMS, HERMES, Form, own_form
from rlft_fast.trainer.prompts import (
    MARK,
    RESULT_MARK,
    Conversation,
    Limits,
    Message,
    Tokenizer,
    with_words,
    words_of,
)

_EXPLAINED = """You can call these tools, each described by a line of JSON:
<tools>
{tools}
</tools>
To call a tool, write its name and arguments, like this:
{expected}"""
_TAGGED = "\nThe results follow between <tool_response> and </tool_response>."
_UNREADABLE = {"name": "unknown", "arguments": {}}


class Style(Protocol):
    """A form of conversations.

    Attributes:
        tools: JSON schemas of the tools.
        form: in which the policy writes calls.
    """

    tools: list[dict[str, Any]]
    form: Form

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

    def results(self, messages: Sequence[Message], said: Message | None = None) -> list[Message]:
        """The environment's messages as the template takes them.

        Args:
            messages: the environment's. Those of tools have the order of the calls.
            said: the policy's message with the calls, as `said` has it.
        """
        ...

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of rows, with calls and results of tools, as the policy would write and read them."""
        ...


class TemplateStyle:
    """The chat template has calls and results.

    Args:
        tools: JSON schemas.
        form: in which the template writes calls.
        shows_tools: whether the template has the tools, too; otherwise the system prompt tells of them.
        as_text: whether the template takes the arguments of a call as the text of JSON.
    """

    def __init__(self, tools: list[dict[str, Any]], form: Form, *, shows_tools: bool = True, as_text: bool = False):
        self.tools, self.form, self.shows_tools, self.as_text = tools, form, shows_tools, as_text

    def with_tools(self, conversation: Conversation) -> Conversation:
        if self.shows_tools:
            return replace(conversation, tools=self.tools)
        return _told(conversation, self.tools, self.form.expected)

    def marked(self, reply: Parsed) -> Message:
        """Words beside a call are left out: a template may show them behind the results."""
        if not (calls := self._calls(reply)):
            return {"role": "assistant", "content": MARK}
        *before, last = calls
        return self._message("", [*before, last | {"arguments": {MARK: MARK}}])

    def said(self, reply: Parsed, text: str) -> Message:
        return self._message(reply.content, self._calls(reply))

    def results(self, messages: Sequence[Message], said: Message | None = None) -> list[Message]:
        calls = iter((said or {}).get("tool_calls", ()))
        return [self._of_call(message, calls) if message["role"] == "tool" else message for message in messages]

    def written(self, messages: Sequence[Message]) -> list[Message]:
        return [*messages]

    def _of_call(self, result: Message, calls: Iterator[dict[str, Any]]) -> Message:
        """A result with the call that it belongs to, as some templates require."""
        call = next(calls, None)
        return result if call is None else {"name": call["function"]["name"]} | result | {"tool_call_id": call["id"]}

    def _calls(self, reply: Parsed) -> list[dict[str, Any]]:
        return reply.calls if reply.mistake is None else [_UNREADABLE]

    def _message(self, content: str, calls: Sequence[dict[str, Any]]) -> Message:
        if self.as_text:
            calls = [call | {"arguments": json.dumps(call["arguments"])} for call in calls]
        return said_message(content, calls)


class PlainStyle:
    """Tools stand in the system prompt, calls in the policy's words, and results in a user's message.

    Args:
        tools: JSON schemas.
        role: of the message that tells of the tools, for a template that refuses system prompts.
        form: of thoughts, where there are no tools.
    """

    def __init__(self, tools: list[dict[str, Any]], role: str = "system", form: Form = HERMES) -> None:
        self.tools, self.role, self.form = tools, role, form

    def with_tools(self, conversation: Conversation) -> Conversation:
        return _told(conversation, self.tools, self.form.expected + _TAGGED, self.role) if self.tools else conversation

    def marked(self, reply: Parsed) -> Message:
        return {"role": "assistant", "content": MARK}

    def said(self, reply: Parsed, text: str) -> Message:
        """gpt-oss's template refuses the channels of a text, and Hermes' calls stand in it."""
        return {"role": "assistant", "content": text if self.form is HERMES else reply.content}

    def results(self, messages: Sequence[Message], said: Message | None = None) -> list[Message]:
        """Results of tools are joined in one message: templates expect that roles alternate."""
        results = [_text_of(message["content"]) for message in messages if message["role"] == "tool"]
        others = [message for message in messages if message["role"] != "tool"]
        if not results:
            return others
        joined = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return [{"role": "user", "content": joined}, *others]

    def written(self, messages: Sequence[Message]) -> list[Message]:
        runs = [(is_result, [*run]) for is_result, run in groupby(messages, lambda message: message["role"] == "tool")]
        return [own for is_result, run in runs for own in (self.results(run) if is_result else map(_with_calls, run))]


def _with_calls(message: Message) -> Message:
    """A message with the calls of tools as words."""
    if not (calls := message.get("tool_calls")):
        return message
    written = [f"<tool_call>{json.dumps(_call_of(call.get('function', call)))}</tool_call>" for call in calls]
    words = [words_of(message["content"])] if message.get("content") else []
    return {"role": message["role"], "content": "\n".join([*words, *written])}


def _call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    given = call.get("arguments") or {}
    return {"name": call.get("name"), "arguments": json.loads(given) if isinstance(given, str) else given}


def _text_of(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result)


def find_styles(tokenizer: Tokenizer, tools: list[dict[str, Any]], ends: Sequence[str] = ()) -> Iterator[Style]:
    """Styles for these tools: first the chat template's own, where it has results, and calls that `parse` reads.

    A ``response_template`` of the tokenizer's comes before the forms of families. Where it reads a part of a call as
    another call, or a call in a thought, it comes after them.

    Args:
        tokenizer: has the chat template.
        tools: JSON schemas.
        ends: texts of the tokens that end a reply.
    """
    if not tools:
        yield PlainStyle([], form=_form_of_thoughts(tokenizer))
        return
    own = own_form(getattr(tokenizer, "response_template", None), tokenizer.get_added_vocab())
    ways = [TemplateStyle(tools, own, as_text=as_text) for as_text in (False, True)] if own is not None else []
    yield from (style for style in ways if _carries(tokenizer, style, ends, strict=True))
    for form, as_text, shows_tools in product(FORMS, (False, True), (True, False)):
        style = TemplateStyle(tools, form, shows_tools=shows_tools, as_text=as_text)
        if _carries(tokenizer, style):
            yield style
    yield from (style for style in ways if _carries(tokenizer, style, ends))
    yield PlainStyle(tools, _role_of_instructions(tokenizer))


def _form_of_thoughts(tokenizer: Tokenizer) -> Form:
    """The first form whose thoughts the chat template writes, such as gpt-oss's channels; Hermes' where none is."""
    template = str(getattr(tokenizer, "chat_template", None))
    return next((form for form in FORMS if form.thought[0] in template), HERMES)


def _role_of_instructions(tokenizer: Tokenizer) -> str:
    try:
        told = [{"role": "system", "content": "Yes."}, {"role": "user", "content": "Is it so?"}]
        Conversation(told).render(tokenizer, Limits())
    except Exception:  # a template is code of the model's, and raises its own errors
        return "user"
    return "system"


def _told(conversation: Conversation, tools: Sequence[dict[str, Any]], how: str, role: str = "system") -> Conversation:
    """The conversation with a message that tells of tools and of how to call them."""
    lines = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    words = _EXPLAINED.format(tools=lines, expected=how)
    messages = [*conversation.messages]
    if messages[0]["role"] == role:
        given = messages.pop(0)["content"]
        told = with_words(given, after=f"\n\n{words}") if role == "system" else with_words(given, f"{words}\n\n")
        return replace(conversation, messages=[{"role": role, "content": told}, *messages])
    return replace(conversation, messages=[{"role": role, "content": words}, *messages])


def _carries(tokenizer: Tokenizer, style: TemplateStyle, ends: Sequence[str] = (), *, strict: bool = False) -> bool:
    """Whether the chat template shows these tools, their results, and calls in a form that `parse` reads.

    Args:
        tokenizer: has the template.
        style: to be tried.
        ends: `parse` reads what stands before the first of these texts.
        strict: whether no part of a call may be read as another call, and no call in a thought.
    """
    names = [name_of(tool) for tool in style.tools]
    call = {"name": names[0], "arguments": {"mark": MARK}}
    asked = style.with_tools(Conversation([{"role": "user", "content": "Is it so?"}]))
    reply = style.said(Parsed("", [call]), "")
    result = style.results([{"role": "tool", "content": RESULT_MARK}], reply)
    limits = Limits()

    def render(*messages: Message) -> str:
        with limits.one():
            text = tokenizer.apply_chat_template([*asked.messages, *messages], tools=asked.tools, tokenize=False)
        return str(text)

    try:
        prompt, said, answered = render(), render(reply), render(reply, *result)
    except Exception:  # a template is code of the model's, and raises its own errors
        return False
    if RESULT_MARK not in answered or not all(name in prompt for name in names):
        return False
    written = said.removeprefix(prompt)
    written = written[: min((place for end in ends if (place := written.find(end)) >= 0), default=None)]
    if _calls_in(written, style.form) != [call | {"id": None}]:
        return False
    parts = [_calls_in(written[:end], style.form) for end in range(len(written) if strict else 0)]
    opened, close = style.form.thought
    thought = f"{opened}Perhaps {written.rpartition(close)[2]}" if strict else ""  # a template may add an empty thought
    return all(calls in ([], [call | {"id": None}]) for calls in parts) and not _calls_in(thought, style.form)


def _calls_in(text: str, form: Form) -> list[dict[str, Any]]:
    return [found | {"id": None} for found in parse(text, form).calls]


def name_of(tool: dict[str, Any]) -> str:
    """The name in a tool's JSON schema. Raises ValueError where it has none."""
    name = tool.get("function", tool).get("name")
    if not isinstance(name, str):
        raise ValueError(f"a tool must have a name, got {brief(repr(tool), 200)}")
    return name
