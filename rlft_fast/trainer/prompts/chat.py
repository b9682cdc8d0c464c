"""Conversations as the model reads them: plain transformers' chat template, with tools and options."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from rlft_fast.config import RowsConfig
from rlft_fast.trainer.prompts.images import only_placeholders
from rlft_fast.trainer.prompts.limits import Limits
from rlft_fast.trainer.prompts.messages import Message, render, words_of

MARK, RESULT_MARK = "xqmarkxq", "xqresultxq"
"""Plain words, which templates leave as they are. They stand for the assistant's words, and for a tool's result."""
SYSTEM = ("system", "developer")
"""Roles whose messages come from the developer."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template reads.

    Args:
        messages: dicts with a role, and with content or calls of tools.
        tools: JSON schemas of tools; None: there are none.
        variables: of the template.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the assistant's, which the answer continues."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def last_words(self) -> str | None:
        """The words of the last message, if it is the assistant's, as an answer for `render`."""
        return words_of(self.messages[-1].get("content") or "") if self.is_begun else None

    def split(self, answer: str) -> tuple[list[Message], Message]:
        """The messages before an answer, and the answer as a message.

        Args:
            answer: a whole answer, with the words that it continues.
        """
        if self.is_begun:
            return self.messages[:-1], self.messages[-1] | {"content": answer}
        return self.messages, {"role": "assistant", "content": answer}

    def render(self, tokenizer: Tokenizer, limits: Limits, answer: str | None = None) -> str:
        """The conversation as a model with this tokenizer reads it.

        The parts of a content are joined for a template that reads texts alone.

        Args:
            tokenizer: has the template.
            limits: of the template.
            answer: a whole answer; None: the text ends where an answer begins, or goes on.

        Raises:
            Exception: the template fails, refuses the conversation, or takes too much time or memory. A template is
                code of the model's and may raise any error.
        """
        messages, begun = self.messages, answer is None and self.is_begun
        if answer is not None:
            asked, message = self.split(answer)
            messages = [*asked, message]
        messages = only_placeholders(messages)

        def template(messages: list[Message]) -> str:
            return tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=answer is None and not begun,
                continue_final_message=begun, **self.variables,
            )  # fmt: skip

        with limits.one():
            return render(template, messages)

    def require_shown(self, text: str, tokenizer: Tokenizer, limits: Limits) -> None:
        """Refuses a conversation of which the template leaves out a message, as one of a role that it does not know.

        The assistant's own are not looked at: templates leave out thoughts, and words beside calls of tools.

        Args:
            text: of the conversation.
            tokenizer: has the template.
            limits: of the template.

        Raises:
            ValueError: the template leaves out a message.
            Exception: see `render`.
        """
        unseen = [i for i, message in enumerate(self.messages) if not _is_in(text, message)]
        if not unseen:
            return
        marks = {i: f"{MARK}{i}x" for i in unseen}  # a template may change words, but shows a mark
        messages = [m | {"content": marks[i]} if i in marks else m for i, m in enumerate(self.messages)]
        shown = replace(self, messages=messages).render(tokenizer, limits, self.last_words)
        if dropped := [i for i, mark in marks.items() if mark not in shown]:
            role = self.messages[dropped[0]]["role"]
            instead = "or leave it out"
            if role in SYSTEM:
                instead = "begin the user's first message with its words, or leave it (or data.system_prompt) out"
            raise ValueError(
                f"the chat template does not show message {dropped[0]}, of the role {role!r}, and the model would "
                f"never see it: give it a role that the template knows, {instead}"
            )


