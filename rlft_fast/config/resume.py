"""Which settings a run must share with the run that it continues: all that are not marked `MayChange`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from rlft_fast.config.base import Section, section_of, sections_by_name

T = TypeVar("T")


class _MayChange:
    """The mark of a field."""


MayChange = Annotated[T, _MayChange()]
"""Type of a key that may change when a run is resumed, because the run learns the same up to rounding and chance.

On a section that may be null, the mark says that the section may come or go. The keys in the section have their own.
"""


def fixed_settings(section: Section) -> dict[str, Any]:
    """The settings that may not change, nested by section, with values that JSON can hold."""
    values, kept = section.model_dump(mode="json"), {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            kept[name] = fixed_settings(value)
        elif sections_by_name(field.annotation) is not None:
            kept[name] = {key: fixed_settings(own) for key, own in value.items()}
        elif not any(isinstance(mark, _MayChange) for mark in field.metadata):
            kept[name] = values[name]
    return kept


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], section: type[Section], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, as (dotted key, value before, value now).

    Args:
        before: `fixed_settings` of the run. Keys that it lacks, as an older version's does, do not differ.
        now: `fixed_settings` of the run that continues it.
        section: class of the section that both are of.
        prefix: of the dotted keys.
    """
    for name in (name for name in now if name in before):
        annotation = section.model_fields[name].annotation
        inner, by_name = section_of(annotation), sections_by_name(annotation)
        if inner is not None and isinstance(before[name], Mapping) and isinstance(now[name], Mapping):
            yield from changed_settings(before[name], now[name], inner, f"{prefix}{name}.")
        elif by_name is not None and before[name].keys() == now[name].keys():
            for key in now[name]:
                yield from changed_settings(before[name][key], now[name][key], by_name, f"{prefix}{name}.{key}.")
        elif before[name] != now[name]:
            yield prefix + name, before[name], now[name]
