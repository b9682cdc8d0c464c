"""Conversations as the model reads them: plain transformers' chat template, with tools and options."""

import inspect
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rlft_fast.config import DataConfig

_TEMPLATE_SECONDS = 1.5  # of CPU time for one conversation; templates take milliseconds

_SYSTEM = ("system", "developer")  # roles whose messages come from the developer

Message = dict[str, Any]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


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

    def split(self, answer: str) -> tuple[list[Message], Message]:
        """The messages before an answer, and the answer as a message.

        Args:
            answer: a whole answer, with the words that it continues.
        """
        if self.is_begun:
            return self.messages[:-1], self.messages[-1] | {"content": answer}
        return self.messages, {"role": "assistant", "content": answer}

    def render(self, tokenizer: Tokenizer, answer: str | None = None) -> str:
        """The conversation as a model with this tokenizer reads it.

        Args:
            tokenizer: has the template.
            answer: a whole answer; None: the text ends where an answer begins, or goes on.

        Raises:
            Exception: the template fails, refuses the conversation, or takes too long. A template is code of the
                model's and may raise any error.
        """
        messages, begun = self.messages, answer is None and self.is_begun
        if answer is not None:
            asked, message = self.split(answer)
            messages = [*asked, message]
        with _at_most(_TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=answer is None and not begun,
                continue_final_message=begun, **self.variables,
            )  # fmt: skip


class Rendered(NamedTuple):
    """A prompt as the model reads it."""

    text: str
    continued: str = ""
    """The words of the assistant at the end of the text, which the answer continues."""
    conversation: Conversation | None = None
    """None: no template was applied."""


def render_row(
    prompt: str | list[Message], columns: Mapping[str, Any], config: DataConfig, tokenizer: Tokenizer
) -> Rendered:
    """The prompt of a row in the chat template, which opens an answer, or continues the assistant's last message.

    A key that holds null counts as missing: Arrow gives every message the keys of all messages.

    Args:
        prompt: the words of a user, or messages: dicts with a role, and with content or calls of tools.
        columns: of the row. ``tools``: JSON schemas. ``chat_template_kwargs``: variables of the template, which come
            before those of the configuration. Each may be JSON text.
        config: has the system prompt, and variables of the template.
        tokenizer: has the template.

    Raises:
        Exception: see `Conversation.render`, or the template does not read a variable that it is given.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else without_nulls(prompt)
    if config.system_prompt is not None and not any(message["role"] in _SYSTEM for message in messages):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    tools = _parsed(columns, "tools", list) or None  # templates of Llama 3 write of tools for an empty list, too
    variables = config.template_kwargs | (_parsed(columns, "chat_template_kwargs", dict) or {})
    if tools or variables:
        _require_read(tokenizer, tools, variables)
    conversation, last = Conversation(messages, tools, variables), messages[-1]
    if conversation.is_begun and last.get("tool_calls"):
        raise ValueError("its last message calls a tool: the result of the tool must follow")
    text = conversation.render(tokenizer)
    return Rendered(text, _end_of(text, last["content"]) if conversation.is_begun else "", conversation)


def without_nulls(value: Any) -> Any:
    """The value without the keys of dicts that hold None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(columns: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a column, which may be JSON text: Arrow cannot hold dicts of many forms in one column."""
    value = columns.get(name)
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
    template = tokenizer.get_chat_template(tools=tools)
    names = [*(["tools"] if tools else []), *variables]
    if unread := [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]:
        where = {"tools": "the column tools"}.get(unread[0], "chat_template_kwargs or data.template_kwargs")
        raise ValueError(
            f"it does not read {unread[0]!r}, which {where} gives, and the model would never see it: leave it out, or "
            "take a model whose template reads it"
        )


def _end_of(text: str, content: str | list[Any]) -> str:
    """The content as it stands at the end of the text; templates may strip it."""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    words = "".join(parts)
    for end in (words, words.rstrip(), words.strip()):
        if text.endswith(end):
            return end
    raise ValueError("it cannot continue the assistant's last message: its text does not end with the message's words")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError once the main thread has computed for `seconds`.

    In another thread nothing is limited, because Python handles signals in the main thread alone. One long call of C
    code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def stop(number: int, frame: Any) -> None:
        if time.thread_time() - started > seconds:  # the timer counts all threads
            raise TimeoutError(f"it takes more than {seconds} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)  # again, if an error is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
