"""What the assistant says in conversations, as chat templates of many families render them."""

import time
from itertools import product
from pathlib import Path

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlft_fast.trainer.prompts import Conversation, Limits
from rlft_fast.trainer.supervised import AssistantSpans
from rlft_fast.trainer.supervised.spans import Span, _num_equal, cut_text
from tests.support.tiny_models import chat_tokenizer
from tests.trainer.supervised.rows import CHATML, say

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>",
    "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|return|>", "<|user|>", "<|observation|>",
    "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>",
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TALK = Conversation(say("1?", "One.\n\nTwo", "And?", "Three"))
WITH_TOOL = Conversation(
    [*say("1+1?"), CALL, {"role": "tool", "name": "add", "content": "2"}, *say("", "It is 2.")[1:]], TOOLS
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), SPECIAL)


def said(tokenizer, template: str, conversation: Conversation, first: int = 0) -> list[str]:
    tokenizer.chat_template = template
    text, spans = AssistantSpans(tokenizer, "the model", Limits()).find(conversation, first)
    return [text[span.start : span.end] for span in spans]


# Words that the generation prompt opens, words that depend on the place of the last question, an end token of another
# kind in the last turn, and a turn that the next turn's token ends.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_2", ["One.\n\nTwo<|eot_id|>", "Three<|eot_id|>"]),
        ("qwen3", ["One.\n\nTwo<|im_end|>", "<think>\n\n</think>\n\nThree<|im_end|>"]),
        ("qwen3_8", ["\n</think>\n\nOne.\n\nTwo<|im_end|>", "\n</think>\n\nThree<|im_end|>"]),
        ("gptoss", ["<|channel|>final<|message|>One.\n\nTwo<|end|>", "<|channel|>final<|message|>Three<|return|>"]),
        ("glm4moe", ["\n<think></think>\nOne.\n\nTwo<|user|>", "\n<think></think>\nThree"]),
        ("cohere2", [f"{words}<|END_RESPONSE|>" for words in ("One.\n\nTwo", "Three")]),
    ],
)
def test_what_follows_the_generation_prompt_is_taught(name, expected, tokenizer):
    assert said(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), TALK) == expected


@pytest.mark.parametrize("conversation", [TALK, WITH_TOOL])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_the_words_are_those_that_marks_in_the_template_show(name, conversation, tokenizer):
    """TRL has these templates with marks, which also hold the line breaks around the words."""
    marked = said(tokenizer, (TEMPLATES / f"{name}_training.jinja").read_text(), conversation)
    found = said(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), conversation)
    assert found == [text.strip() for text in marked]
    assert len(found) == 2


@pytest.mark.parametrize("name", ["nemotron_3_nano", "nemotron_3_super"])
def test_an_answer_without_a_thought_begins_behind_its_own_header(name, tokenizer):
    """The prompt opens a thought, and the history shows that there is none; an earlier message has one."""
    thoughtful = CALL | {"reasoning_content": "hm"}
    talk = [*say("1+1?"), thoughtful, {"role": "tool", "name": "add", "content": "2"}, *say("", "It is 2.")[1:]]
    first, last = said(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), Conversation(talk, TOOLS))
    assert "hm" in first
    assert "add" in first
    assert last == "It is 2.<|im_end|>"


def test_a_template_has_its_time_for_each_rendering(tokenizer):
    """Each answer takes some renderings of the whole conversation: thirty take a hundred times what a prompt takes."""
    talk = Conversation([*say("1+1?"), *WITH_TOOL.messages[1:3] * 30, *say("", "It is 2.")[1:]], TOOLS)
    tokenizer.chat_template, limits = (TEMPLATES / "qwen3.jinja").read_text(), Limits()
    text, spans = AssistantSpans(tokenizer, "the model", limits).find(talk)
    assert [text[span.start : span.end].count('"name": "add"') for span in spans] == [1] * 30 + [0]
    assert limits.num_conversations > 3 * 30


def test_messages_before_the_first_are_not_taught(tokenizer):
    for name in ("qwen3_instruct_2507", "qwen3_instruct_2507_training"):
        (found,) = said(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), TALK, first=3)
        assert found.strip() == "Three<|im_end|>"