def _is_in(text: str, message: Message) -> bool:
    """Whether a text has the words of a message, if they are not the assistant's."""
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list) else []
    words = (str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return message["role"] == "assistant" or all(own.strip() in text for own in words)


class Rendered(NamedTuple):
    """A prompt as the model reads it."""

    text: str
    continued: str = ""
    """The words of the assistant at the end of the text, which the answer continues."""
    conversation: Conversation | None = None
    """None: no template was applied."""


def render_row(
    prompt: str | list[Message], columns: Mapping[str, Any], config: RowsConfig, tokenizer: Tokenizer,
    limits: Limits,
) -> Rendered:  # fmt: skip
    """The prompt of a row in the chat template, which opens an answer, or continues the assistant's last message.

    A key that holds null counts as missing: Arrow gives every message the keys of all messages.

    Args:
        prompt: the words of a user, or messages: dicts with a role, and with content or calls of tools.
        columns: of the row. ``tools``: JSON schemas. ``chat_template_kwargs``: variables of the template, which come
            before those of the configuration. Each may be JSON text.
        config: has the system prompt, and variables of the template.
        tokenizer: has the template.
        limits: of the template.

    Raises:
        Exception: see `Conversation.render`, or the template does not read a variable that it is given.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else without_nulls(prompt)
    conversation = conversation_of(messages, columns, config, tokenizer, limits)
    last = conversation.messages[-1]
    if conversation.is_begun and last.get("tool_calls"):
        raise ValueError("its last message calls a tool: the result of the tool must follow")
    text = conversation.render(tokenizer, limits)
    conversation.require_shown(text, tokenizer, limits)
    return Rendered(text, _end_of(text, last["content"]) if conversation.is_begun else "", conversation)


def conversation_of(
    messages: list[Message], columns: Mapping[str, Any], config: RowsConfig, tokenizer: Tokenizer, limits: Limits
) -> Conversation:
    """The messages of a row with its system prompt, tools and variables of the template, see `render_row`.

    Arguments of calls are mappings, or JSON text for a template that takes text alone, whichever of them the row has.
    An empty list of calls counts as missing: many templates ask whether there is one.

    Raises:
        ValueError: the template does not read a variable that it is given.
    """
    messages = [{key: x for key, x in message.items() if key != "tool_calls" or x} for message in messages]
    if config.system_prompt is not None and not any(message["role"] in SYSTEM for message in messages):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    tools = tools_of(columns)
    variables = config.template_kwargs | (_parsed(columns, "chat_template_kwargs", dict) or {})
    if tools or variables:
        _require_read(tokenizer, tools, variables)
    return _with_arguments(Conversation(messages, tools, variables), tokenizer, limits)


def _with_arguments(conversation: Conversation, tokenizer: Tokenizer, limits: Limits) -> Conversation:
    """The conversation with arguments of calls as the template takes them.

    Rows may have them as JSON text, as OpenAI's interface does. Most templates would write a text within JSON then, or
    fail. Some templates add texts, and fail at mappings.
    """
    if not any(message.get("tool_calls") for message in conversation.messages):
        return conversation
    for change in (_as_mapping, _as_json):
        messages = [_with_calls(message, change) for message in conversation.messages]
        changed = replace(conversation, messages=messages)
        try:
            text = changed.render(tokenizer, limits, changed.last_words)
        except (TimeoutError, MemoryError):
            raise
        except Exception:  # a template is code of the model's, and raises its own errors
            continue
        calls = [_function(call) for message in messages for call in message.get("tool_calls", ())]
        given = [call.get("arguments") for call in calls if isinstance(call, dict)]
        if not any(own and isinstance(own, dict) and str(own) in text for own in given):  # as Python writes it
            return changed
    return conversation


def _with_calls(message: Message, change: Callable[[Any], Any]) -> Message:
    """A message with changed arguments of its calls."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return call | {"function": changed(call["function"])}
        return call | {"arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return message | {"tool_calls": [*map(changed, calls)]} if calls else message


def _as_mapping(arguments: Any) -> Any:
    try:
        found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def tools_of(columns: Mapping[str, Any]) -> list[Any] | None:
    """JSON schemas of the tools that a row names. Raises ValueError for a list of other values."""
    found = _parsed(columns, "tools", list) or None  # templates of Llama 3 write of tools for an empty list, too
    if wrong := [tool for tool in found or () if not isinstance(_function(tool), dict)]:
        raise ValueError(f"its column tools must be a list of JSON schemas, got {wrong[0]!r} in it")
    return found


def _function(tool: Any) -> Any:
    """What a tool or a call has in its ``function``, which may be left out around it."""
    return tool.get("function", tool) if isinstance(tool, dict) else None


def reads(tokenizer: Tokenizer, name: str, tools: list[Any] | None) -> bool:
    """Whether the chat template reads a variable."""
    return re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template(tools=tools)) is not None


def without_nulls(value: Any) -> Any:
    """The value without the keys of dicts that hold None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(columns: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a column, which may be JSON text: Arrow cannot hold dicts of many forms in one column."""
    if (value := columns.get(name)) is None or value == "":  # as CSV has a missing one
        return None
    try:
        found = without_nulls(json.loads(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"its column {name} is a text that is not JSON: {error}") from error
    if found is not None and not isinstance(found, kind):
        raise ValueError(f"its column {name} must be a {kind.__name__}, got {value!r}: rename another column")
    return found


def _require_read(tokenizer: Tokenizer, tools: list[Any] | None, variables: Mapping[str, Any]) -> None:
    """Refuses what the template would drop without a word, and the arguments that are not the row's to set."""
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents", "kwargs"}
    if taken := sorted(own & variables.keys()):
        raise ValueError(f"{taken[0]} is no variable for chat_template_kwargs or data.template_kwargs: leave it out")
    names = [*(["tools"] if tools else []), *variables]
    if unread := [name for name in names if not reads(tokenizer, name, tools)]:
        where = {"tools": "the column tools"}.get(unread[0], "chat_template_kwargs or data.template_kwargs")
        raise ValueError(
            f"it does not read {unread[0]!r}, which {where} gives, and the model would never see it: leave it out, or "
            "take a model whose template reads it"
        )


def _end_of(text: str, content: str | list[Any]) -> str:
    """The content as it stands at the end of the text; templates may strip it."""
    words = words_of(content)
    for end in (words, words.rstrip(), words.strip()):
        if text.endswith(end):
            return end
    raise ValueError("it cannot continue the assistant's last message: its text does not end with the message's words")
