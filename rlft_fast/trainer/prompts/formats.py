"""Rows of data from files, dataset folders and the Hub. The name of a file says its format."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlft_fast.config import HUB, hub_parts
from rlft_fast.errors import brief
from rlft_fast.files import read_text

Row = dict[str, Any]

_EXPECTED = (
    "expected JSON lines in UTF-8 with one row each, one JSON array, a file .csv, .tsv or .parquet, a folder written "
    f"by datasets.save_to_disk, or {HUB}OWNER/NAME/SPLIT"
)
_LONGEST_FIELD = 2**31 - 1  # of a CSV file; Python's own limit of 128 KiB is short for test cases of programs


def read_data(source: str) -> list[Row]:
    """The rows of a source.

    Args:
        source: a file of JSON lines or with one JSON array, a file ``.csv``, ``.tsv`` or ``.parquet``, a folder
            written by datasets.save_to_disk, or ``hf://OWNER/NAME/SPLIT``. A text may be compressed as ``.gz``.

    Raises:
        ValueError: the source cannot be read.
    """
    if source.startswith(HUB):
        return _read_hub(source)
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    suffixes = suffixes_of(path)
    try:
        if suffixes == [".parquet"]:
            return _read_parquet(path)
        text = _read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the data {source}: {brief(error)} ({_EXPECTED})") from error
    return _FORMATS.get(suffixes[0], _rows_of_json)(text, source)


def suffixes_of(path: Path) -> list[str]:
    """The last suffix of a file's name, and the suffix before ``.gz``, in lower case."""
    suffix, before = path.suffix.lower(), Path(path.stem).suffix.lower()
    return [before, suffix] if suffix == ".gz" else [suffix]


def _read_text(path: Path) -> str:
    """The text of a file, with its line breaks as they are: a field of a CSV file may have some."""
    if suffixes_of(path)[-1] != ".gz" or not path.is_file():
        return read_text(path, newline="")
    try:
        return read_text(path, newline="", content=gzip.decompress(path.read_bytes()))
    except (EOFError, zlib.error) as error:
        raise ValueError(f"its compressed text is damaged: {error}") from error


def _rows_of_json(text: str, source: str) -> list[Row]:
    if text.lstrip().startswith("["):
        return _rows_of_array(text, source)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028 within a text
        if line.strip():
            try:
                row = parse_json(line)
            except (ValueError, RecursionError) as error:  # also of numbers too long and lists too deep
                raise ValueError(f"{source}, line {number} is not JSON: {error} ({_EXPECTED})") from error
            rows.append(require_object(row, f"{source}, line {number}"))
    return rows


def _rows_of_array(text: str, source: str) -> list[Row]:
    try:
        elements = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} begins with [ and is not one JSON array: {error}") from error
    return [require_object(row, f"{source}, element {i} of the array") for i, row in enumerate(elements)]


def parse_json(text: str) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is not JSON, or has a key twice in an object: Python would drop the first value.
    """
    return _DECODER.decode(text)


def _with_unlike_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice, and one value would be lost")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_with_unlike_keys)


def require_object(row: Any, where: str) -> Row:
    """The row. Raises ValueError, with its place, where it is no JSON object."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}")
    return row


def _rows_of_csv(text: str, source: str, delimiter: str = ",") -> list[Row]:
    """Every value is a text. A number of another program may have lost zeros in front."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        records = [(reader.line_num, record) for record in reader if record]
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num} is not CSV: {error}") from error
    finally:
        csv.field_size_limit(before)
    names = records[0][1] if records else []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{source} has two columns {twice[0]!r} in its first line: rename one")
    for number, record in records:
        if len(record) != len(names):
            raise ValueError(
                f"{source}: the row that ends in line {number} has {len(record)} fields, and the first line names "
                f"{len(names)} columns: a field with a comma, quote or line break stands in double quotes"
            )
    return [dict(zip(names, record, strict=True)) for _, record in records[1:]]


def _rows_of_tsv(text: str, source: str) -> list[Row]:
    return _rows_of_csv(text, source, "\t")


_FORMATS: dict[str, Callable[[str, str], list[Row]]] = {".csv": _rows_of_csv, ".tsv": _rows_of_tsv}


def _read_parquet(path: Path) -> list[Row]:
    with parquet_file(path) as file:  # read_table would add columns of folders named as key=value
        return rows_of_table(file.read())


def rows_of_table(table: Any) -> list[Row]:
    """The rows of a pyarrow table. Of columns of JSON, in which datasets writes values of mixed types, the values."""
    readers = {field.name: read for field in table.schema if (read := _json_reader(field.type)) is not None}
    rows = table.to_pylist()
    for row in rows:
        row.update({name: read(row[name]) for name, read in readers.items()})
    return rows


def _json_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Reads the texts of JSON in a value of a pyarrow type; None: it has none."""
    import pyarrow

    if isinstance(kind, getattr(pyarrow, "JsonType", ())):  # new in pyarrow 19
        return _of_json
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        read = _json_reader(kind.value_type)
        return None if read is None else lambda values: values and [*map(read, values)]
    if pyarrow.types.is_struct(kind):
        fields = {field.name: read for field in kind if (read := _json_reader(field.type)) is not None}
        return (lambda value: value and value | {x: read(value[x]) for x, read in fields.items()}) if fields else None
    return None


def _of_json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:  # datasets, too, takes it for a text then
        return text


def parquet_file(path: Path) -> Any:
    """pyarrow's ``ParquetFile``. Raises ValueError where pyarrow is missing, and for columns of the same name."""
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ValueError("parquet needs `pip install pyarrow`") from error
    file = ParquetFile(path)
    names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        file.close()
        raise ValueError(f"it has two columns {twice[0]!r}: rename one")
    return file


def _read_folder(path: Path) -> list[Row]:
    try:
        from datasets import load_from_disk
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} is a folder: reading dataset folders needs `pip install datasets`") from error
    try:
        dataset = load_from_disk(str(path))
    except IndexError:  # datasets writes no file for no rows, and cannot read the folder again
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a folder written by datasets.save_to_disk: {error}") from error
    if isinstance(dataset, dict):
        raise ValueError(f"{path} holds the splits {sorted(dataset)}: name one, for example {path / 'train'}")
    return dataset.to_list()


def _read_hub(source: str) -> list[Row]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(f"{source} is a dataset of the Hub, which needs `pip install datasets`") from error
    name, revision, subset, split = hub_parts(source)
    try:
        return load_dataset(name, subset, split=split, revision=revision).to_list()
    except Exception as error:  # datasets documents no errors, and asks many libraries
        raise ValueError(
            f"cannot read {source}: {brief(error)}. Without a network, HF_HUB_OFFLINE=1 reads what is in the cache "
            "of datasets"
        ) from error
