"""Calls of tools are read in the form in which the chat template of a family writes them."""

# ruff: noqa: RUF001 - DeepSeek's tokens have a wide bar.

from pathlib import Path

import pytest
import trl
import trl.chat_template_utils
from transformers.utils import get_json_schema

from rlft_fast.trainer.episodes.calls import Parsed, parse, text_of
from rlft_fast.trainer.episodes.forms import FORMS, HERMES
from rlft_fast.trainer.episodes.styles import PlainStyle
from rlft_fast.trainer.episodes.suffix import choose_suffixes
from rlft_fast.trainer.prompts import Conversation
from tests.support.tiny_models import chat_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# In the form of Mistral's and DeepSeek's templates, of which no package has one with tools.
MISTRAL = """{%- for m in messages %}{% if m.role == 'user' %}
{%- if loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
NEWER_MISTRAL = """{%- for m in messages %}{% if m.role == 'user' %}
{%- if loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]
{{- c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"""
DEEPSEEK = """{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ '' + c.function.arguments }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"""
OWN = {"mistral": MISTRAL, "newer_mistral": NEWER_MISTRAL, "deepseek": DEEPSEEK}

XML = "<tool_call>\n<function=add>\n<parameter=item>\n7\n</parameter>\n<parameter=count>\n2\n</parameter>\n</function>"
# A call of add(item="7", count=2) as the family's models write it, their end tokens, and what stands around a result.
FAMILIES = {
    "qwen3": (
        '<tool_call>\n{"name": "add", "arguments": {"item": "7", "count": 2}}\n</tool_call>', ("<|im_end|>",),
        "\n<|im_start|>user\n<tool_response>\nRESULT\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_6": (
        f"{XML}\n</tool_call>", ("<|im_end|>",),
        "\n<|im_start|>user\n<tool_response>\nRESULT\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "glm4moe": (
        "<tool_call>add\n<arg_key>item</arg_key>\n<arg_value>7</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>", ("<|observation|>", "<|user|>"),
        "\n<tool_response>\nRESULT\n</tool_response><|assistant|>",
    ),
    "llama3_2": (
        '{"name": "add", "parameters": {"item": "7", "count": 2}}', ("<|eot_id|>",),
        '<|start_header_id|>ipython<|end_header_id|>\n\n"RESULT"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma4": (
        '<|tool_call>call:add{item:<|"|>7<|"|>,count:2}<tool_call|>', ("<turn|>", "<|tool_response>"),
        'response:add{value:<|"|>RESULT<|"|>}<tool_response|>',
    ),
    "gptoss": (
        ' to=functions.add<|channel|>commentary json<|message|>{"item": "7", "count": 2}', ("<|call|>", "<|return|>"),
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"RESULT"<|end|><|start|>assistant',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"item": "7", "count": 2}, "id": "abcdef123"}]', ("</s>",),
        '[TOOL_RESULTS]{"content": "RESULT", "call_id": "abcdef123"}',
    ),
    "newer_mistral": (
        '[TOOL_CALLS]add[ARGS]{"item": "7", "count": 2}', ("</s>",), "[TOOL_RESULTS]RESULT[/TOOL_RESULTS]",
    ),
    "deepseek": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"item": "7", "count": 2}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>", ("<｜end▁of▁sentence｜>",),
        "<｜tool▁output▁begin｜>RESULT<｜tool▁output▁end｜>",
    ),
}  # fmt: skip
ONE_CALL = ("llama3_2", "gptoss")  # families that make one call per reply


def add(item: str, count: int = 1) -> None:
    """Puts an item into the basket.

    Args:
        item: name of the item
        count: how many
    """


TOOLS = [get_json_schema(add)]
CALL = {"name": "add", "arguments": {"item": "7", "count": 2}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    ends = sorted({end for _, own, _ in FAMILIES.values() for end in own})
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), [*ends, "<tool_call>"])


def suffixes_of(tokenizer, family):
    tokenizer.chat_template = OWN.get(family) or (TEMPLATES / f"{family}.jinja").read_text()
    return choose_suffixes(tokenizer, TOOLS, tokenizer.convert_tokens_to_ids([*FAMILIES[family][1]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_calls_in_its_own_form(tokenizer, family):
    call, _, expected = FAMILIES[family]
    suffixes = suffixes_of(tokenizer, family)
    form = suffixes.style.form
    read = parse(call, form, TOOLS)
    assert [{key: found[key] for key in CALL} for found in read.calls] == [CALL]  # "7" is a text, 2 a number
    assert read.content == ""
    asked = suffixes.style.with_tools(Conversation([{"role": "user", "content": "Buy."}]))
    given = suffixes.after_reply(asked, read, [{"role": "tool", "content": "RESULT"}], ended=True)
    assert tokenizer.decode(given.token_ids) == expected
    assert given.opens_thought == expected.endswith("<think>\n")
    assert "name of the item" in asked.render(tokenizer, suffixes.limits)

    thought = f"{form.thought[0]}Perhaps {call}"
    assert not parse(thought, form, TOOLS).calls
    assert not parse(call, form, TOOLS, is_thinking=True).calls
    assert parse(f"{thought}{form.thought[1]}{call}", form, TOOLS).calls == read.calls
    if family not in ONE_CALL:
        assert len(parse(call + call, form, TOOLS).calls) == (2 if family != "mistral" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_cannot_be_read_is_a_mistake(tokenizer, family):
    """No call that breaks off is made, wherever it breaks off, and the policy is told how a call is written."""
    form = suffixes_of(tokenizer, family).style.form
    call = FAMILIES[family][0]
    closed = {call[:cut] for cut in range(len(call)) if parse(call[:cut], form, TOOLS).calls}
    assert all(parse(start, form, TOOLS).calls == parse(call, form, TOOLS).calls for start in closed)
    broken = parse(call[: call.index("7")], form, TOOLS)
    assert not broken.calls
    assert f"expected {form.expected}, got" in broken.mistake


def test_letters_are_no_call_where_the_tokenizer_has_a_token(tokenizer):
    call = FAMILIES["qwen3"][0]
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "".join(call.split())]
    as_token = tokenizer.encode(call, add_special_tokens=False)
    assert parse(text_of(tokenizer, as_token, HERMES), HERMES).calls == [CALL]
    spelled = text_of(tokenizer, letters, HERMES)
    assert parse(spelled, HERMES) == Parsed(spelled, [])
    assert spelled.startswith("< tool_call>")


@pytest.mark.parametrize(
    ("family", "call", "end", "is_own"),
    [
        # No family here has this form, so its template is taken although it reads a part of a call as a call.
        ("lfm2_2_5", "<|tool_call_start|>[add(item='7', count=2)]<|tool_call_end|>", "<|im_end|>", True),
        ("qwen3", FAMILIES["qwen3"][0], "<|im_end|>", True),
        # A template reads a call that lacks a tag, or one in a thought without a line break, or needs the end token.
        ("qwen3_6", FAMILIES["qwen3_6"][0], "<|im_end|>", False),
        ("gemma4", FAMILIES["gemma4"][0], "<turn|>", False),
        ("llama3_2", FAMILIES["llama3_2"][0], "<|eot_id|>", False),
    ],
)
def test_a_tokenizer_says_how_it_calls(family, call, end, is_own, tokenizer):
    """By the response templates that TRL gives tokenizers: the tokenizer's own comes first, unless it is careless."""
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    name = {"qwen3_6": "qwen3_5", "llama3_2": "llama3"}.get(family, family)
    tokenizer.response_template = getattr(trl.chat_template_utils, f"{name}_template")
    try:
        style = choose_suffixes(tokenizer, TOOLS, tokenizer.convert_tokens_to_ids([end])).style
    finally:
        tokenizer.response_template = None
    assert (style.form not in FORMS) == is_own
    read = parse(call, style.form, TOOLS)
    assert [{key: found[key] for key in CALL} for found in read.calls] == [CALL]
    thought = f"{style.form.thought[0]}Perhaps {call}"
    assert not parse(thought, style.form, TOOLS).calls
    assert parse(f"{thought}{style.form.thought[1]}{call}", style.form, TOOLS).calls == read.calls
    assert parse(call[: call.index("7")], style.form, TOOLS).mistake or family == "lfm2_2_5"


def test_the_last_style_is_for_every_template(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "deepseekv3.jinja").read_text()  # a second result stands otherwise there
    style = choose_suffixes(tokenizer, TOOLS, tokenizer.convert_tokens_to_ids(["<｜end▁of▁sentence｜>"])).style
    assert isinstance(style, PlainStyle)
