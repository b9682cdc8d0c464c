import copy
import gc
import json
import zlib

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlft_fast.config import DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.run.folder import dotted
from rlft_fast.trainer.prompts import Prompts, load_prompts
from tests.trainer.toy import write_rows

TEMPLATE = (
    "<pad>{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model("llama"))


@pytest.fixture
def chat_tokenizer(tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def load(path, tokenizer, max_tokens: int = 64, **options) -> Prompts:
    return load_prompts(DataConfig(path=str(path), **({"chat": False} | options)), tokenizer, max_tokens)


def write(tmp_path, text: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode())
    return path


# ---- the order ------------------------------------------------------------------------------------------------------


def numbered(size: int) -> Prompts:
    return Prompts([str(i) for i in range(size)], [[i] for i in range(size)], {"index": list(range(size))})


@given(
    size=st.integers(1, 20),
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    seed=st.integers(0, 10**15),  # as long as a time stamp
)
def test_every_pass_visits_each_row_once_however_it_is_cut(size, counts, seed):
    prompts = numbered(size)
    stream = prompts.order(0, sum(counts), seed)
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))
    start = 0
    for count in counts:
        assert prompts.order(start, count, seed) == stream[start : start + count]
        start += count


def test_passes_and_seeds_differ():
    first, second = numbered(30).order(0, 30, seed=0), numbered(30).order(30, 30, seed=0)
    assert first != second
    assert numbered(30).order(0, 30, seed=1) not in (first, second)


def test_select():
    assert numbered(5).select([3, 0, 3]) == Prompts(["3", "0", "3"], [[3], [0], [3]], {"index": [3, 0, 3]})


# ---- reading --------------------------------------------------------------------------------------------------------


def test_jsonl_with_columns(tmp_path, tokenizer):
    # A byte order mark, a blank line, Windows line ends, a missing column, a separator that is a line end to Python.
    path = write(tmp_path, '\ufeff{"prompt": "ab", "answer": 1}\r\n\r\n{"prompt": "c\u2028d", "level": null}\n')
    prompts = load(path, tokenizer)
    assert prompts.texts == ["ab", "c\u2028d"]
    assert prompts.columns == {"answer": [1, None], "level": [None, None]}
    assert [tokenizer.decode(ids) for ids in prompts.token_ids] == prompts.texts


def test_another_prompt_column(tmp_path, tokenizer):
    prompts = load(write(tmp_path, '{"question": "a", "prompt": "b"}\n'), tokenizer, prompt_column="question")
    assert (prompts.texts, prompts.columns) == (["a"], {"prompt": ["b"]})


def test_texts_go_through_the_chat_template(tmp_path, chat_tokenizer):
    path = write(tmp_path, '{"prompt": "hi"}\n')
    assert load(path, chat_tokenizer, chat=True).texts == ["<pad>u:hi;a:"]
    assert load(path, chat_tokenizer, chat=True, system_prompt="be brief").texts == ["<pad>s:be brief;u:hi;a:"]
    assert load(path, chat_tokenizer, chat=False).texts == ["hi"]


@pytest.mark.parametrize("chat", [True, False])
def test_messages_always_go_through_the_chat_template(chat, tmp_path, chat_tokenizer):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path, json.dumps({"prompt": messages}) + "\n")
    prompts = load(path, chat_tokenizer, chat=chat, system_prompt="for texts" if chat else None)
    assert prompts.texts == ["<pad>s:own;u:hi;a:"]
    assert prompts.token_ids[0].count(chat_tokenizer.pad_token_id) == 1  # the template's, not one more


def test_parts_that_are_texts_may_have_empty_fields_for_images(tmp_path, chat_tokenizer):
    """As a dataset folder fills them in for rows that have none."""
    chat_tokenizer.chat_template = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"
    parts = [{"type": "text", "text": "hi ", "image": None, "image_url": None}, {"text": "you"}]
    Dataset.from_list([{"prompt": [{"role": "user", "content": parts}]}]).save_to_disk(tmp_path / "dataset")
    assert load(tmp_path / "dataset", chat_tokenizer).texts == ["hi you"]