# Gemma 4 shows the result inside of the turn with the call. The others drop the call, or the result.
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemma4_v5", "does not show where message 1, of the assistant's, ends"),
        ("lfm2", "does not show the call of the tool 'add'"),
        ("lfm2_training", "does not show the call of the tool 'add'"),
    ],
)
def test_calls_that_cannot_be_told_from_results_are_refused(name, problem, tokenizer):
    with pytest.raises(ValueError, match=problem):
        said(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), WITH_TOOL)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no end token follows the words"),
        (CHATML.replace("{{ message.content }}", "words"), "does not show where message 1, of the assistant's, ends"),
        (CHATML.replace("<|im_end|>", "<|im_end|>{{ (messages | last).content }}"), "does not show where message 3"),
        ("{{ missing.words }}", "missing"),
    ],
)
def test_a_template_without_masks_is_refused_at_the_start(template, problem, tokenizer):
    with pytest.raises(ValueError, match=f"the chat template of the model does not show.*{problem}"):
        said(tokenizer, template, TALK)


WORDS = (
    "One.", "  spaced ", "a\n\n", "</think>", "<think>\nhm\n</think>\n\nyes", "<tool_response>\n1\n</tool_response>",
    "/no_think", "xqmarkxq0x", "<|im_end|>", "<|im_start|>assistant\n", "user", "",
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama3_2", "qwen3", "qwen3_8", "gptoss", "glm4moe", "cohere2", "gemma4_v5"])
def test_conversations_of_a_kind_share_marks_and_nothing_changes(name, tokenizer):
    """The first of its kind is found by marks of its own, as of every conversation in a new `AssistantSpans`."""
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    alone, together = (AssistantSpans(tokenizer, "the model", Limits()) for _ in range(2))
    turns = [(a, b) for a in WORDS for b in WORDS[:6]] + [("Hm?", b, "And?", a) for a, b in zip(WORDS, WORDS[::-1])]  # noqa: B905
    num_shared = 0
    for texts in turns:
        conversation = Conversation(say(*texts))
        alone._kinds.clear()
        expected, found = (outcome(spans, conversation) for spans in (alone, together))
        assert found == expected, texts
        num_shared += bool(together._by_skeleton(conversation, found[0]))
    assert num_shared >= 9  # texts that a template changes are found by marks of their own


def test_a_long_conversation_is_compared_in_no_time():
    """Each answer with a call of a tool compares the whole text twice: letter by letter, 100 answers took seconds."""
    for one, other in product(map("".join, product("ab", repeat=3)), ["", "a", "ab", "aba", "abab", "bbb"]):
        for text, base in ((one, other), (other, one)):
            expected = next((i for i, (x, y) in enumerate(zip(text, base, strict=False)) if x != y), None)
            assert _num_equal(text, base) == (min(len(text), len(base)) if expected is None else expected)
    text = "word " * 200_000
    started = time.perf_counter()
    assert [_num_equal(text, text[:i] + "x") for i in range(0, 100 * 9999, 9999)] == [*range(0, 100 * 9999, 9999)]
    assert time.perf_counter() - started < 1  # 0.02 s; letter by letter 2.5 s


def outcome(spans: AssistantSpans, conversation: Conversation):
    try:
        return spans.find(conversation)
    except Exception as error:
        return str(error), type(error)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_pieces_are_tokenized_as_a_generator_sees_them():
    """The merged token of two letters must not reach over the beginning of the words."""
    vocab = {"a": 0, "b": 1, "ab": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert tokens_of(fast, cut_text("abab", [Span(1, 4)], joins=True)) == ([0, 1, 2], b"\0\1\1")


def test_a_tokenizer_that_adds_spaces_gets_the_whole_text():
    letters = ["▁", *"abc"]
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "bc"])}, merges=[("b", "c")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert tokens_of(fast, cut_text("abc", [Span(1, 3)], joins=False)) == ([0, 1, 4], b"\0\0\1")
    with pytest.raises(ValueError, match="a token reaches over the beginning or end of words, behind 'ab'"):
        tokens_of(fast, cut_text("abc", [Span(2, 3)], joins=False))


def tokens_of(tokenizer, written):
    return written.make([tokenizer.encode(text, add_special_tokens=False) for text in written.texts])
