"""Conversations become the text and the tokens that plain transformers makes of them."""

import json
import re
import resource
import signal
import time
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import Prompts, limits, load_prompts
from tests.trainer.toy import write_rows

STORED = Path(trl.__file__).parent / "chat_templates"  # templates of well-known models
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
CALLS = "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
USER = {"role": "user", "content": "2 + 2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
OTHER_CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": "2"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.fixture
def tokenizer(tiny_model) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model("llama"))


def load(folder, tokenizer, template: str, *rows, arrow: bool = False, **options) -> Prompts:
    """The prompts of rows; a template is the name of a stored file, or its text."""
    stored = STORED / f"{template}.jinja"
    tokenizer.chat_template = stored.read_text() if stored.name.isidentifier() or stored.is_file() else template
    if arrow:
        Dataset.from_list([*rows]).save_to_disk(folder / "data")
    else:
        write_rows(folder / "data", [*rows])
    return load_prompts(DataConfig(path=str(folder / "data"), **options), tokenizer, 2000)


# ---- null is missing ------------------------------------------------------------------------------------------------

RESULT = {"role": "tool", "content": "4", "name": "add"}
ASKING = [{"prompt": [USER, {"role": "assistant", "tool_calls": [call]}, RESULT]} for call in (CALL, OTHER_CALL)]


# The first asks whether keys are there; the second writes whatever keys there are.
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% if 'tool_calls' in m %} calls{% endif %}"
        "{% if m.name is defined %} {{ m.name }}{% endif %};{% endfor %}",
        "{{ messages | tojson }}",
        "qwen3",
        "gptoss",
    ],
)
def test_a_dataset_folder_gives_the_text_of_json_lines(template, tmp_path, tokenizer):
    (tmp_path / "arrow").mkdir()
    from_lines = load(tmp_path, tokenizer, template, *ASKING)
    from_arrow = load(tmp_path / "arrow", tokenizer, template, *ASKING, arrow=True)
    plain = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in ASKING]
    assert from_lines.texts == plain
    assert from_arrow.texts == plain
    assert from_arrow.token_ids == from_lines.token_ids


def test_keys_of_tools_and_parts_that_hold_null_are_missing_too(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "hi"}, {"text": "you", "cache": 1}]
    tools = [TOOL, {"type": "function", "function": {"name": "now", "description": "the time"}}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "tools": tools}]
    rows += [{"prompt": [{"role": "user", "content": parts[:1]}], "tools": None}]
    (tmp_path / "arrow").mkdir()
    template = "{{ messages | tojson }}{{ tools | tojson }}"
    texts = load(tmp_path / "arrow", tokenizer, template, *rows, arrow=True).texts
    assert texts == load(tmp_path, tokenizer, template, *rows).texts
    assert [text.count("null") for text in texts] == [0, 1]  # the second row has no tools