def test_media_beside_the_content_of_a_message_are_refused(tmp_path, chat_tokenizer):
    message = {"role": "user", "content": "what?", "images": ["a.png"]}
    with pytest.raises(ValueError, match=r"rows 0 .* \(row 0 has 'images'\), which do not reach the model"):
        load(write(tmp_path, json.dumps({"prompt": [message]})), chat_tokenizer)


# As transformers, OpenAI's interface and Qwen's templates write them.
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image"}, "image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + 9999 * "A"}}, "image_url"),
        ({"type": "video", "video": "a.mp4"}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "input_audio"),
        ({"image": "a.png"}, "image"),
        ({"type": "text", "text": "what?", "audio": "a.wav"}, "audio"),
    ],
)
def test_media_in_messages_are_refused(part, named, tmp_path, chat_tokenizer):
    """A chat template would write a placeholder or nothing in their place."""
    with_text = [{"role": "user", "content": "hi"}, {"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    alone = [{"role": "user", "content": part}]  # as a dict, which some templates take
    path = write(tmp_path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("hi", with_text, alone)))
    with pytest.raises(ValueError, match="which do not reach the model") as error:
        load(path, chat_tokenizer)
    assert str(error.value) == (
        f"{path}: rows 1, 2 (counted from 0) have images, videos or audio in their 'prompt' (row 1 has {named!r}), "
        "which do not reach the model: leave these rows out"
    )


# As TRL and verl lay out their data: a placeholder in the text, the images in a column of their own.
@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
def test_media_beside_the_prompts_are_refused(column, tmp_path, tokenizer):
    rows = [{"prompt": "hi", column: []}, {"prompt": "<image>what?", column: ["a.png"]}]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="which do not reach the model") as error:
        load(path, tokenizer)
    assert str(error.value) == (
        f"{path}: rows 1 (counted from 0) have images, videos or audio beside their 'prompt' (row 1 has {column!r}), "
        "which do not reach the model: leave these rows out"
    )


def test_a_prompt_column_may_have_any_name(tmp_path, tokenizer):
    path = write(tmp_path, json.dumps({"image": "a cat", "prompt": None}))
    assert load(path, tokenizer, prompt_column="image").texts == ["a cat"]


def test_dataset_folder_equals_jsonl(tmp_path, tokenizer):
    rows = [{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 2}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "dataset")
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "dataset", tokenizer) == load(path, tokenizer)


def test_reasoning_gym_task(tokenizer):
    config = DataConfig(task="chain_sum", task_size=3, task_options={"max_terms": 2}, chat=False)
    prompts = load_prompts(config, tokenizer, max_prompt_tokens=200)
    assert len(prompts) == 3
    assert prompts.texts == [entry["question"] for entry in prompts.columns["entry"]]
    assert prompts == load_prompts(config, tokenizer, max_prompt_tokens=200)


# ---- what tells data from other data --------------------------------------------------------------------------------


def described(tmp_path, tokenizer, *rows, template: str = TEMPLATE) -> dict:
    tokenizer.chat_template = template
    return dict(dotted(load(write_rows(tmp_path / "data.jsonl", [*rows]), tokenizer, chat=True).description))


