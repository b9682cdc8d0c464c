"""Rows that are read when a step takes them are the rows that are loaded."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from rlft_fast.config import DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer import train
from rlft_fast.trainer.prompts import StreamError, load_prompts, stream_prompts
from tests.trainer.toy import WORDS, comparable, read_lines, toy_config, write_rows

ROWS = [{"prompt": f"{word} {i}", "answer": i} for i, word in zip(range(1600), itertools.cycle(WORDS), strict=False)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model("shallow"))


def files(folder):
    """JSON lines with a mark, empty lines and other line breaks; parquet in groups of 400 rows."""
    lines = "".join(json.dumps(row) + ("\r\n", "\n\n", "\n")[i % 3] for i, row in enumerate(ROWS))
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=400)
    return folder / "rows.jsonl", folder / "rows.parquet"


def test_streamed_rows_are_the_loaded_ones(tmp_path, tokenizer):
    """In any order, also of several files with limits and weights, and rows of the same number twice."""
    lines, parquet = files(tmp_path)
    for given in (
        {"path": str(lines)}, {"path": str(parquet), "template": "{{ prompt }}: {{ answer }}"},
        {"path": {"a": str(parquet), "b": str(lines)}, "max_rows": {"a": 1100}, "weights": {"a": 1, "b": 2}},
    ):  # fmt: skip
        config = DataConfig(**given, chat=False)
        loaded = load_prompts(config, tokenizer, 64)
        streamed = stream_prompts(config.model_copy(update={"streaming": True}), tokenizer, 64)
        assert len(streamed) == len(loaded)
        assert streamed.description == stream_prompts(config, tokenizer, 64).description
        assert len(streamed.texts) < len(loaded)
        order = loaded.order(3, 90, 7)
        assert streamed.order(3, 90, 7) == order
        for rows in (order, [*order[:5], order[2], 0, len(loaded) - 1]):
            assert streamed.select(rows) == loaded.select(rows)


def test_values_of_mixed_types_in_parquet_are_streamed(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": 4}, {"prompt": "b", "answer": "x"}, {"prompt": "a b", "answer": {"c": [1]}}]
    Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "rows.parquet")
    config = DataConfig(path=str(tmp_path / "rows.parquet"), streaming=True, chat=False)
    assert stream_prompts(config, tokenizer, 64).select([2, 0, 1]).columns == {"answer": [{"c": [1]}, 4, "x"]}


def test_a_run_that_streams_is_the_run_that_loads(tmp_path, tiny_model):
    """Bit for bit, also where a row that cannot be used ends it, and it goes on when the row is corrected."""
    path, _ = files(tmp_path)
    content, model = path.read_bytes(), tiny_model("shallow")
    given = {"data__path": str(path), "rollout__max_prompt_tokens": 16, "steps": 2}

    def run(name: str, *, resume: bool = False, **changes):
        config = toy_config(model, tmp_path, output_dir=str(tmp_path / name), **given | changes)
        train(config, resume=resume, force=resume)

    run("loaded")
    samples = read_lines(tmp_path / "loaded/samples.jsonl")
    late = {line["prompt"] for line in samples if line["step"] == 2 and int(line["prompt"].split()[1]) >= 1000}
    prompt = min(late)  # of a row that the start does not read
    word = json.dumps(prompt).encode()
    path.write_bytes(content.replace(word, b"x" * len(word)))
    number = prompt.split()[1]
    with pytest.raises(StreamError, match=rf"rows\.jsonl: row {number} \(counted from 0\) is not JSON"):
        run("streamed", data__streaming=True)
    assert len(read_lines(tmp_path / "streamed/metrics.jsonl")) == 1
    path.write_bytes(content)
    run("streamed", resume=True, data__streaming=True)
    assert comparable(tmp_path / "streamed") == comparable(tmp_path / "loaded")
    assert read_lines(tmp_path / "streamed/samples.jsonl") == samples


def test_rows_and_files_that_cannot_be_used(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"

    def stream(rows, **options):
        write_rows(path, rows)
        return stream_prompts(DataConfig(path=str(path), streaming=True, chat=False, **options), tokenizer, 64)

    late = [{"prompt": "sun"}] * 1200
    for row, words in (
        ({"question": "moon"}, r"rows 1200 \(counted from 0\) have no 'prompt'"),
        ({"prompt": "moon" * 100}, r"rows 1200 .* are longer than rollout\.max_prompt_tokens=64 \(row 1200 has"),
        ([], "row 1200 .* must be a JSON object, got list"),
    ):
        streamed = stream([*late, row, {"prompt": "rain"}])
        assert streamed.select([1201]).texts == ["rain"]
        with pytest.raises(StreamError, match=words):
            streamed.select([1201, 1200])
    low, high = sorted("sun~", key=lambda word: tokenizer.encode(word)[0])[::3]
    low_id, high_id = (tokenizer.encode(word)[0] for word in (low, high))
    streamed = stream([*[{"prompt": low}] * 1200, {"prompt": high}])
    with pytest.raises(ValueError, match=rf"model has embeddings of {low_id} tokens, but .* the token {low_id}:"):
        streamed.check_tokens("model", low_id)
    streamed.check_tokens("model", high_id)  # the tokenizer knows more
    assert streamed.select([1199]).texts == [low]
    with pytest.raises(StreamError, match=rf"model has embeddings of {high_id} tokens, but .* the token {high_id}:"):
        streamed.select([1200])
    with pytest.raises(ValueError, match=r"row 2 .* must be a JSON object"):  # among the first, which are checked
        stream([*late[:2], 7])
    streamed = stream(late)
    write_rows(path, late[1:])
    with pytest.raises(StreamError, match="has changed since the run started: put the file back"):
        streamed.select([1100])
    for name, content, words in (
        ("a.json", "[]", "it is a JSON array: write each row"), ("a.csv", "prompt\nsun\n", "leave data.streaming out"),
        ("b.jsonl", "\n", "holds no rows"), ("b.parquet", "no parquet", "cannot stream the data .*b.parquet"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=words):
            stream_prompts(DataConfig(path=str(tmp_path / name), streaming=True), tokenizer, 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", "prompt": "b"}\n', r"row 0 .* is not JSON: an object has the key 'prompt' twice"),
        (b'{\n "prompt": "a"\n}\n', r"row 0 .* is not JSON: .*\(each row stands in a line of its own\)"),
        (b'{"prompt": "\xe4"}\n', r"row 0 .* is no UTF-8 \(invalid continuation byte\): save the file in UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "cannot stream .*: it is a text in UTF-16 or UTF-32: save it in UTF-8"),
    ],
)
def test_lines_that_cannot_be_read(content, message, tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_bytes(content)
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), chat=False, streaming=True)
    with pytest.raises(ValueError, match=message):
        stream_prompts(config, tokenizer, 64)
