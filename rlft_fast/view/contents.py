"""The contents of a run's folder that a page shows, within a limit of bytes."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlft_fast.config import ConfigError, load_config
from rlft_fast.errors import without_panics
from rlft_fast.run import Timeline, drawable, is_exact_integer, parse_json, read_metrics, read_timeline, read_tokens
from rlft_fast.tokenizer_files import check_tokenizer_files
from rlft_fast.view.thumbnails import thumbnails

_MAX_POINTS = 2000  # of one series: more than a curve has pixels
_FIELDS = ("prompt", "completion", "reward", "parts", "finish_reason", "weight_version")

Series = tuple[list[int], list[float]]
Tokens = dict[int, dict[str, np.ndarray]]


class Contents(NamedTuple):
    """A run as the page shows it, made of numbers, texts, lists and mappings that JSON can hold."""

    name: str
    """The path of the folder, as it was given."""
    series: dict[str, Series]
    """Steps and values of each metric."""
    samples: dict[int, list[dict[str, Any]]]
    """By step, in the order of ``samples.jsonl``."""
    tokens: dict[int, dict[str, str]]
    """By step: columns as `rlft_fast.run.records.tokens` names them, each as base64 of its bytes, little-endian."""
    texts: dict[int, str]
    """Texts of the tokens by their ids; {} where no tokenizer was found."""
    thumbnails: dict[str, str]
    """Small copies of images by their names, JPEG as base64."""
    timeline: Timeline | None
    """The newest steps; None: the run has noted none."""
    notes: list[str]
    """Whole sentences about damaged and left out parts."""


def read_run(run: Path, max_bytes: int) -> Contents:
    """Reads a folder.

    Args:
        run: the folder.
        max_bytes: most bytes of samples; the newest are taken.

    Raises:
        ValueError: there is no folder, or it holds no readable metrics.
    """
    if not run.is_dir():
        raise ValueError(f"there is no run in {run}: give the output_dir of a training run")
    series, notes = _read_series(run)
    samples, counts = _read_samples(run / "samples.jsonl", max_bytes, notes)
    columns = _read_tokens(run, counts, max_bytes, notes)
    tokens = {step: {name: _base64(column) for name, column in own.items()} for step, own in columns.items()}
    used = {int(token) for own in columns.values() for token in np.unique(own["token_id_T"])}
    names = {name for own in samples.values() for sample in own for name in sample.get("images", ())}
    texts, small = _token_texts(run, used, notes), thumbnails(run, names, notes)
    return Contents(str(run), series, samples, tokens, texts, small, read_timeline(run), notes)


def _read_series(run: Path) -> tuple[dict[str, Series], list[str]]:
    found: dict[str, dict[int, float]] = {}
    notes: list[str] = []
    for row in read_metrics(run, lambda note: notes.append(f"{note}.")):
        for name, value in row.items():
            if name not in ("step", "time") and value is not None:
                found.setdefault(name, {})[row["step"]] = value
    longest = max(map(len, found.values()), default=0)
    if (stride := -(-longest // _MAX_POINTS)) > 1:
        notes.append(f"Of {longest:,} points of a curve, one in {stride} is shown.")
    series = {}
    for name, points in found.items():
        own = list(points.items())
        every = -(-len(own) // _MAX_POINTS)
        own = own[(len(own) - 1) % every :: every]  # with the newest
        series[name] = ([step for step, _ in own], [float(f"{value:.7g}") for _, value in own])
    return series, notes


def _read_samples(
    path: Path, max_bytes: int, notes: list[str]
) -> tuple[dict[int, list[dict[str, Any]]], dict[int, int]]:
    """The samples of the newest steps, and how many samples each of these steps has.

    If the newest step alone is larger than the limit, its first samples are taken.
    """
    if not path.is_file():
        notes.append(f"There is no {path.name}, so no samples are shown.")
        return {}, {}
    lines, is_whole = _newest_lines(path, max_bytes)
    steps, num_damaged = _by_step(lines)
    if num_damaged:
        notes.append(f"{num_damaged} damaged lines of {path.name} are left out.")
    kept: dict[int, list[dict[str, Any]]] = {}
    room = max_bytes
    for step in sorted(steps, reverse=True):
        sizes = np.cumsum([size for size, _ in steps[step]])
        count = int((sizes <= room).sum())
        if count < len(sizes) and kept:
            break
        kept[step] = [sample for _, sample in steps[step][:count]]
        room -= int(sizes[-1])
        if count < len(sizes):
            notes.append(f"Step {step} has {len(sizes):,} samples, of which the first {count:,} are shown.")
    if kept and (not is_whole or len(kept) < len(steps)):
        limit = f"--max-mib is the limit of a page ({max_bytes / 2**20:g} MiB)"
        notes.append(f"Samples of steps before {min(kept)} are left out: {limit}.")
    return kept, {step: len(steps[step]) for step in kept}


def newest_samples(run: Path, max_bytes: int) -> list[dict[str, Any]]:
    """The samples of the newest step in ``samples.jsonl``, as `Contents.samples` has them; [] where there are none.

    Args:
        run: folder of the run.
        max_bytes: most bytes of the samples.
    """
    path = run / "samples.jsonl"
    if not path.is_file():
        return []
    samples, _ = _read_samples(path, max_bytes, [])
    return samples[max(samples)] if samples else []


def _by_step(lines: list[bytes]) -> tuple[dict[int, list[tuple[int, dict[str, Any]]]], int]:
    """Samples by step, each with the size of its line, and the number of damaged lines."""
    steps: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    num_damaged, step = 0, None
    for line in lines:
        sample = _parse(line)
        num_damaged += sample is None
        step = step if sample is None else sample["step"]
        if step is not None:  # a damaged line keeps its place, since the files of tokens count samples
            fields = sample or dict.fromkeys(_FIELDS)
            fields = {name: value for name, value in fields.items() if name != "step"}
            steps.setdefault(step, []).append((len(line), fields))
    return steps, num_damaged


def _newest_lines(path: Path, max_bytes: int) -> tuple[list[bytes], bool]:
    """The complete lines of the newest steps, and whether these are all lines of the file.

    The oldest of the steps is complete, too. So the file is read from its end, in growing pieces if a single step is
    larger than the limit.
    """
    size = path.stat().st_size
    window = max_bytes
    with path.open("rb") as file:
        while True:
            start = max(size - window, 0)
            file.seek(start)
            *lines, _ = file.read(size - start).split(b"\n")
            if start == 0:
                return lines, True
            first = next(_changes(lines[1:]), None)
            if first is not None:
                return lines[1 + first :], False
            window *= 2


def _changes(lines: list[bytes]) -> Iterator[int]:
    """Numbers of lines whose step is not the step of the line before."""
    before = None
    for i, line in enumerate(lines):
        sample = _parse(line)
        if sample is not None:
            if before is not None and sample["step"] != before:
                yield i
            before = sample["step"]


def _parse(line: bytes) -> dict[str, Any] | None:
    """A sample with fields of the right types; None for a damaged line."""
    try:
        sample = parse_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sample, dict) or not is_exact_integer(sample.get("step")):
        return None
    parts, turns, images = (sample.get(name) for name in ("parts", "turns", "images"))
    texts = {name: sample.get(name) for name in ("prompt", "completion", "finish_reason")}
    named = {name: sample.get(name) for name in ("stop_reason", "environment")}
    return {
        "step": sample["step"],
        **{name: text if isinstance(text, str) else None for name, text in texts.items()},
        "reward": drawable(sample.get("reward")),
        "parts": {name: drawable(part) for name, part in parts.items()} if isinstance(parts, dict) else {},
        "weight_version": sample["weight_version"] if is_exact_integer(sample.get("weight_version")) else None,
        **({"turns": [*map(_turn, turns)]} if isinstance(turns, list) else {}),
        **{name: text for name, text in named.items() if isinstance(text, str)},
        **({"images": [name for name in images if isinstance(name, str)]} if isinstance(images, list) else {}),
    }


def _turn(turn: Any) -> dict[str, Any]:
    """A turn of an episode with fields of the right types."""
    turn = turn if isinstance(turn, dict) else {}
    text, reward = turn.get("text"), drawable(turn.get("reward"))
    return {
        "sampled": turn.get("sampled") is True,
        "text": text if isinstance(text, str) else "",
        **({} if reward is None else {"reward": reward}),
        **({"branch": True} if "kept" in turn else {}),
    }


def _read_tokens(run: Path, counts: Mapping[int, int], max_bytes: int, notes: list[str]) -> Tokens:
    """The columns of the newest steps, as many as the limit admits.

    Args:
        run: folder of the run.
        counts: samples of each step of the page.
        max_bytes: most bytes of all columns.
        notes: gets a sentence about each file that cannot be shown.
    """
    tokens: Tokens = {}
    room = max_bytes
    for step in sorted(counts, reverse=True):
        try:
            found = read_tokens(run, step)
        except ValueError as error:
            notes.append(f"{error}.")
            continue
        if found is None:
            continue
        columns, num_samples = found
        if num_samples != counts[step]:
            notes.append(
                f"The tokens of step {step} are left out: they are of {num_samples:,} samples, samples.jsonl has "
                f"{counts[step]:,}."
            )
            continue
        room -= sum(column.nbytes for column in columns.values())
        if room < 0:
            notes.append(f"Tokens of step {step} and before are left out: --max-mib is the limit of a page.")
            break
        if num_left_out := num_samples - len(columns["sample_B"]):
            notes.append(f"Step {step} has no tokens of its last {num_left_out:,} samples (log_tokens_mib).")
        tokens[step] = columns
    return tokens


def _base64(column: np.ndarray) -> str:
    return base64.b64encode(column.astype(column.dtype.newbyteorder("<")).tobytes()).decode()


def _token_texts(run: Path, used: set[int], notes: list[str]) -> dict[int, str]:
    """The texts of tokens, from the tokenizer of the run's model, or of the model that the run has written."""
    if not used:
        return {}
    try:
        folders = [load_config(run / "config.yaml").model, run / "hf"]
    except ConfigError:
        folders = [run / "hf"]
    for folder in folders:
        try:
            return token_texts(folder, sorted(used))
        except ValueError:
            continue
    notes.append(f"Tokens are shown by their ids: there is no tokenizer in {' or '.join(map(str, folders))}.")
    return {}


def token_texts(folder: str | Path, ids: list[int]) -> dict[int, str]:
    """The texts of those tokens that a tokenizer has.

    Raises:
        ValueError: the folder holds no tokenizer.
    """
    if (Path(folder) / "tokenizer.json").is_file():  # read without transformers, which takes seconds to import
        return _texts_of_file(Path(folder) / "tokenizer.json", ids)
    from rlft_fast.models import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return {
        token: _token_text(str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token)))
        for token in ids
        if 0 <= token < len(tokenizer)
    }


def _texts_of_file(path: Path, ids: list[int]) -> dict[int, str]:
    from tokenizers import Tokenizer

    try:
        check_tokenizer_files(path.parent)
        with without_panics():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no error of its own for a damaged file
        raise ValueError(f"{path} is damaged: {error}") from error
    pieces = {token: tokenizer.id_to_token(token) for token in ids if token >= 0}
    return {
        token: _token_text(tokenizer.decode([token], skip_special_tokens=False), piece)
        for token, piece in pieces.items()
        if piece is not None
    }


def _token_text(text: str, piece: str) -> str:
    # SentencePiece drops the space before the first word of a text.
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text
