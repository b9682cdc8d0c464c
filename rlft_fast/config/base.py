"""What every section of the configuration is, how YAML is read, and how mistakes in it are explained."""

import difflib
import os.path
import re
from collections.abc import Iterable
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator


def _expand_user(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"there is no user {path.partition('/')[0][1:]} with a home folder (./~... names a file)")
    return expanded


LocalPath = Annotated[str, Field(min_length=1), AfterValidator(_expand_user)]
"""Of a file or folder; ~ is the home folder, which no shell fills in inside YAML or after ``--key=``."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what to do."""


class Section(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take true for 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("Input should not be true or false")
        return value


class Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-6`` is a number, as in YAML 1.2, and not a text, and every key stands once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuses a key that stands twice, of which the last one would win."""
        node = super().compose_mapping_node(anchor)
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                problem = f"the key {key.value} stands there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.append(key.value)
        return node


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def set_key(values: dict[str, Any], keys: list[str], value: Any) -> None:
    """Sets the nested value that a dotted key names; sections that are absent are made."""
    for i, key in enumerate(keys[:-1]):
        section = {} if values.get(key) is None else values[key]  # absent, or a section that the file switches off
        if not isinstance(section, dict):
            raise ConfigError(f"{'.'.join(keys)}: {'.'.join(keys[: i + 1])} is a value, not a section")
        values[key] = dict(section)  # a copy: by an anchor of YAML it may be another section, too
        values = values[key]
    values[keys[-1]] = value


def sections(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of the configuration as (dotted name, pydantic field), sections before what they hold."""
    rows: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        rows.append((prefix + name, field))
        if (section := _section_of(field.annotation)) is not None:
            rows += sections(section, f"{prefix}{name}.")
    return rows


def _section_of(annotation: Any) -> type[Section] | None:
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def explain(config: type[BaseModel], values: dict[str, Any], problems: Iterable[Any]) -> str:
    """What pydantic found wrong, a line per key: the whole key, what was got and, if need be, what was meant.

    Args:
        config: the whole configuration.
        values: what it was to be made from.
        problems: ``errors()`` of pydantic's ValidationError.
    """
    by_key: dict[str, list[Any]] = {}
    for problem in problems:
        by_key.setdefault(_key(problem, values), []).append(problem)
    within = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]  # which says more
    return "\n".join(_line(config, key, by_key[key]) for key in within)


def _key(problem: Any, values: Any) -> str:
    """The dotted key of a problem: its location without the names that pydantic gives the members of a union."""
    *parents, last = problem["loc"] or [""]
    key = []
    for part in parents:
        if (isinstance(values, dict) and part in values) or isinstance(part, int):
            key.append(str(part))
            values = values[part]
    if problem["type"] == "missing" or isinstance(last, int) or (isinstance(values, dict) and last in values):
        key.append(str(last))
    return ".".join(key)


def _line(config: type[BaseModel], key: str, problems: list[Any]) -> str:
    """What is wrong with a key; a value that is no member of a union has a problem with each."""
    if problems[0]["type"] == "extra_forbidden":
        known = [name for name, _ in sections(config)]
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        suggestion = (same_name or close or [None])[0]
        return f"unknown key {key}" + (f": did you mean {suggestion}?" if suggestion else "")
    if problems[0]["type"] == "missing":
        return f"{key} is missing: it has no default"
    first, *others = (_in_words_of_yaml(problem["msg"].removeprefix("Value error, ")) for problem in problems)
    message = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return f"{key}: {message}, got {problems[0]['input']!r}" if key else message


def _in_words_of_yaml(message: str) -> str:
    message = re.sub(r" or instance of \w+", "", message)
    return message.replace("valid dictionary", "mapping").replace("valid tuple", "list")