# llama3_2 and gptoss look for the call of such a message, and deepseekv3 writes the end of calls in place of its words.
@pytest.mark.parametrize("template", ["llama3_2", "gptoss", "deepseekv3", "qwen2_5"])
def test_an_empty_list_of_calls_is_missing(template, tmp_path, tokenizer):
    messages = [USER, {"role": "assistant", "content": "4"}, USER]
    rows = [{"prompt": [message | more for message in messages]} for more in ({}, {"tool_calls": []})]
    plain, listed = load(tmp_path, tokenizer, template, *rows).texts
    assert listed == plain == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def with_arguments(*given) -> list[dict]:
    """Rows with a call, with these arguments."""
    calls = [CALL | {"function": {"name": "add", "arguments": arguments}} for arguments in given]
    return [{"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]} for call in calls]


# The first three write a text of JSON as a text within JSON, gemma4 in braces of its own; the others fail at a text.
# ECHO writes what it gets, as Python does, and deepseekv3 fails at a mapping: they get texts.
@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("qwen2_5", '"arguments": {"a": 2, "b": "é"}}'),
        ("llama3_2", '"parameters": {"a": 2, "b": "é"}}'),
        ("gptoss", '{"a": 2, "b": "é"}<|call|>'),
        ("gemma4_v3", 'call:add{a:2,b:<|"|>é<|"|>}'),
        ("gemma4_v5", 'call:add{a:2,b:<|"|>é<|"|>}'),
        ("glm4moe", "<arg_key>a</arg_key>\n<arg_value>2</arg_value>"),
        ("qwen3_5_think", "<parameter=a>\n2\n</parameter>"),
        ("deepseekv3", '```json\n{"a": 2, "b": "é"}\n```'),
        (ECHO.replace(";", f"{CALLS};", 1), 'assistant:{"a": 2, "b": "é"};'),
    ],
)
def test_arguments_of_calls_may_be_mappings_or_texts(template, written, tmp_path, tokenizer):
    arguments = {"a": 2, "b": "é"}
    rows = with_arguments(arguments, json.dumps(arguments, ensure_ascii=False))
    from_mapping, from_text = load(tmp_path, tokenizer, template, *rows).texts
    assert written in from_mapping
    assert from_text == from_mapping


def test_a_text_that_is_no_mapping_stays(tmp_path, tokenizer):
    texts = load(tmp_path, tokenizer, "qwen3", *with_arguments("2 + 2", "[2]", "")).texts
    found = [re.search('"arguments": (.*)}\n</tool_call>', text)[1] for text in texts]
    assert found == ["2 + 2", "[2]", "{}"]


# ---- what a message may hold ----------------------------------------------------------------------------------------


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


# A template would write all of these as Python does, or drop them.
@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        *(({"content": x}, f"message 1 has the content {x}, expected a text, or a list of") for x in (5, 0.5, True)),
        ({"content": {"text": "hi"}}, "message 1 has the content {'text': 'hi'}, expected a text, or a list of"),
        ({"content": ["hi"]}, "message 1 has the content ['hi'], expected a text, or a list of parts"),
        ({"content": [parts("hi")]}, "message 1 has the content [[{'type': 'text', 'text': 'hi'}]], expected a text"),
        ({"content": [{"type": "text", "text": 5}]}, "message 1 has the content [{'type': 'text', 'text': 5}], expect"),
        ({"content": [{"type": "text", "text": None}]}, "message 1 has the content [{'type': 'text'}], expected a"),
        ({"content": None}, "message 1 has the content null, expected a text"),
        ({"content": []}, "message 1 has the content [], expected a text"),
        ({"content": " "}, "message 1 has the content ' ', which has no words: leave the row out"),
        ({"content": parts("")}, "message 1 has the content [{'type': 'text', 'text': ''}], which has no words"),
        ({"content": 9999 * "a", "role": None}, "message 1 has the role None, expected a text such as 'user'"),
        *(({"content": "hi", "role": role}, f"message 1 has the role {role!r}, expected a text") for role in (5, "")),
        (
            {"content": None, "role": "assistant", "function_call": {"name": "add"}},
            "message 1 has a function_call, which the model would never see: write it as tool_calls",
        ),
        ({"content": "", "role": "assistant", "refusal": "No."}, "message 1 has a refusal, which the model would"),
        ({"tool_calls": "add", "role": "assistant"}, "message 1 has the tool_calls 'add', expected a list of mappings"),
        ({"content": 4, "role": "tool"}, "message 1 has the content 4, expected a text"),
        ({"content": 10**6 * [5]}, "message 1 has the content [5, 5, "),
    ],
)
def test_messages_that_no_template_can_be_given(message, mistake, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"rows 1 \(counted from 0\) have messages in their 'prompt'") as error:
        load(tmp_path, tokenizer, ECHO, {"prompt": [USER]}, {"prompt": [USER, {"role": "user"} | message]})
    assert str(error.value).startswith(str(tmp_path / "data"))
    assert f"of row 1, {mistake}" in str(error.value)
    assert len(str(error.value)) < 600