ROWS = ({"prompt": "2 + 2?", "answer": 4}, {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": 2})


@pytest.mark.parametrize(
    ("changed", "template", "names"),
    [
        (ROWS[1], TEMPLATE, set()),
        (ROWS[1] | {"answer": 3}, TEMPLATE, {"columns.answer", "checksum"}),
        (ROWS[1] | {"prompt": "1 + 2?"}, TEMPLATE, {"columns.prompt", "checksum"}),
        (ROWS[1], TEMPLATE + " ", {"checksum", "tokens"}),  # the same rows: it is the template that differs
        (ROWS[1], TEMPLATE + "{# a comment #}", set()),
    ],
)
def test_the_description_names_what_differs(changed, template, names, tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    before = described(tmp_path, tokenizer, *ROWS)
    texts = ["<pad>u:2 + 2?;a:", "<pad>u:1 + 1?;a:"]
    assert before["checksum"] == zlib.crc32(json.dumps([texts, {"answer": [4, 2]}]).encode())  # as in older runs
    now = described(tmp_path, tokenizer, ROWS[0], changed, template=template)
    assert {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)} == names


def test_the_time_in_a_template_is_no_other_data(tmp_path, tokenizer):
    tokenizer, clock = copy.deepcopy(tokenizer), TEMPLATE + "{{ strftime_now('%f %S') }}"
    tokenizer.chat_template = clock
    path = write_rows(tmp_path / "data.jsonl", [*ROWS])
    first, second = (load(path, tokenizer, chat=True) for _ in range(2))
    assert first.texts != second.texts
    assert first.description == second.description
    other = described(tmp_path, tokenizer, *ROWS, template=clock + ".")
    before = dict(dotted(first.description))
    assert [name for name in before if before[name] != other[name]] == ["chat_template"]


# ---- special tokens of texts without a template ---------------------------------------------------------------------


# What the tokenizer puts around texts: nothing, BOS, EOS, both, and two tokens before.
@pytest.mark.parametrize(
    ("around", "start"),
    [
        ("$A", ""),
        ("<bos> $A", "<bos>"),
        ("$A <eos>", ""),
        ("<bos> $A <eos>", "<bos>"),
        ("<pad> <bos> $A", "<pad><bos>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["ab", "<bos>ab", "ab<eos>", "<eos>ab<bos>"])
def test_texts_have_one_start_and_no_end(around, start, text, tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    prompts = load(write(tmp_path, json.dumps({"prompt": text}) + "\n"), tokenizer)
    once = start + text.removeprefix("<bos>") if "<bos>" in start else text
    assert prompts.token_ids == [tokenizer(once, add_special_tokens=False).input_ids]
    assert prompts.texts == [text]
    if "<eos>" not in around and not text.startswith("<bos>"):
        assert prompts.token_ids == [tokenizer(text).input_ids]  # plain transformers


# ---- bad input ------------------------------------------------------------------------------------------------------

LONG = "x" * 65


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "holds no rows: there is nothing to train on"),
        ("\n \n", {}, "holds no rows"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', {}, "line 2 is not JSON"),
        ('{}\n"a"\n', {}, "line 2 must be a JSON object, got str"),
        ('{"prompt": "a"}\n{"text": "b"}\n', {}, r"rows 1 \(counted from 0\) have no 'prompt'; its columns are"),
        ('{"prompt": "  "}\n', {}, "rows 0 .* have no 'prompt'"),
        ('{"prompt": []}\n', {}, "rows 0 .* have no 'prompt'"),
        ('{"prompt": "a"}\n' + 7 * '{"prompt": ""}\n', {}, r"rows 1, 2, 3, 4, 5 and 2 more \(counted from 0\) have no"),
        ('{"prompt": 7}\n', {}, "rows 0 .* neither a text nor a list of messages .* for example 7"),
        ('{"prompt": {"role": "user"}}\n', {}, "rows 0 .* neither a text nor a list of messages"),
        ('{"prompt": ["a"]}\n', {}, "rows 0 .* neither a text nor a list of messages"),
        ('{"prompt": [{"role": "user"}]}\n', {}, "rows 0 .* of row 0, message 0 has the content null, expected a text"),
        (
            f'{{"prompt": "a"}}\n{{"prompt": "{LONG}"}}\n', {},
            r"rows 1 \(counted from 0\) are longer than rollout.max_prompt_tokens=64 \(row 1 has 65 tokens\)",
        ),
        ('{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n', {}, r"row 1 .* is no text that can be tokenized: 'b \\ud83d'"),
        ('{"prompt": "a", "x": ' + 200_000 * "[" + "\n", {}, "line 1 is not JSON: "),
        (f'{{"prompt": "a", "x": {9999 * "1"}}}\n', {}, "line 1 is not JSON: Exceeds the limit"),
        ('{"prompt": "a"}\n', {"chat": True}, r"chat template cannot be applied to row 0 .*data.chat: false"),
        (
            json.dumps({"prompt": json.dumps([{"role": "user", "content": "a"}])}), {"chat": True},
            r"rows 0 .* have a 'prompt' that is a text with messages in it, for example '\[{",
        ),
        ('{"q": [{"role": "user"}]}\n', {"chat": True, "template": "{{ q }}"}, "rows 0 .* a text with messages in it"),
        ('{"q": null}\n', {"template": "{{ q }}"}, "cannot be applied to row 0 .*it writes a value that is null"),
    ],
)  # fmt: skip
def test_unusable_rows(text, options, message, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, text), tokenizer, **options)


def test_a_prompt_at_the_limit_is_allowed(tmp_path, tokenizer):
    assert len(load(write(tmp_path, f'{{"prompt": "{LONG[1:]}"}}\n'), tokenizer).token_ids[0]) == 64


def test_a_template_that_refuses_a_row(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('no system messages please') }}"
    with pytest.raises(ValueError, match=r"cannot be applied to row 0 .*no system messages please"):
        load(write(tmp_path, '{"prompt": "a"}\n'), chat_tokenizer, chat=True)


def test_a_row_whose_words_the_tokenizer_does_not_know(tmp_path):
    backend = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="?"))
    with pytest.raises(ValueError, match=r"row 1 .* cannot be tokenized \(WordLevel error: Missing.* token.*: 'c'$"):
        load(write(tmp_path, '{"prompt": "a"}\n{"prompt": "c"}\n'), PreTrainedTokenizerFast(tokenizer_object=backend))


