"""The forms in which families of models write calls of tools, as ``response_template`` of transformers' parser.

A form has the fields ``thinking`` (never executed), ``tool_calls`` and ``content``. Where a call is more than JSON, its
pattern requires the whole call: a call that breaks off stays in the content, where `Form.mark` finds it.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens have a wide bar.

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Form(NamedTuple):
    """A form of calls."""

    name: str
    """For messages."""
    expected: str
    """How a call is written, for a policy that has written it otherwise."""
    mark: str
    """A pattern. What it finds outside of calls is a call that cannot be read."""
    token: str
    """A text in every call. A tokenizer that has a token for it has to have sampled this token."""
    thought: tuple[str, str]
    """Begin and end of a thought."""
    template: dict[str, Any]
    """For transformers' `parse_response`."""


def _form(
    name: str, expected: str, mark: str, token: str, calls: dict[str, Any], *,
    thought: tuple[str, str] = ("<think>", "</think>"), frame: str = "(?!)",
) -> Form:  # fmt: skip
    """A form whose field ``tool_calls`` is `calls`. `frame` finds what stands around content."""
    fields = {
        "thinking": {"open": thought[0], "close": thought[1], "repeats": True},
        "tool_calls": {"repeats": True} | calls,
        "frame": {"open_pattern": frame, "close_pattern": "", "repeats": True},
        "content": {"repeats": True, "join": "", "content_args": {"strip": False}},
    }
    template = {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A", "fields": fields}
    return Form(name, expected, mark, token, thought, template)


_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEXT = {"name": "text", "args": {"strip": False}}


def _json(open_pattern: str, close: str, **args: Any) -> dict[str, Any]:
    """A name, then the arguments as JSON."""
    return {
        "open_pattern": open_pattern, "close_pattern": close, "content": "json", "content_args": args,
        "transform": _FUNCTION,
    }  # fmt: skip


def _tags(open_pattern: str, close: str, tag: str, plain: str) -> dict[str, Any]:
    """A name, then a tag for each argument. The whole call has to be there, and nothing else in it."""
    whole = rf"(?=\s*(?:(?>{plain})\s*)*+{close})"
    return {
        "open_pattern": open_pattern + whole, "close_pattern": close, "content": "xml-inline",
        "content_args": {"tag_pattern": tag, "value_parser": _TEXT}, "transform": _FUNCTION,
    }  # fmt: skip


HERMES = _form(
    "<tool_call> with JSON",
    '<tool_call>{"name": "the tool", "arguments": {"an argument": "its value"}}</tool_call>',
    r"<tool_call>", "<tool_call>",
    {
        "open": "<tool_call>", "close": "</tool_call>", "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
)  # fmt: skip

FORMS = (
    HERMES,
    _form(
        "<tool_call> with tags of Qwen 3.5 and Nemotron 3",
        "<tool_call><function=the tool><parameter=an argument>its value</parameter></function></tool_call>",
        r"<tool_call>|<function=", "<tool_call>",
        _tags(
            r"<tool_call>\s*<function=(?P<name>[^\n<>]+)>", r"</function>\s*</tool_call>",
            r"<parameter=(?P<key>[^\n<>]+)>\n?(?P<value>.*?)\n?</parameter>",
            r"<parameter=[^\n<>]+>.*?</parameter>",
        ),
    ),
    _form(
        "<tool_call> with tags of GLM",
        "<tool_call>the tool<arg_key>an argument</arg_key><arg_value>its value</arg_value></tool_call>",
        r"<tool_call>", "<tool_call>",
        _tags(
            r"<tool_call>\s*(?P<name>[^\s<>{]+)", r"</tool_call>",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            r"<arg_key>[^<]+</arg_key>\s*<arg_value>.*?</arg_value>",
        ),
    ),
    _form(
        "JSON alone, of Llama 3",
        'nothing but {"name": "the tool", "parameters": {"an argument": "its value"}}',
        r'\A\s*(?:<\|python_tag\|>)?\s*\{\s*"(?:name|function)"|<\|python_tag\|>', "",
        _json(
            r'(?:\A|(?<=<\|end_header_id\|>|</think>))\s*(?:<\|python_tag\|>)?\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*'
            r'"(?:parameters|arguments)":\s*',
            r"\}\s*(?:(?:<\|eot_id\|>|<\|eom_id\|>)\s*)?\Z",
        ),
    ),
    _form(
        "[TOOL_CALLS] with a list, of Mistral",
        '[TOOL_CALLS][{"name": "the tool", "arguments": {"an argument": "its value"}}]',
        r"\[TOOL_CALLS\]", "[TOOL_CALLS]",
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)", "close_pattern": r"</s>|\Z", "repeats": False,
            "content": "json",
        },
        thought=("[THINK]", "[/THINK]"),
    ),
    _form(
        "[TOOL_CALLS] with [ARGS], of Mistral",
        '[TOOL_CALLS]the tool[ARGS]{"an argument": "its value"}',
        r"\[TOOL_CALLS\]|\[ARGS\]", "[TOOL_CALLS]",
        _json(
            r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]\s{]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]", r"(?=\[TOOL_CALLS\])|</s>|\Z"
        ),
        thought=("[THINK]", "[/THINK]"),
    ),
    _form(
        "<|tool_call> of Gemma 4",
        '<|tool_call>call:the tool{an argument:<|"|>its value<|"|>}<tool_call|>',
        r"<\|tool_call>", "<|tool_call>",
        _json(
            r"<\|tool_call>call:(?P<name>[\w.-]+)", r"<tool_call\|>", string_delims=[['<|"|>', '<|"|>']],
            unquoted_keys=True,
        ),
        thought=("<|channel>thought", "<channel|>"),
    ),
    _form(
        "channels of gpt-oss",
        'to=functions.the tool<|channel|>commentary json<|message|>{"an argument": "its value"}<|call|>',
        r"to=functions\.", "<|message|>",
        _json(
            r"(?:<\|channel\|>commentary)?\s*to=functions\.(?P<name>[^\s<>]+)\s*"
            r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
            r"<\|call\|>|\Z",
        ),
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
        frame=r"<\|channel\|>(?:final|commentary)<\|message\|>|<\|(?:end|return)\|>|<\|start\|>assistant",
    ),
    _form(
        "<｜tool▁calls▁begin｜> of DeepSeek V3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the tool<｜tool▁sep｜>{"an argument": "its value"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        r"<｜tool▁calls?▁begin｜>", "<｜tool▁call▁begin｜>",
        _json(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^\s<>]+)<｜tool▁sep｜>(?=\s*\{)",
            r"<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        ),
    ),
    _form(
        "<｜tool▁calls▁begin｜> of DeepSeek V3 and R1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the tool\n"
        '```json\n{"an argument": "its value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        r"<｜tool▁calls?▁begin｜>", "<｜tool▁call▁begin｜>",
        _json(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<>]+)\s*```json",
            r"```\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        ),
    ),
)  # fmt: skip
"""In the order in which they are tried."""


