"""Reads YAML files and values of the command line as the types of their keys say.

A text is taken as it is written: ``010``, ``2024-01-01``, ``no`` and, on the command line, ``a # b`` are texts where
a text belongs. All other values are read as YAML 1.2 does: ``010`` is 10 and ``1:30`` no number, where PyYAML, which
reads YAML 1.1, finds 8 and 90.
"""

import re
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml

from rlft_fast.config.base import Section, section_of

_NULL = "tag:yaml.org,2002:null"
_TEXT = "tag:yaml.org,2002:str"
_PLAIN = {  # YAML 1.2.2, section 10.3.2, and thousands as in 1_000; the characters are those that a value begins with
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "merge": ("<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    """Safe YAML with the plain values of YAML 1.2. A duplicate key is an error: PyYAML would keep the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # no other can be a key
            if key.value in names:
                problem = f"the key {key.value} stands in it twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or YAML 1.2 would read as something else."""


_Loader.yaml_implicit_resolvers = {}  # in place of those of YAML 1.1
for _name, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(_: _Loader, node: yaml.ScalarNode) -> int | str:
    try:
        return int(node.value.replace("_", ""), 16 if node.value.startswith("0x") else 10)
    except ValueError:  # more digits than Python reads
        return node.value


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_file(text: str, model: type[Section]) -> Any:
    """The values in the text of a YAML file, by the types of a section's keys.

    Raises:
        yaml.YAMLError: the text is no YAML, or a key stands twice.
        RecursionError: it is nested too deeply.
    """
    return _read(text, model)


def read_value(text: str, key: str, model: type[Section]) -> Any:
    """The value of one key, as it stands on the command line.

    ``null`` is null where the key may be null. ``{`` begins a mapping and ``[`` a list where the key may have one, both
    in YAML. One element stands for a list of it.

    Args:
        text: the value.
        key: dotted.
        model: the section that the key is in.

    Raises:
        yaml.YAMLError: a list or a mapping is no YAML.
    """
    annotation = _annotation_of(key, model)
    kinds = [*_members(annotation)]
    if text == "null" and NoneType in kinds:
        return None
    opens = {"{": any(_is_mapping(kind) for kind in kinds), "[": any(get_origin(kind) is tuple for kind in kinds)}
    if opens.get(text[:1], False) or (Any in kinds and text[:1] in opens):
        _require_whole_texts(text)
        return _read(text, annotation)
    loader = _Loader("")
    is_text = not text or str in kinds or _element(kinds) is not None
    tag = _TEXT if is_text else loader.resolve(yaml.ScalarNode, text, (True, False))
    return _construct(loader, yaml.ScalarNode(tag, text), annotation)


def write(values: dict[str, Any]) -> str:
    """YAML that reads as the same values, also with readers of YAML 1.1."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def _read(text: str, annotation: Any) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, annotation)
    finally:
        loader.dispose()


def _construct(loader: _Loader, node: Any, annotation: Any) -> Any:
    kinds = [*_members(annotation)]
    if isinstance(node, yaml.ScalarNode) and str in kinds and node.tag != _NULL:
        return node.value
    if isinstance(node, yaml.ScalarNode) and node.tag != _NULL and (element := _element(kinds)) is not None:
        return [_construct(loader, node, element)]
    if isinstance(node, yaml.SequenceNode):
        elements = next((get_args(kind) for kind in kinds if get_origin(kind) is tuple), None)
        if elements is not None:
            of_each = [elements[0] if elements[-1] is ... else kind for kind in elements]
            of_each += [of_each[-1]] * len(node.value)  # too many are refused later
            return [_construct(loader, item, kind) for item, kind in zip(node.value, of_each, strict=False)]
    if isinstance(node, yaml.MappingNode) and any(_is_mapping(kind) for kind in kinds):
        loader.flatten_mapping(node)
        if all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            return {key.value: _construct(loader, item, _inner(key.value, annotation)) for key, item in node.value}
    return loader.construct_object(node, deep=True)


def _annotation_of(key: str, model: Any) -> Any:
    annotation = model
    for name in key.split("."):
        annotation = _inner(name, annotation)
    return annotation


def _inner(name: str, annotation: Any) -> Any:
    """Type of a key in a section or in a mapping; Any for a key that is unknown, which is refused later."""
    if (section := section_of(annotation)) is not None:
        field = section.model_fields.get(name)
        return Any if field is None else field.annotation
    return next((get_args(kind)[1] for kind in _members(annotation) if get_origin(kind) is dict), Any)


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a value may have."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _element(kinds: Iterable[Any]) -> Any:
    """Type of the elements, if the value is a list of any length; else None."""
    return next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple and get_args(kind)[-1] is ...), None)


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict or section_of(kind) is not None


def _require_whole_texts(text: str) -> None:
    """Refuses a line break in a text, which YAML would read as a space."""
    events: Iterable[Any] = yaml.parse(text, _Loader)
    for event in events:
        if isinstance(event, yaml.ScalarEvent) and event.start_mark.line != event.end_mark.line:
            problem = 'a line break in a text is \\n in double quotes, as in ["a\\nb"]'
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
