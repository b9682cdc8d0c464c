"""Messages: what they may hold, and the form in which a chat template takes them."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rlft_fast.errors import brief

Message = dict[str, Any]
Template = Callable[[list[Message]], str]
"""Makes the text of messages."""

_PLAIN = {"role", "content"}
_UNREAD = {  # keys of OpenAI's interface whose words no template reads, and what to do
    "function_call": "write it as tool_calls, and its result as a message of the role 'tool'",
    "refusal": "write it as the content",
}
_RESULTS = ("tool", "ipython")  # roles whose content some templates write as JSON
_MARK = "marked"  # stands for the words of a part; a plain word, which templates leave as it is
_SHOWN = 200  # characters of a value in a message
_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


def is_plain(message: Any) -> bool:
    """Whether a message has a role and a text with words, and nothing else, as most messages have."""
    if not isinstance(message, dict) or message.keys() != _PLAIN:
        return False
    role, content = message["role"], message["content"]
    return isinstance(role, str) and isinstance(content, str) and bool(role.strip() and content.strip())


def are_written(value: Any) -> bool:
    """Whether a value is a text that looks like messages in JSON or in Python: CSV holds texts alone."""
    return isinstance(value, str) and _WRITTEN.match(value) is not None


def find_mistake(messages: list[Message]) -> str | None:
    """What is wrong with the messages of a row, or None. A key that holds None counts as missing.

    A content is a text, or a list of parts of which those with texts are ``{"type": "text", "text": ...}``. The result
    of a tool may be any list or mapping, because there are templates that write it as JSON.
    """
    for i, message in enumerate(messages):
        role, calls = message.get("role"), message.get("tool_calls")
        if not isinstance(role, str) or not role.strip():
            return f"message {i} has the role {_short(role)}, expected a text such as 'user'"
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            return f"message {i} has the tool_calls {_short(calls)}, expected a list of mappings"
        if unread := [key for key in _UNREAD if message.get(key)]:
            return f"message {i} has a {unread[0]}, which the model would never see: {_UNREAD[unread[0]]}"
        if (found := _mistake_in(message.get("content"), role, bool(calls))) is not None:
            return f"message {i} has the content {found}"
    return None


def _mistake_in(content: Any, role: str, has_calls: bool) -> str | None:
    if isinstance(content, str) and content.strip():
        return None
    if content is None:
        return None if has_calls else "null, expected a text"
    if isinstance(content, (list, dict)) and role in _RESULTS:
        return None
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts or not all(map(_is_part, parts)):
        return f"{_short(content)}, expected a text, or a list of parts such as {{'type': 'text', 'text': '...'}}"
    if role == "user" and not any(part.get("text", "x").strip() for part in parts):
        return f"{_short(content)}, which has no words: leave the row out"
    return None


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return isinstance(part.get("text"), str) if kind in (None, "text") else isinstance(kind, str)


def _short(value: Any) -> str:
    return brief(repr(value), _SHOWN)


def words_of(content: str | list[Message]) -> str:
    """The texts of a content's parts, one after another."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_words(content: str | list[Message], before: str = "", after: str = "") -> str | list[Message]:
    """A content with words before and behind it: a text, or parts where images stand among them."""
    if isinstance(content, str) or all("text" in part for part in content):
        return f"{before}{words_of(content)}{after}"
    parts = [*content]
    if before:
        parts = [{"type": "text", "text": before}, *parts]
    if after and "text" in parts[-1]:
        return [*parts[:-1], parts[-1] | {"text": parts[-1]["text"] + after}]
    return [*parts, {"type": "text", "text": after}] if after else parts


def render(template: Template, messages: list[Message]) -> str:
    """The text of messages, in the form that the template takes.

    A template that reads texts alone gets the parts of a content joined, and a template that reads parts alone gets a
    text as a part. Marks in place of the words tell: a template shows them, drops them, or writes a list as a literal.

    Args:
        template: makes the text of messages.
        messages: without mistakes, see `find_mistake`.

    Raises:
        ValueError: the template takes the contents in no form.
        Exception: the template fails.
    """
    contents = [message.get("content") for message in messages]
    failure = None
    if not any(isinstance(content, (list, dict)) for content in contents):
        try:
            text = template(messages)
            if (contents[-1] or "").strip() in text:
                return text
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:  # a template is code of the model's: it may read the parts of a text
            failure = error
    marked = [_changed(message, _marked) for message in messages]
    shown = {form: _num_shown(template, [_changed(message, form) for message in marked]) for form in _FORMS}
    best = max(_FORMS, key=lambda form: shown[form])  # the first of equals
    if shown[best] == _FAILS and failure is not None:
        raise failure
    if shown[best] == _AS_LITERAL:
        i, content = next((i, x) for i, x in enumerate(contents) if isinstance(x, (list, dict)))
        raise ValueError(f"it writes the content {_short(content)} of message {i} as a literal: give a text")
    return template([_changed(message, best) for message in messages])


_FAILS, _AS_LITERAL = -2, -1


def _num_shown(template: Template, marked: list[Message]) -> int:
    """How many marks the template shows, `_FAILS`, or `_AS_LITERAL` if it writes a list or mapping as it is."""
    try:
        text = template(marked)
    except (TimeoutError, MemoryError):
        raise
    except Exception:
        return _FAILS
    return _AS_LITERAL if any(literal in text for x in marked for literal in _literals(x)) else text.count(_MARK)


def _literals(message: Message) -> Iterator[str]:
    """How Python writes the content or its parts, and JSON, which templates write on purpose for results of tools."""
    content = message.get("content")
    for value in (content, *(content if isinstance(content, list) else ())):
        if isinstance(value, (list, dict)):
            in_python, in_json = str(value), json.dumps(value)
            is_result = message["role"] in _RESULTS
            yield from {in_python} - {in_json} if is_result else {in_python, in_json}


def _changed(message: Message, change: Callable[[Any], Any]) -> Message:
    content = message.get("content")
    return message | {"content": change(content)} if isinstance(content, (str, list)) else message


def _marked(content: str | list[Any]) -> str | list[Any]:
    if isinstance(content, str):
        return _MARK if content.strip() else content
    return [part | {"text": _MARK} if isinstance(part, dict) and "text" in part else part for part in content]


def _as_it_is(content: str | list[Any]) -> str | list[Any]:
    return content


def _as_text(content: str | list[Any]) -> str | list[Any]:
    parts = content if isinstance(content, list) else []
    are_texts = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    return words_of(parts) if parts and are_texts else content


def _as_parts(content: str | list[Any]) -> str | list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_FORMS = (_as_it_is, _as_text, _as_parts)
