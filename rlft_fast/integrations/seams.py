"""Finds the functions of other trainers that rlft_fast replaces, and refuses versions without them."""

import inspect
import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

__all__ = ["require_function"]


def require_function(
    name: str, parameters: tuple[str, ...], tested: str, *, and_no_others: bool = False
) -> Callable[..., Any]:
    """A function of another package.

    Args:
        name: "package.module:function", or "package.module:Class.function".
        parameters: names that the function has to take.
        tested: the version of the package that is known to have the function.
        and_no_others: the function takes these parameters alone, in this order.

    Raises:
        ImportError: the package is not installed, it has no such function, or the function takes other parameters.
    """
    package = name.partition(":")[0].partition(".")[0]
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise _unfit(package, f"has no {name} ({error})", tested) from error
    takes = tuple(inspect.signature(function).parameters)
    if missing := [each for each in parameters if each not in takes]:
        raise _unfit(package, f"has a {name} without the parameter {', '.join(missing)}", tested)
    if and_no_others and takes != parameters:
        raise _unfit(package, f"has a {name} that takes ({', '.join(takes)})", tested)
    return function


def _unfit(package: str, reason: str, tested: str) -> ImportError:
    installed = version(package) if find_spec(package) else "(not installed)"
    return ImportError(
        f"{package} {installed} {reason}, expected {package} {tested}: install {package}=={tested}, or leave "
        "rlft_fast's integration out"
    )
