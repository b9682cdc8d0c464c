"""Texts that a user's Jinja template makes of a row's columns."""

from collections.abc import Callable
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(template: str, key: str, *, writes_null: bool = True) -> Callable[..., str]:
    """A function of a mapping of columns. It may raise any error, because filters may; a missing column is one.

    Args:
        template: Jinja; it runs in Jinja's sandbox.
        key: of the configuration, for messages.
        writes_null: whether a null becomes the text None; otherwise it is an error.

    Raises:
        ValueError: it is no Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, finalize=None if writes_null else _filled
    )
    try:
        return environment.from_string(template).render
    except TemplateSyntaxError as error:
        raise ValueError(f"{key} is no Jinja template: {error}") from error


def _filled(value: Any) -> Any:
    if value is None:
        raise ValueError("it writes a value that is null")
    return value
