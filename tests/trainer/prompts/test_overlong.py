"""Prompts with too many tokens: refused, left out, or cut to their last tokens."""

import copy

import pytest
from tokenizers.processors import TemplateProcessing

from rlft_fast.config import ConfigError, DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import Overlong, Stream, load_prompts, overlong_notes
from tests.support.runs.configs import MINIMAL
from tests.trainer.toy import write_rows

CHAT = "<bos>{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer(tiny_model):
    tokenizer = copy.deepcopy(load_tokenizer(tiny_model("llama")))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    start = [("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=start)
    tokenizer.chat_template = CHAT
    return tokenizer


def load(tmp_path, tokenizer, texts, overlong, **options):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": text, "number": i} for i, text in enumerate(texts)])
    config = DataConfig.model_validate({"path": str(tmp_path / "rows.jsonl"), "overlong": overlong, **options})
    return load_prompts(config, tokenizer, max_prompt_tokens=5)


def test_filter(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, ["abcd", "abcde", "ab", 99_999 * "x"], "filter", chat=False)
    assert (prompts.texts, prompts.columns) == (["abcd", "ab"], {"number": [0, 2]})
    assert prompts == load(tmp_path, tokenizer, ["abcd", "abcde", "ab", "wxyzw"], "filter", chat=False)
    assert prompts.stream == Stream((2,))
    assert prompts.overlong == Overlong(left_out=2)
    assert prompts.description["overlong"] == {"left_out": 2, "truncated": 0}
    with pytest.raises(ValueError, match=r"all rows are longer than rollout\.max_prompt_tokens=5 \(row 0 has 6 tokens"):
        load(tmp_path, tokenizer, ["abcde"], "filter", chat=False)


@pytest.mark.parametrize("chat", [True, False])
def test_truncate_keeps_the_start_and_the_last_tokens(chat, tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, ["abcd", "abcdefg", 99_999 * "x"], "truncate", chat=chat)
    assert prompts.token_ids == [tokenizer(text).input_ids for text in ("abcd", "defg", "xxxx")]
    assert prompts.texts == [("<bos>" if chat else "") + text for text in ("abcd", "defg", "xxxx")]
    assert prompts.overlong == Overlong(truncated=2)


def test_words_that_an_answer_continues_are_not_cut(tmp_path, tokenizer):
    rows = [[{"role": "user", "content": asked}, {"role": "assistant", "content": "ABC"}] for asked in ("x", "wxyz")]
    rows.append([{"role": "assistant", "content": "ABCDE"}])
    prompts = load(tmp_path, tokenizer, rows, "truncate")
    assert prompts.texts == ["<bos>xABC", "<bos>zABC"]
    assert prompts.answered(["!", "!"])[1] == ["ABC!", "ABC!"]
    assert str(prompts.overlong) == "1 overlong left out, 1 overlong truncated"
    assert [*overlong_notes({"data": prompts.overlong, "held-out data": Overlong()})] == [f"data: {prompts.overlong}"]


def test_an_environment_needs_whole_conversations():
    from rlft_fast.config import Config

    values = MINIMAL | {"environment": {"name": "m:E"}, "data": {"path": "a", "overlong": "truncate"}}
    with pytest.raises(ConfigError, match=r"^environment begins .* data\.overlong: truncate would cut: filter$"):
        Config.parse(values)
