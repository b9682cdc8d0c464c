"""Rows from every format that users bring, and what is said of files that cannot be read."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from rlft_fast.config import Config, ConfigError, DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import load_prompts, read_data
from tests.support.runs.configs import MINIMAL

ROWS = [
    {"prompt": 'What is "2 + 2",\nplease?', "answer": "007"},
    {"prompt": "\u00e4 c\u2028d", "answer": ""},
    {"prompt": "=1+1", "answer": "4.50"},
]


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_separated(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        writer = csv.DictWriter(file, ["prompt", "answer"], delimiter="\t" if ".tsv" in path.suffixes else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def write_folder(path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(path.parent)


WRITERS = {
    "rows.jsonl": write_lines, "rows.json": write_json, "rows.csv": write_separated, "rows.tsv": write_separated,
    "part=1/rows.parquet": write_parquet, "folder/train": write_folder,
}  # fmt: skip


@pytest.fixture
def files(tmp_path) -> list[str]:
    """The same rows in every format."""
    for name, write in WRITERS.items():
        write(tmp_path / name)
    names = [*WRITERS]
    for name in names[:4]:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        names.append(f"{name}.gz")
    return [str(tmp_path / name) for name in names]


def test_every_format_has_the_same_rows(files, tiny_model):
    assert len(files) == 10
    assert [read_data(file) for file in files] == [ROWS] * 10
    tokenizer = load_tokenizer(tiny_model("llama"))
    prompts = [load_prompts(DataConfig(path=file, chat=False), tokenizer, 64) for file in files]
    assert prompts == prompts[:1] * 10  # with the checksums that tell data apart
    assert prompts[0].texts == [row["prompt"] for row in ROWS]


def test_messages_of_parquet_are_those_of_json(tmp_path):
    """Arrow gives every message the keys of all messages."""
    rows = [{"prompt": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}], "level": 3}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    rows[0]["prompt"][0]["name"] = None
    assert read_data(str(tmp_path / "rows.parquet")) == rows


def test_values_of_mixed_types_in_parquet(tmp_path):
    """datasets writes them as JSON: alone, in lists, and in the messages of a list."""
    called = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    rows = [
        {"prompt": [{"role": "user", "content": "a"}, called], "answer": 4, "level": 1},
        {"prompt": [{"role": "user", "content": "b"}], "answer": {"x": "y"}, "level": None},
        {"prompt": [{"role": "user", "content": "c"}], "answer": "no number", "level": 3},
    ]
    written = Dataset.from_list(rows, on_mixed_types="use_json")
    written.to_parquet(tmp_path / "rows.parquet")
    assert isinstance(pyarrow.parquet.read_schema(tmp_path / "rows.parquet").field("answer").type, pyarrow.JsonType)
    assert read_data(str(tmp_path / "rows.parquet")) == written.to_list() == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1}, 2]', r"a\.json, element 1 of the array must be a JSON object, got int"),
        ("a.json", b'\n[{"a": 1}', r"a\.json begins with \[ and is not one JSON array: Expecting ',' delimiter"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv: the row that ends in line 3 has 1 fields, and the first .* 2 columns"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv has two columns 'a' in its first line: rename one"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv, line 2 is not CSV: unexpected end of data"),
        ("a.csv.gz", b"a,b\n", r"cannot read the data .*a\.csv\.gz: Not a gzipped file"),
        ("a.csv.gz", gzip.compress(999 * b"a,b\n", mtime=0)[:-12], r"a\.csv\.gz: its compressed text is damaged: "),
        ("a.parquet", b"a,b\n", r"cannot read the data .*a\.parquet: Parquet .*\(expected JSON lines .* a file \.csv"),
        ("a.bin", b"PAR1\0", r"a\.bin: it has zero bytes"),
        (
            "a.txt",
            b"Hello\n",
            r"a\.txt, line 1 is not JSON: Expecting value.*\(expected JSON lines in UTF-8 with one row",
        ),
        ("a.json", b'{\n "a": 1\n}\n', r"a\.json, line 1 is not JSON: .*\(expected .* with one row each"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "a": 2}\n', r"a\.jsonl, line 2 is not JSON: an object has the key 'a' twice"),
        ("a.json", b'[{"a": {"b": 1, "b": 1}}]', r"a\.json begins with .* an object has the key 'b' twice"),
    ],
)
def test_unreadable_files(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_data(str(tmp_path / name))


def test_columns_of_the_same_name_in_parquet(tmp_path):
    """Python would drop the first one."""
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: it has two columns 'prompt': rename one"):
        read_data(str(tmp_path / "a.parquet"))


def test_suffixes_in_capitals(tmp_path):
    for name in ("rows.csv", "rows.parquet"):
        WRITERS.get(name, write_parquet)(tmp_path / name.upper())
    (tmp_path / "ROWS.JSONL.GZ").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert [read_data(str(tmp_path / name)) for name in ("ROWS.CSV", "ROWS.PARQUET", "ROWS.JSONL.GZ")] == [ROWS] * 3


def test_a_long_field_of_csv(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt\n{200_000 * 'x'}\n")
    before = csv.field_size_limit()
    assert read_data(str(tmp_path / "a.csv")) == [{"prompt": 200_000 * "x"}]
    assert csv.field_size_limit() == before


# ---- the Hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    """A cache of datasets with a set that was downloaded earlier; the network is not asked."""
    folder = tmp_path / "me___sums" / "easy" / "0.0.0" / "hash"
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    info = datasets.DatasetInfo.from_directory(str(tmp_path / "saved"))
    info.builder_name, info.dataset_name, info.config_name, info.version = "parquet", "sums", "easy", "0.0.0"
    info.splits = datasets.SplitDict(dataset_name="sums")
    info.splits.add(datasets.SplitInfo("train", num_bytes=1, num_examples=len(ROWS), dataset_name="sums"))
    folder.mkdir(parents=True)
    info.write_to_directory(str(folder))
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(folder / "sums-train.arrow")
    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))


def test_a_name_of_the_hub(cache):
    assert read_data("hf://me/sums/easy/train") == read_data("hf://me/sums/train") == ROWS
    with pytest.raises(ValueError, match=r"cannot read hf://me/sums/test: Unknown split .*HF_HUB_OFFLINE=1 reads"):
        read_data("hf://me/sums/test")
    with pytest.raises(ValueError, match=r"cannot read hf://me/none/train: Couldn't reach 'me/none' on the Hub"):
        read_data("hf://me/none/train")


def test_addresses_of_the_hub(tmp_path):
    address = "hf://openai/gsm8k@v1/main/train"
    values = MINIMAL | {"reward": {"function": "m:f"}, "evaluation": {"path": {"a": address}}}
    config = Config.parse(values | {"data": {"path": address}})
    assert config.data_files == {}
    assert Config.parse(config.model_dump()) == config
    (tmp_path / "config.yaml").write_text(config.to_yaml("/start"))
    assert Config.load(tmp_path / "config.yaml").data.path == address
    with pytest.raises(ConfigError, match=r"data\.path: expected hf://OWNER/NAME/SPLIT or .*, got 'hf://openai/gsm8k'"):
        Config.parse(values | {"data": {"path": "hf://openai/gsm8k"}})
