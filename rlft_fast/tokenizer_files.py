"""The files of a tokenizer, checked before tokenizers reads them.

At some values the library ends the process, fills the memory, or panics. Nothing of this can be caught later.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlft_fast.files import is_apple_double, read_text

_MOST_IDS = 1 << 24  # the library makes a list of all ids up to the largest; large vocabularies have 2^18 tokens
_MOST_GROWTH = 64  # characters that a normalizer makes of each one; 10^7 characters take 2 GB and half a minute
_MOST_PREPENDED = 1000  # characters


def check_tokenizer_files(folder: str | Path) -> None:
    """Checks the files of a folder that has a tokenizer. Files that are missing are not asked for.

    Raises:
        ValueError: a file cannot be used. The message names the file and the key.
    """
    folder = Path(folder)
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        if is_apple_double(path):
            raise ValueError(f"{path.parent.name}/{path.name} is a file of macOS and no chat template: remove it")
    for name, find in _CHECKS.items():
        try:
            content = json.loads(read_text(folder / name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no JSON: {error}") from error
        if (mistake := next(find(content if isinstance(content, dict) else {}), None)) is not None:
            raise ValueError(f"{name}: {mistake}")


def _in_tokenizer(content: dict[str, Any]) -> Iterator[str]:
    yield from _ids("model.vocab", _get(content, "model", "vocab"))
    added = [token for token in _get(content, "added_tokens", kind=list) if isinstance(token, dict)]
    yield from _ids("added_tokens", {str(token.get("content")): token.get("id") for token in added})
    growth, prepended = _growth(content.get("normalizer"))
    if growth > _MOST_GROWTH or prepended > _MOST_PREPENDED:
        yield (
            f"normalizer makes {growth:.0f} characters of one and adds {prepended} to each text, expected at most "
            f"{_MOST_GROWTH} and {_MOST_PREPENDED}"
        )
    yield from _undefined(_get(content, "post_processor"))


def _in_settings(content: dict[str, Any]) -> Iterator[str]:
    value = content.get("model_max_length")
    if not isinstance(value, (int, float, type(None))):
        yield f"model_max_length is {value!r:.80}, expected a number"


def _in_vocabulary(content: dict[str, Any]) -> Iterator[str]:
    yield from _ids("it", content)


_CHECKS = {
    "tokenizer.json": _in_tokenizer, "tokenizer_config.json": _in_settings, "vocab.json": _in_vocabulary,
    "added_tokens.json": _in_vocabulary,
}  # fmt: skip


def _get(content: Any, *keys: str, kind: type = dict) -> Any:
    """The value of nested keys if it has the kind, or an empty one: the library refuses other kinds itself."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, kind) else kind()


def _ids(key: str, ids: dict[str, Any]) -> Iterator[str]:
    for token, number in ids.items():
        if isinstance(number, int) and not 0 <= number < _MOST_IDS:
            yield f"{key} gives the token {token!r:.80} the id {number}, expected an id from 0 to {_MOST_IDS - 1}"


def _growth(normalizer: Any) -> tuple[float, int]:
    """How many characters a normalizer makes of one at most, and how many it adds to a text."""
    if not isinstance(normalizer, dict):
        return 1, 0
    parts = [_growth(part) for part in _get(normalizer, "normalizers", kind=list)]
    growth, prepended = 1.0, len(_get(normalizer, "prepend", kind=str))
    if (content := normalizer.get("content")) is not None:
        growth = _replaced(_get(normalizer, "pattern"), len(str(content)))
    for each, added in parts:
        growth, prepended = growth * each, prepended + added
    return growth, prepended


def _replaced(pattern: dict[str, Any], length: int) -> float:
    if (text := pattern.get("String")) is not None:
        return max(1.0, length / max(1, len(str(text))))
    try:
        matches_nothing = re.match(str(pattern.get("Regex")), "") is not None  # then it adds a text to each character
    except re.error:  # of another dialect
        matches_nothing = False
    return max(1, length) + matches_nothing


def _undefined(processor: dict[str, Any]) -> Iterator[str]:
    """Special tokens that a template names without an id, at which the library panics."""
    defined = _get(processor, "special_tokens")
    parts = [part for name in ("single", "pair") for part in _get(processor, name, kind=list)]
    for token in (_get(part, "SpecialToken", "id", kind=str) for part in parts):
        if token and token not in defined:
            yield f"post_processor puts the token {token!r:.80} around texts, and its special_tokens do not define it"