def own_form(template: Any, tokens: Iterable[str]) -> Form | None:
    """The form of a tokenizer's ``response_template``; None where it has none, or one without calls.

    Args:
        template: the tokenizer's, see transformers' `parse_response`.
        tokens: that were added to the vocabulary.
    """
    given = template.get("fields") if isinstance(template, dict) else None
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    calls = fields.get("tool_calls")
    if not isinstance(calls, dict) or (opens := _pattern(calls, "open")) is None:
        return None
    thinking = next((fields[name] for name in THINKING if name in fields), None)
    ends = None if thinking is None else _pattern(thinking, "close")
    thoughts = [form.thought for form in FORMS if ends is None or re.fullmatch(ends, form.thought[1])]
    if not thoughts:
        return None
    token = max((own for own in tokens if re.escape(own) in opens), key=len, default="")
    # A reply is read alone, without the prompt, at whose end the anchor would be.
    anchored = {name: value for name, value in template.items() if not name.startswith("start_anchor")}
    return Form(
        "the tokenizer's response_template", "a call as the chat template writes it", re.escape(token) or opens, token,
        thoughts[0], anchored | {"start_anchor_pattern": r"\A"},
    )  # fmt: skip


THINKING = ("thinking", "reasoning_content", "reasoning")
"""Names that templates give to the field of thoughts."""


def _pattern(field: Mapping[str, Any], side: str) -> str | None:
    """The pattern of a field's ``open`` or ``close``."""
    return re.escape(field[side]) if side in field else field.get(f"{side}_pattern")
