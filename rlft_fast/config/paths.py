"""Paths in a configuration: variables and ``~`` in them, and their form in a file that works from every folder."""

import os
import re
from collections.abc import Mapping
from string import Template
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo

from rlft_fast.files import expand_user

AS_TYPED = {"is_typed": True}
"""Pydantic's context for values of a file or a command line, where ``$HOME`` is a variable, and ``$$`` the letter $."""


def as_typed(folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Pydantic's context for writing values as a file has them, with paths from this folder on."""
    return {"folder": os.fspath(folder)}


def expand_path(path: str, info: ValidationInfo) -> str:
    """A path with its variables, if it was typed, and with a home folder in place of ``~``.

    Raises:
        ValueError: there is no such variable or home folder, or the path has a character that no path has.
    """
    if "\0" in path:
        raise ValueError("a path must not have the character \\0")
    return expand_user(_with_variables(path) if info.context else path)


HUB = "hf://"
"""What the address of a dataset on the Hub begins with."""
_HUB_DATA = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<subset>[^/]+))?/(?P<split>[^/]+)")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def find_model(path: str, info: ValidationInfo) -> str:
    """`expand_path`; for the name of a model on the Hub, its folder in the Hugging Face cache. No network is asked."""
    path = expand_path(path, info)
    if os.path.exists(path) or not _HUB_NAME.fullmatch(path):
        return path
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # no name of a model
        return path
    return os.path.dirname(found) if isinstance(found, str) else path


def _with_variables(path: str) -> str:
    try:
        expanded = Template(path).substitute(os.environ)
    except KeyError as error:
        raise ValueError(
            f"there is no environment variable {error.args[0]}: set it, or write $$ for the letter $"
        ) from error
    except ValueError as error:
        raise ValueError("a $ begins the name of a variable, as in $HOME: write $$ for the letter $") from error
    if not expanded:
        raise ValueError("the variable is empty")
    return expanded


def typed_path(path: str, info: SerializationInfo) -> str:
    """A path as a file has it, from the folder of `as_typed` on."""
    context: Any = info.context
    return path if context is None else os.path.join(context["folder"], path).replace("$", "$$")


class HubParts(NamedTuple):
    """What an address ``hf://OWNER/NAME[@REVISION][/SUBSET]/SPLIT`` names."""

    name: str
    revision: str | None
    subset: str | None
    split: str


def hub_parts(address: str) -> HubParts:
    """The parts of the address of a dataset on the Hub.

    Raises:
        ValueError: this is no such address.
    """
    found = _HUB_DATA.fullmatch(address.removeprefix(HUB))
    if found is None:
        raise ValueError(
            f"expected {HUB}OWNER/NAME/SPLIT or {HUB}OWNER/NAME/SUBSET/SPLIT, such as {HUB}openai/gsm8k/main/train"
        )
    return HubParts(**found.groupdict())


def expand_data(path: str, info: ValidationInfo) -> str:
    """`expand_path`; the address of a dataset on the Hub is checked, and stays as it is."""
    return path if path.startswith(HUB) and hub_parts(path) else expand_path(path, info)


def typed_data(path: str, info: SerializationInfo) -> str:
    """`typed_path`; the address of a dataset on the Hub stays as it is."""
    return path if path.startswith(HUB) else typed_path(path, info)


def _expand_file(spec: str, info: ValidationInfo) -> str:
    file, _, function = spec.rpartition(":")
    return f"{expand_path(file, info)}:{function}" if file.endswith(".py") else spec


def _typed_file(spec: str, info: SerializationInfo) -> str:
    is_file = spec.rpartition(":")[0].endswith(".py")
    return spec.replace("$", "$$") if is_file and info.context is not None else spec


LocalPath = Annotated[str, Field(min_length=1), AfterValidator(expand_path), PlainSerializer(typed_path)]
"""Path of a file or folder. A shell expands no ``~`` and no ``$HOME`` in YAML, and no ``~`` after ``--key=``."""

DataPath = Annotated[str, Field(min_length=1), AfterValidator(expand_data), PlainSerializer(typed_data)]
"""Path of a file or folder with rows, or the address of a dataset on the Hub."""

ModelPath = Annotated[str, Field(min_length=1), AfterValidator(find_model), PlainSerializer(typed_path)]
"""Path of a model's folder, or a name on the Hub whose model is in the cache. It then is the path of this folder."""

FunctionName = Annotated[str, AfterValidator(_expand_file), PlainSerializer(_typed_file)]
"""A known name, module:function, or file.py:function. A relative file stays relative: metrics have the same name."""


def known_or_function(*names: str) -> AfterValidator:
    """Refuses a `FunctionName` that is neither one of these names nor a function of the user's."""

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            raise ValueError(f"expected one of {', '.join(names)}, or module:function for your own")
        return value

    return AfterValidator(check)
