"""Rows of data as tokens, and rows that are refused."""

import copy
import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlft_fast.config import SFTDataConfig
from rlft_fast.trainer.prompts import Overlong, read_sets
from rlft_fast.trainer.supervised import load_rows
from tests.support.tiny_models import EOS_TOKEN_ID, save_tokenizer
from tests.trainer.supervised.rows import CHATML, say
from tests.trainer.toy import write_rows

END = CHATML.replace("<|im_end|>", "<eos>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder, chat_template=END)


def load(tokenizer, tmp_path, rows, **options):
    path = str(write_rows(tmp_path / "data.jsonl", rows))
    config = SFTDataConfig.model_validate({"path": path, "max_sequence_tokens": 64, **options})
    return load_rows(config, tokenizer, "the model", read_sets(config))


def shown(tokenizer, rows, i: int) -> tuple[str, str]:
    """The text of a row, and what is taught of it."""
    ids, taught = rows.token_ids[i], rows.is_taught[i]
    return tokenizer.decode(ids), tokenizer.decode(ids[taught])


def test_every_form_of_a_row(tokenizer, tmp_path):
    rows = load(
        tokenizer,
        tmp_path,
        [
            {"messages": say("a?", "b", "c?", "d")},
            {"prompt": say("a?", "b", "c?"), "completion": say("", "d")[1:]},
            {"prompt": "a?", "completion": "b"},
            {"prompt": "a?", "completion": say("a?", "b")},
            {"text": "ab"},
            {"text": "ab<eos>"},
        ],
        system_prompt="S",
        max_sequence_tokens=128,
    )
    before = "<|im_start|>system\nS<eos>\n<|im_start|>user\na?<eos>\n<|im_start|>assistant\n"
    both = before + "b<eos>\n<|im_start|>user\nc?<eos>\n<|im_start|>assistant\nd<eos>\n"
    found = [shown(tokenizer, rows, i) for i in range(len(rows))]
    assert found[:2] == [(both, "b<eos>d<eos>"), (both, "d<eos>")]
    assert found[2:4] == [(before + "b<eos>\n", "b<eos>")] * 2
    assert found[4:] == [("ab<eos>", "ab<eos>")] * 2


@pytest.mark.parametrize("is_marked", [False, True])
def test_messages_of_weight_0_are_read_and_not_taught(is_marked, tokenizer, tmp_path):
    """As in OpenAI's files, whose messages have the weight 0 or 1; also where a system prompt moves the messages."""
    tokenizer, words = copy.deepcopy(tokenizer), "{{ message.content }}<eos>"
    marked = f"{{% if message.role == 'assistant' %}}{{% generation %}}{words}{{% endgeneration %}}{{% else %}}{words}"
    if is_marked:
        tokenizer.chat_template = tokenizer.chat_template.replace(words, marked + "{% endif %}")
    plain = say("a?", "b", "c?", "d", "e?", "f")
    weights = {1: {"weight": 0}, 3: {"weight": 1}, 5: {"weight": 0}}
    talk = [message | weights.get(i, {}) for i, message in enumerate(plain)]
    given = [{"messages": talk}, {"messages": plain}, {"prompt": talk[:3], "completion": talk[3:]}]
    rows = load(tokenizer, tmp_path, given, system_prompt="S", max_sequence_tokens=256)
    (text, some), (same, every), (again, own) = (shown(tokenizer, rows, i) for i in range(3))
    assert text == same == again
    assert (some, every, own) == ("d<eos>", "b<eos>d<eos>f<eos>", "d<eos>")


def test_arguments_of_calls_in_json_text_are_taught_as_mappings(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    calls = "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    tokenizer.chat_template = END.replace("{{ message.content }}", "{{ message.content }}" + calls)
    given = [{"name": "add", "arguments": arguments} for arguments in ({"a": 1}, '{"a": 1}')]
    told = [say("1+1?", "") for _ in given]
    for messages, call in zip(told, given, strict=True):
        messages[1]["tool_calls"] = [{"type": "function", "function": call}]
    rows = load(tokenizer, tmp_path, [{"messages": messages} for messages in told], max_sequence_tokens=256)
    assert [shown(tokenizer, rows, i)[1] for i in range(2)] == ['{"name": "add", "arguments": {"a": 1}}<eos>'] * 2


def test_a_message_that_the_template_drops(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages if message.role != 'developer' %}" + END.partition("%}")[2]
    told = [{"role": "developer", "content": "Be brief."}, *say("a?", "b")]
    for row in ({"messages": told}, {"prompt": told[:2], "completion": "b"}):
        with pytest.raises(ValueError, match="row 1: the chat template does not show message 0, of the role"):
            load(tokenizer, tmp_path, [{"messages": say("a?", "b")}, row])
    # Mistral's template has the system's words before the user's last message, if no answer follows it.
    shows = "loop.last and message.role == 'user' and messages[0].role == 'system'"
    last = f"{{% if {shows} %}}{{{{ messages[0].content }}}}{{% endif %}}"
    tokenizer.chat_template = END.replace("in messages %}", "in messages if message.role != 'system' %}" + last)
    advice = "begin the user's first message with its words, or leave it (or data.system_prompt) out"
    with pytest.raises(ValueError, match=re.escape(advice)):
        load(tokenizer, tmp_path, [{"messages": say("a?", "b")}], system_prompt="Be brief.")


def test_a_thought_that_the_template_drops(tokenizer, tmp_path):
    """Those of earlier turns may be dropped. A thought in a key that the template does not read was never learned."""
    shows = "{% if loop.last and message.thinking %}<think>{{ message.thinking }}</think>{% endif %}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = END.replace("{{ message.content }}", shows + "{{ message.content }}")
    messages = say("a?", "b", "c?", "d")
    messages[1]["thinking"] = messages[3]["thinking"] = "hm\n"
    rows = load(tokenizer, tmp_path, [{"messages": messages}], max_sequence_tokens=128)
    assert shown(tokenizer, rows, 0)[1] == "b<eos><think>hm\n</think>d<eos>"
    messages[3] = {"role": "assistant", "content": "d", "reasoning_content": "hm"}
    with pytest.raises(ValueError, match="does not show the thought in the last message's 'reasoning_content', which"):
        load(tokenizer, tmp_path, [{"messages": messages}], max_sequence_tokens=128)


def test_a_thought_in_the_words_that_the_template_drops(tokenizer, tmp_path):
    """DeepSeek-R1's template drops all of them, and Qwen 3's those of earlier turns, and changes line breaks."""
    tokenizer = copy.deepcopy(tokenizer)
    given = [{"messages": say("a?", "<think>hm</think>b", "c?", "<think>hm hm</think>d")}]
    dropped = "{{ message.content.split('</think>')[-1] }}"
    kept = "{% if loop.last %}{{ message.content.replace('<think>', '<think>\n') }}{% else %}DROPPED{% endif %}"
    tokenizer.chat_template = END.replace("{{ message.content }}", kept.replace("DROPPED", dropped))
    rows = load(tokenizer, tmp_path, given, max_sequence_tokens=256)
    assert shown(tokenizer, rows, 0)[1] == "b<eos><think>\nhm hm</think>d<eos>"
    tokenizer.chat_template = END.replace("{{ message.content }}", dropped)
    with pytest.raises(ValueError, match="row 0: the chat template leaves out the thought before </think> in the last"):
        load(tokenizer, tmp_path, given, max_sequence_tokens=256)


def test_texts_without_a_template(tokenizer, tmp_path):
    rows = load(tokenizer, tmp_path, [{"prompt": "a?", "completion": " b"}], chat=False)
    assert shown(tokenizer, rows, 0) == ("a? b<eos>", " b<eos>")
    assert rows.token_ids[0][-1] == EOS_TOKEN_ID


def test_a_text_has_one_start(tokenizer, tmp_path):
    """As a prompt of a run of rl, whether the text has the tokenizer's BOS itself or not."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    start = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=start)
    given = [{"text": "ab"}, {"text": "<bos>ab"}]
    given += [{"prompt": prompt, "completion": "b"} for prompt in ("a", "<bos>a")]
    rows = load(tokenizer, tmp_path, given, chat=False)
    assert [tokenizer.decode(ids) for ids in rows.token_ids] == ["<bos>ab<eos>"] * 4
    taught = [[True] * 3] * 2 + [[False, True, True]] * 2
    assert [own[1:].tolist() for own in rows.is_taught] == taught


def test_a_tokenizer_that_adds_spaces_joins_texts_as_they_are(tmp_path):
    vocab = {letter: i for i, letter in enumerate(("▁", *"ab24+=", "<eos>"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    rows = load(fast, tmp_path, [{"prompt": "2+2=", "completion": "4"}, {"text": "a+b"}], chat=False)
    for i, (text, num_taught) in enumerate((("2+2=4", 2), ("a+b", 5))):
        ids = [*fast.encode(text, add_special_tokens=False), fast.eos_token_id]
        assert rows.token_ids[i].tolist() == ids
        assert rows.is_taught[i].tolist() == [False] * (len(ids) - num_taught) + [True] * num_taught


def test_a_batch_asks_for_the_taught_tokens(tokenizer, tmp_path):
    rows = load(tokenizer, tmp_path, [{"text": "abc"}, {"prompt": "xy", "completion": "z"}], chat=False)
    batch = rows.batch([1, 0])
    asked = batch.target_T[batch.active_index_T].tolist()
    assert asked == [*b"z", EOS_TOKEN_ID, *b"bc", EOS_TOKEN_ID] or tokenizer.decode(asked) == "z<eos>bc<eos>"
    assert rows.description["taught_tokens"] == 6


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": []}, "the assistant says nothing"),
        ({"messages": "hello"}, "messages must have a role and content, got 'hello'"),
        ({"messages": say("a?")}, "the assistant says nothing"),
        ({"messages": [x | {"weight": 0} for x in say("a?", "b")]}, "all messages of the assistant's have the wei"),
        ({"messages": [x | {"weight": 0.5} for x in say("a?", "b")]}, "a message has the weight 0.5, expected 0, wh"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 has the content null"),
        (
            {"prompt": "a"},
            r"it has no 'messages', no 'prompt' with 'completion', and no 'text'; its columns are \['pro",
        ),
        ({"text": 3}, "its 'text' must be a text, got 3"),
        ({"text": "a\ud83d"}, r"it is no text that can be tokenized: 'a\\ud83d'"),
        ({"prompt": "a", "completion": " "}, "its answer is empty: leave the row out"),
        ({"prompt": json.dumps(say("a?")), "completion": "b"}, "messages must be a list, and not a text such as "),
        ({"messages": say("a?", "b"), "tools": [{"type": "function"}]}, "a tool must have a name, got {'type': 'func"),
        ({"text": ""}, "its text becomes no token"),
        (
            {"text": "a" * 99},
            "it has 100 tokens, more than data.max_sequence_tokens=64: raise it, or set",
        ),
        ({"text": "a" * 64_001}, "it has 64001 characters"),
        ({"text": "a", "image": "0.png"}, "it has something in its column 'image', which does not reach the model"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, *say("a?", "b")]},
            "its messages have 'image'",
        ),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(row, problem, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=rf"rows 1, 3 \(counted from 0\) cannot be learned: row 1: .*({problem})"):
        load(tokenizer, tmp_path, [{"text": "a"}, row, {"text": "b"}, row])


def test_a_broken_line_and_an_empty_file(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="holds no rows"):
        load(tokenizer, tmp_path, [])
    (tmp_path / "broken.jsonl").write_text(json.dumps({"text": "a"}) + "\n{")
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2 is not JSON"):
        read_sets(SFTDataConfig(path=str(tmp_path / "broken.jsonl")))


def test_a_template_is_asked_only_of_conversations(tokenizer, tmp_path):
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template="{{ messages }}")
    assert len(load(bare, tmp_path, [{"text": "a"}])) == 1
    with pytest.raises(ValueError, match=r"^the chat template of the model does not show where"):
        load(bare, tmp_path, [{"messages": say("a?", "b")}])


@pytest.mark.parametrize(("overlong", "texts"), [("filter", ["ab<eos>"]), ("truncate", ["ab<eos>", "abcdefgh"])])
def test_overlong_rows(overlong, texts, tokenizer, tmp_path):
    given = [{"text": "ab"}, {"text": "abcdefghij"}, {"prompt": "abcdefgh", "completion": "x"}]
    rows = load(tokenizer, tmp_path, given, chat=False, overlong=overlong, max_sequence_tokens=8)
    assert [tokenizer.decode(ids) for ids in rows.token_ids] == texts
    assert rows.overlong == Overlong(left_out=4 - len(texts) - 1, truncated=len(texts) - 1)
    assert rows.sizes == {"": len(texts)}
    assert str(rows).endswith(f"; {rows.overlong}")
    with pytest.raises(ValueError, match="all rows are overlong"):
        load(tokenizer, tmp_path, given[2:], chat=False, overlong=overlong, max_sequence_tokens=8)


def test_a_template_makes_the_prompt(tokenizer, tmp_path):
    row = {"q": "a?", "completion": "b", "text": "other", "messages": say("x", "y")}
    rows = load(tokenizer, tmp_path, [row], chat=False, template="Q: {{ q }}\n")
    assert shown(tokenizer, rows, 0) == ("Q: a?\nb<eos>", "b<eos>")