# qwen2_5 adds texts, qwen3 drops lists, lfm2 writes JSON, gemma strips, and ECHO writes what it gets.
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "lfm2", "gemma", "phi3", "llama3_1", ECHO])
def test_parts_are_joined_for_a_template_of_texts(template, tmp_path, tokenizer):
    chats = [[USER, {"role": "assistant", "content": content}, USER | {"content": content}] for content in
             (parts("2 + ", "2"), "2 + 2")]  # fmt: skip
    (text,) = load(tmp_path, tokenizer, template, {"prompt": chats[0]}).texts
    assert text == tokenizer.apply_chat_template(chats[1], tokenize=False, add_generation_prompt=True)
    assert text.count("2 + 2") == 3


# gemma3 strips each part. The others write texts, too, but for smolvlm and llava_next, which drop a text.
@pytest.mark.parametrize("template", ["gemma3", "qwen2_5_vl", "glm4moe", "smolvlm", "llava_next"])
def test_a_template_that_reads_parts_gets_them(template, tmp_path, tokenizer):
    chats = [[USER | {"content": parts("2 +", " 2")}], [USER | {"content": parts(USER["content"])}]]
    prompts = load(tmp_path, tokenizer, template, {"prompt": chats[0]}, {"prompt": [USER]}, {"prompt": "2 + 2?"})
    plain = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    assert prompts.texts == [plain[0], plain[1], plain[1]]
    assert all(found in text for found, text in zip(["2 +", "2 + 2?"], plain, strict=True))


# llama3_1 writes results of tools as JSON, ECHO as Python does.
def test_results_of_tools_may_be_mappings(tmp_path, tokenizer):
    row = {"prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT | {"content": {"sum": "4"}}]}
    assert '\n\n{"sum": "4"}<|eot_id|>' in load(tmp_path, tokenizer, "llama3_1", row).texts[0]
    with pytest.raises(ValueError, match=r"it writes the content {'sum': '4'} of message 2 as a literal: give a text"):
        load(tmp_path, tokenizer, ECHO, row)


# Most write messages of roles that they know, and nothing of others. gptoss has one message of the developer's alone.
@pytest.mark.parametrize(
    ("template", "messages", "dropped"),
    [
        ("qwen2_5", [{"role": "developer", "content": "be brief"}, USER], "0, of the role 'developer'"),
        ("qwen3", [USER | {"role": "human"}], "0, of the role 'human'"),
        ("glm4moe", [USER, {"role": "gpt", "content": "4"}, USER], "1, of the role 'gpt'"),
        ("phi3", [USER, {"role": "assistant", "content": "?"}, RESULT | {"content": "7"}], "2, of the role 'tool'"),
        ("gptoss", [USER | {"role": "system"}, {"role": "system", "content": "be brief"}, USER], "1, of the role 'sys"),
    ],
)
def test_messages_that_a_template_drops(template, messages, dropped, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"cannot be applied to row 1 \(counted from 0\): ") as error:
        load(tmp_path, tokenizer, template, {"prompt": [USER]}, {"prompt": messages})
    assert f"the chat template does not show message {dropped}" in str(error.value)


# gptoss writes results as JSON, qwen3 leaves thoughts out, gemma puts the system's words into the user's message, and
# the last one takes words out that it obeys.
@pytest.mark.parametrize(
    ("template", "first"),
    [
        ("gptoss", [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT | {"content": 'a "b"\nc'}]),
        ("qwen3", [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}]),
        ("gemma3", [{"role": "system", "content": " be brief\n"}]),
        (ECHO.replace("m.content", "m.content | replace('/no', '')"), [{"role": "system", "content": "/no"}]),
    ],
)
def test_messages_whose_words_a_template_changes_are_shown(template, first, tmp_path, tokenizer):
    (text,) = load(tmp_path, tokenizer, template, {"prompt": [*first, USER]}).texts
    assert text == tokenizer.apply_chat_template([*first, USER], tokenize=False, add_generation_prompt=True)


