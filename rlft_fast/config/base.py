"""Base class of every configuration section, and the error messages for wrong values."""

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from rlft_fast.config.peers import KEYS, REASONS


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the key and says what to do."""


_RULE = "is_rule"
_LARGEST_INTEGER = 2**31 - 1  # of a key without a bound of its own: products of two fit into 64 bits
_SMALLEST, _LARGEST = 1e-30, 1e30  # of a number: float32 holds it, and its products with losses and logits


def rule(check: Callable[[Any], Iterator[str]]) -> Callable[[Any], Iterator[str]]:
    """Marks a method of a section that yields a message for each pair of values that do not go together."""
    setattr(check, _RULE, True)
    return check


class Section(BaseModel):
    """Part of the configuration. It is immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False,
        hide_input_in_errors=True,  # it may have a password
    )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:  # pyrefly: ignore [bad-class-definition]
        """Refuses every key. The error of pydantic shows the value even with ``hide_input_in_errors``.

        Raises:
            ConfigError: always, because sections are immutable.
        """
        try:
            super().__setattr__(name, value)
        except ValidationError:
            kind = type(self).__name__
            raise ConfigError(f"{name} cannot be set: a {kind} is immutable, so make a new {kind}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false for a number: pydantic would read true as 1."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("Input should not be true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _numbers_fit(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses numbers that float32, or an integer of 64 bits, does not hold, or not with room to compute."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        largest = 2**63 - 1 if any(hasattr(mark, "le") for mark in field.metadata) else _LARGEST_INTEGER
        if Any not in get_args(field.annotation):  # else it is for other libraries
            for number in _numbers(value):
                _require_fit(number, largest)
        return value

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        """Tells all messages of all rules. Pydantic stops at the first error of a model."""
        methods = [method for kind in reversed(type(self).__mro__) for method in vars(kind).values()]
        if broken := [message for method in methods if hasattr(method, _RULE) for message in method(self)]:
            raise ValueError("\n".join(broken))
        return self


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


def _require_fit(number: int | float, largest: int) -> None:
    if isinstance(number, int) and abs(number) > largest:
        raise ValueError(f"an integer must be at most {largest} in size")
    if isinstance(number, float) and number and not _SMALLEST <= abs(number) <= _LARGEST:
        raise ValueError(f"the number {number:g} must be 0, or from {_SMALLEST:g} to {_LARGEST:g} in size")


def set_key(values: dict[str, Any], keys: list[str], value: Any) -> None:
    """Sets one value of a nested dictionary; missing sections are added.

    Args:
        values: the nested dictionary.
        keys: parts of the dotted key.
        value: the new value.

    Raises:
        ConfigError: a part of the key is empty, or the key leads into a value that is no section.
    """
    if "" in keys:
        raise ConfigError(f"unknown key {'.'.join(keys)!r}: a part between dots is empty")
    for i, key in enumerate(keys[:-1]):
        section = {} if values.get(key) is None else values[key]  # None: absent, or null in the file
        if not isinstance(section, dict):
            raise ConfigError(f"{'.'.join(keys)}: {'.'.join(keys[: i + 1])} is a value, not a section")
        values[key] = dict(section)  # a copy: by a YAML anchor, two keys may share one dictionary
        values = values[key]
    values[keys[-1]] = value


def sections(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of the configuration as (dotted name, pydantic field); a section comes before its keys."""
    rows: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        rows.append((prefix + name, field))
        if (section := section_of(field.annotation)) is not None:
            rows += sections(section, f"{prefix}{name}.")
    return rows


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in the annotation of a field, or None if the field holds a plain value or a mapping."""
    if get_origin(annotation) is dict:
        return None
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def sections_by_name(annotation: Any) -> type[Section] | None:
    """The section class of the values, where a field holds sections by names that the user gives."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def value_at(values: Any, key: str) -> Any:
    """The value of a dotted key in sections and mappings; None where there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
    return values


_MAX_LINES = 20


def without_password(text: str) -> str:
    """The text without the name and the password of a URL, which stand before ``@``."""
    return re.sub(r"((?<=://).*|^[^/\s@]*:(?!//)\S*)@", "***@", text, flags=re.DOTALL)


class _Short(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_password(x), level)


_SHORT = _Short()  # aliases make a value of a few lines whose whole text has gigabytes
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200


def explain(
    config: type[BaseModel], values: dict[str, Any], problems: Iterable[Any],
    others: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> str:  # fmt: skip
    """Error message with one line per wrong key: the whole key, what was expected, and what was got.

    Args:
        config: class of the whole configuration.
        values: the nested dictionary that was refused.
        problems: ``errors()`` of pydantic's ValidationError.
        others: keys of the configurations of other objectives, by objective.
    """
    by_key: dict[str, list[Any]] = {}
    for problem in problems:
        by_key.setdefault(_key(problem, values), []).append(problem)
    outer = {key[:i] for key in by_key for i, letter in enumerate(key) if letter == "."}
    innermost = [key for key in by_key if key not in outer]
    lines = [*islice((line for key in innermost for line in _lines(config, key, by_key[key], others)), _MAX_LINES)]
    more = len(innermost) - _MAX_LINES
    return "\n".join(lines + ([f"and {more} more wrong keys"] if more > 0 else []))


def _key(problem: Any, values: Any) -> str:
    """Dotted key of a problem. Pydantic's location also names members of unions; those names are left out."""
    *parents, last = problem["loc"] or [""]
    key = []
    for part in parents:
        if (isinstance(values, dict) and part in values) or isinstance(part, int):
            key.append(str(part))
            values = values[part]
    if problem["type"] == "missing" or isinstance(last, int) or (isinstance(values, dict) and last in values):
        key.append(str(last))
    return ".".join(key)


def _lines(
    config: type[BaseModel], key: str, problems: list[Any], others: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Lines about one key. A value that fits no member of a union has one problem per member."""
    kind, got = problems[0]["type"], problems[0]["input"]
    if kind == "extra_forbidden" and (objectives := [name for name, keys in others.items() if key in keys]):
        own = config.model_fields["objective"].default
        yield f"{key} has no meaning for objective: {own}: leave it out (it is a key of {' and '.join(objectives)})"
    elif kind == "extra_forbidden":
        yield from _unknown(key, got, [name for name, _ in sections(config)] + _keys_beside(config, key))
    elif kind == "missing":
        yield f"{key} is missing: it has no default"
    elif kind == "value_error" and isinstance(got, Mapping):  # rules of a section, whose messages name the keys
        for message in problems[0]["msg"].removeprefix("Value error, ").splitlines():
            yield f"{key}: {message}" if key else message
    else:
        own = [problem for problem in problems if problem["type"] == "value_error"]  # it has one of the right types
        problems = own or problems
        first, *more = (_in_words_of_yaml(problem["msg"].removeprefix("Value error, ")) for problem in problems)
        message = " or ".join([first, *(other.removeprefix("Input should be ") for other in more)])
        yield f"{key}: {message}, got {_SHORT.repr(got)}" if key else message


def _keys_beside(config: type[BaseModel], key: str) -> list[str]:
    """The keys of the section that an unknown key is in, where the user has named the section."""
    for name, field in sections(config):
        inner = sections_by_name(field.annotation)
        if inner is not None and key.startswith(f"{name}."):
            given = key.removeprefix(f"{name}.").partition(".")[0]
            return [own for own, _ in sections(inner, f"{name}.{given}.")]
    return []


def _unknown(key: str, value: Any, known: list[str]) -> Iterator[str]:
    """A line about a key that does not exist; about each key in it, where it is a section of another project's."""
    known_names = KEYS.keys() | REASONS.keys()
    if isinstance(value, Mapping) and any(str(n) in known_names or isinstance(x, Mapping) for n, x in value.items()):
        for name, inner in value.items():
            yield from _unknown(f"{key}.{name}", inner, known)
        return
    if (reason := REASONS.get(key.rpartition(".")[2].replace("-", "_"))) is not None:
        yield f"{key} cannot be set: {reason}"
        return
    suggestion = _suggestion(key, known)
    yield f"unknown key {key}" + (f": did you mean {suggestion}?" if suggestion else "")


def _suggestion(key: str, known: list[str]) -> str | None:
    """Our key of the same name elsewhere, else one of nearly the same name there, else the one of another project."""
    section, _, name = key.rpartition(".")
    if same := [other for other in known if other.rpartition(".")[2] == name]:
        return same[0]
    beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=0.85):
        return beside[near[0]]
    if (ours := KEYS.get(name.replace("-", "_"))) is not None:
        of_critic = ours.replace("actor.", "critic.", 1)
        return of_critic if key.startswith("critic.") and of_critic in known else ours
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), None)


def _in_words_of_yaml(message: str) -> str:
    message = re.sub(r" or instance of \w+", "", message)
    return message.replace("valid dictionary", "mapping").replace("valid tuple", "list")