def test_unreadable_files(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"cannot read the data .*missing\.jsonl"):
        load(tmp_path / "missing.jsonl", tokenizer)
    (tmp_path / "latin").write_bytes('{"prompt": "\xe4"}'.encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"cannot read the data .*latin: its byte 12, 0xe4, is no .*expected JSON lines in UTF-8"
    ):
        load(tmp_path / "latin", tokenizer)


def test_unusable_dataset_folders(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is not a folder written by datasets\.save_to_disk"):
        load(tmp_path / "empty", tokenizer)
    Dataset.from_list([]).save_to_disk(tmp_path / "no rows")
    with pytest.raises(ValueError, match="no rows holds no rows: there is nothing to train on"):
        load(tmp_path / "no rows", tokenizer)
    DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"holds the splits \['train'\]: name one, for example .*train"):
        load(tmp_path / "splits", tokenizer)
    assert load(tmp_path / "splits" / "train", tokenizer).texts == ["a"]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_summ", {}, "cannot make the task 'chain_summ'"),
        ("chain_sum", {"no_such_option": 1}, "cannot make the task 'chain_sum': .*no_such_option"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "cannot make the task 'chain_sum'"),
    ],
)
def test_unusable_tasks(task, options, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        load_prompts(DataConfig(task=task, task_options=options), tokenizer, max_prompt_tokens=64)


def test_rows_are_read_without_the_garbage_collector(tokenizer, tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i} and {i}"} for i in range(2000)])
    phases = []

    def collected(phase, info):
        phases.append(phase)

    gc.callbacks.append(collected)
    try:
        load(path, tokenizer)
        assert gc.isenabled()
        assert phases.count("start") <= 1  # as soon as it is enabled again; it was 27
        with pytest.raises(ValueError, match="longer than"):
            load(path, tokenizer, max_tokens=1)
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(collected)
