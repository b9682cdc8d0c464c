"""Texts that a user's Jinja template makes of a row's columns."""

from collections.abc import Callable

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(template: str, key: str) -> Callable[..., str]:
    """A function of a mapping of columns. It may raise any error, because filters may; a missing column is one.

    Args:
        template: Jinja; it runs in Jinja's sandbox.
        key: of the configuration, for messages.

    Raises:
        ValueError: it is no Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template).render
    except TemplateSyntaxError as error:
        raise ValueError(f"{key} is no Jinja template: {error}") from error
