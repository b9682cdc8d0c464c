"""Configuration keys on the command line: ``--key value`` options, and the help text of every key.

pydantic-settings, tyro and jsonargparse do this less well: the first two do not read YAML values, and the last lists
no keys of a section that may be null. Of the three, only tyro suggests a key for a misspelt one.
"""

import json
import textwrap
from collections.abc import Iterable
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlft_fast.config import Config, ConfigError, RunConfig, section_of, sections

_ALONE = ("-h", "--help", "--resume", "--force", "--dry-run", "--fit", "--ray", "--no-memory-check", "--tokens")
FLAGS = (*_ALONE, "--replay", "--host", "--port", "--show", "--samples")
"""Options of ``train``, ``serve``, ``eval`` and ``data`` that are no configuration keys."""


def split_overrides(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separates configuration keys from the other arguments.

    Every option that is not in `FLAGS` counts as a configuration key. `Config.load` refuses an unknown key, and
    suggests the right one.

    Args:
        arguments: command-line arguments; keys are given as ``--key value`` or ``--key=value``.

    Returns:
        The other arguments in order, and the value of each key as it was typed.

    Raises:
        ConfigError: a key has no value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option in FLAGS or not option.startswith("--"):
            rest.append(argument)
            continue
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ConfigError(
                    f"{option} needs a value: {option} VALUE or {option}=VALUE (only {', '.join(_ALONE)} stand alone)"
                )
        overrides[option.removeprefix("--")] = value
    return rest, overrides


def key_reference(width: int, section: str = "", config: type[RunConfig] = Config) -> str:
    """Help text: every configuration key under its section, with type, default and meaning.

    Args:
        width: characters per line.
        section: a section such as "rollout", to list only its keys; "" lists all keys.
        config: class of the configuration.

    Raises:
        ValueError: there is no such section.
    """
    fill = partial(textwrap.fill, width=width, break_on_hyphens=False)
    blocks: dict[str, list[str]] = {"": ["configuration:"]}
    for key, field in sections(config):
        if section_of(field.annotation) is not None:
            absent = not field.is_required() and field.default is None
            blocks[key] = [fill(f"{key}: {field.description}" + " (absent by default)" * absent)]
        else:
            heading = fill(f"  --{key}  {_type_and_default(field)}", subsequent_indent=" " * 8)
            meaning = fill(field.description, initial_indent=" " * 6, subsequent_indent=" " * 6)
            blocks[key.rpartition(".")[0]] += [heading, meaning]
    shown = [block for name, block in blocks.items() if not section or f"{name}.".startswith(f"{section}.")]
    if not shown:
        raise ValueError(f"there is no section {section}: give one of {', '.join(filter(None, blocks))}")
    return "\n\n".join("\n".join(block) for block in shown)


def _type_and_default(field: Any) -> str:
    if field.is_required():
        note = "required"
    else:
        note = "default " + (field.default if isinstance(field.default, str) else json.dumps(field.default))
    return f"({_type_name(field.annotation, field.metadata)}; {note})"


_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "mapping", NoneType: "null"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type_name(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0], annotation.__metadata__)
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"[{', '.join('...' if argument is ... else _type_name(argument) for argument in arguments)}]"
    bounds = [f"{sign} {getattr(m, bound)}" for m in metadata for bound, sign in _BOUNDS.items() if hasattr(m, bound)]
    return " ".join([_NAMES[origin or annotation], ", ".join(bounds)]).rstrip()