# ---- what a template may take ---------------------------------------------------------------------------------------


# The first two are single operations.
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% set n = messages | length + 8 %}{{ n ** (n ** n) }}", "it takes more than 0.3 seconds of CPU time"),
        ("{{ ('a' * 10 ** 10) | length }}", "it takes more than 2 GiB of memory"),
        ("{{ raise_exception('x' * 10000000) }}", r"xxx \.\.\. xxx"),
    ],
)
def test_a_template_without_end(template, message, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ValueError, match=r"cannot be applied to row 0 \(counted from 0\): ") as error:
        load(tmp_path, tokenizer, template, {"prompt": "hi"})
    assert re.search(message, str(error.value))
    assert len(str(error.value)) < 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_time_of_all_conversations_is_limited(tmp_path, tokenizer, monkeypatch):
    slow = "{% for i in range(200) %}{% for j in range(999) %}{% endfor %}{% endfor %}hi"  # well below 1.5 s each
    monkeypatch.setattr(limits, "_FREE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "_MEAN_SECONDS", 0.001)
    with pytest.raises(ValueError, match=r"row \d+ .*: it has taken .* of CPU time for \d+ conv.* may take 1 ms for"):
        load(tmp_path, tokenizer, slow, *[{"prompt": "hi"}] * 500)
    monkeypatch.setattr(limits, "_FREE_SECONDS", 100.0)
    assert len(load(tmp_path, tokenizer, slow, *[{"prompt": "hi"}] * 9)) == 9


def test_conversations_with_one_timer_are_limited_one_by_one(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    found, other = limits.Limits(), limits.Limits()

    def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    before, memory = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)
    with found.many():
        for _ in range(3):
            with found.one():
                with found.one():
                    compute(0.05)
                assert resource.getrlimit(resource.RLIMIT_AS) != memory
            assert resource.getrlimit(resource.RLIMIT_AS) == memory
        compute(0.15)  # between conversations
        with other.one():  # has a timer of its own
            pass
        with pytest.raises(TimeoutError, match="it takes more than"), found.one():
            compute(10)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


# ---- the assistant's last message -----------------------------------------------------------------------------------


# llama3_1 strips what a message holds, qwen3 puts an empty thought before it.
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1", "gemma3"])
@pytest.mark.parametrize("words", ["The sum is ", "The"])
def test_the_last_message_of_the_assistant_is_continued(template, words, tmp_path, tokenizer):
    messages = [USER, {"role": "assistant", "content": words}]
    prompts = load(tmp_path, tokenizer, template, {"prompt": [USER]}, {"prompt": messages})
    plain = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert prompts.texts[1] == plain
    assert prompts.token_ids[1] == tokenizer.encode(plain, add_special_tokens=False)
    assert plain.endswith((words, words.strip()))
    asked, answers = prompts.answered(["4", "4"])
    assert asked[0] == prompts.texts[0]
    assert [asked[1] + answers[1], answers[0]] == [plain + "4", "4"]
    assert answers[1] in (words + "4", words.strip() + "4")


def test_words_in_several_parts_are_continued(tmp_path, tokenizer):
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "sum"}]
    prompts = load(tmp_path, tokenizer, template, {"prompt": [{"role": "assistant", "content": parts}]})
    assert (prompts.texts, prompts.continued) == (["The sum"], {0: "The sum"})
    assert prompts.select([0, 0]).answered(["", " is"]) == (["", ""], ["The sum", "The sum is"])


@pytest.mark.parametrize(
    ("template", "last", "message"),
    [
        ("qwen2_5", {"content": "", "tool_calls": [CALL]}, "its last message calls a tool: the result of the tool"),
        (ECHO.replace("m.content", "m.content | upper"), {"content": "ab"}, "the final message does not appear in"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(template, last, message, tmp_path, tokenizer):
    row = {"prompt": [USER, {"role": "assistant"} | last]}
    with pytest.raises(ValueError, match=r"cannot be applied to row 0 \(counted from 0\): ") as error:
        load(tmp_path, tokenizer, template, row)
    assert message in str(error.value)
    assert "data.chat: false" not in str(error.value)


# ---- system messages, tools and variables ---------------------------------------------------------------------------


def test_a_system_prompt_is_put_before_conversations_that_have_none(tmp_path, tokenizer):
    own = {"role": "developer", "content": "own"}
    rows = [{"prompt": "2 + 2?"}, {"prompt": [USER]}, {"prompt": [own, USER]}]
    prompts = load(tmp_path, tokenizer, ECHO, *rows, system_prompt="be brief")
    with_system = "system:be brief;user:2 + 2?;a:"
    assert prompts.texts == [with_system, with_system, "developer:own;user:2 + 2?;a:"]


# As a list, and as JSON text, as data sets have it whose tools differ from row to row.
@pytest.mark.parametrize("written", [lambda value: value, json.dumps])
def test_tools_and_variables_of_a_row(written, tmp_path, tokenizer):
    rows = [
        {"prompt": "2 + 2?", "tools": written([TOOL]), "chat_template_kwargs": written({"enable_thinking": True})},
        {"prompt": [USER], "tools": written([]), "chat_template_kwargs": None},
        {"prompt": [USER], "tools": "", "chat_template_kwargs": ""},  # as CSV has missing ones
    ]
    prompts = load(tmp_path, tokenizer, "qwen3", *rows, template_kwargs={"enable_thinking": False})
    options = {"tokenize": False, "add_generation_prompt": True}
    with_tools = tokenizer.apply_chat_template([USER], tools=[TOOL], enable_thinking=True, **options)
    without = tokenizer.apply_chat_template([USER], enable_thinking=False, **options)
    assert prompts.texts == [with_tools, without, without]
    assert ("add" in with_tools, without.endswith("</think>\n\n"), with_tools.endswith("assistant\n")) == (True,) * 3
    assert prompts.columns["tools"] == [written([TOOL]), written([]), ""]  # a reward function may read them


@pytest.mark.parametrize(
    ("template", "columns", "options", "message"),
    [
        (ECHO, {"tools": [TOOL]}, {}, "it does not read 'tools', which the column tools gives, and the model would"),
        (ECHO + "{{ xml_tools }}", {"tools": [TOOL]}, {}, "it does not read 'tools'"),
        ("qwen3", {}, {"enable_thinkin": False}, "it does not read 'enable_thinkin', which chat_template_kwargs or"),
        ("qwen2_5", {"chat_template_kwargs": {"enable_thinking": False}}, {}, "it does not read 'enable_thinking'"),
        (ECHO, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, {}, "chat_template is no variable for"),
        (ECHO, {}, {"messages": []}, "messages is no variable for chat_template_kwargs or data.template_kwargs"),
        ("qwen3", {"tools": ["add"]}, {}, "its column tools must be a list of JSON schemas, got 'add' in it"),
        ("qwen3", {"tools": {"a": 1}}, {}, "its column tools must be a list, got {'a': 1}: rename another column"),
        ("qwen3", {"tools": "[{"}, {}, "its column tools is a text that is not JSON"),
    ],
)
def test_tools_and_variables_that_would_be_dropped(template, columns, options, message, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"cannot be applied to row 0 \(counted from 0\): ") as error:
        load(tmp_path, tokenizer, template, {"prompt": [USER]} | columns, template_kwargs=options)
    assert message in str(error.value)


def test_texts_without_a_template_leave_tools_to_the_reward(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, ECHO, {"prompt": "2 + 2?", "tools": ["add"]}, chat=False)
    assert (prompts.texts, prompts.columns) == (["2 + 2?"], {"tools": [["add"]]})
