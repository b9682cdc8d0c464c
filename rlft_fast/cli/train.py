"""``rlft-fast train CONFIG [--key value ...]``: a YAML file, changed by options, validated, then trained."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from rlft_fast.cli.parser import Parser
from rlft_fast.config import Config, ConfigError, sections
from rlft_fast.errors import printable

_FLAGS = ("-h", "--help", "--resume", "--force", "--dry-run", "--no-memory-check")


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    options = _parser().parse_args(rest)
    config = Config.load(options.config, overrides)
    if options.dry_run:
        print(config.to_yaml(), end="")
        return 0
    require_writable(Path(config.output_dir))
    from rlft_fast.engine import CheckpointManager
    from rlft_fast.trainer import require_unlocked, require_usable, train
    from rlft_fast.world import leaving_process_group

    require_unlocked(Path(config.output_dir))  # by another run, which would also be in the way of its memory
    require_usable(config, config_path=options.config, resume=options.resume)
    checkpoint = CheckpointManager(Path(config.output_dir) / "checkpoints").latest()
    if checkpoint is not None and not options.resume:
        raise ValueError(
            f"{config.output_dir} holds a run with the checkpoint {checkpoint.name}: continue it with --resume, "
            "or set another output_dir, or delete the folder"
        )
    _check_memory(config, refuse=options.memory_check)
    with leaving_process_group():
        train(config, resume=options.resume, force=options.force)
    return 0


def require_writable(output_dir: Path) -> None:
    """Raises ValueError if a run could not write its folder, which is not made yet: the run may still be refused."""
    try:
        nearest = next(place for place in (output_dir, *output_dir.parents) if place.exists())
        reason = "" if nearest.is_dir() else f"{nearest} is a file"
        if not reason and not os.access(nearest, os.W_OK | os.X_OK):
            reason = f"there is no permission to write to {nearest}"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ValueError(f"output_dir {output_dir} cannot be written: {reason}: name another folder")


def _check_memory(config: Config, *, refuse: bool) -> None:
    """Says before the run, not in it, that it needs more memory than there is: by ValueError, or by a warning."""
    from rlft_fast.engine.memory import DoesNotFitError, PlanError, check_run
    from rlft_fast.engine.sharding import device_memory, host_memory
    from rlft_fast.world import get_device

    device, world_size = get_device(), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check_run(config, world_size, device_memory(device), device.type, host_memory())
    except DoesNotFitError as error:
        if refuse:
            raise ValueError(f"{error}. (--no-memory-check starts the run all the same)") from error
        warning = str(error)
    except PlanError as error:
        warning = f"it is not known whether the run fits into memory: {error}"
    else:
        return
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {printable(warning)}", file=sys.stderr)


def split_overrides(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separates configuration keys from everything else.

    Every ``--key value`` and ``--key=value`` that is no flag of the command is taken for a configuration key, known or
    not: the configuration knows what a misspelt one was meant to be.

    Args:
        arguments: command-line arguments of ``train``.

    Returns:
        The other arguments in order, and the keys' values as YAML texts.

    Raises:
        ConfigError: a key without a value, or a value that is no YAML.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if argument in _FLAGS or not argument.startswith("--"):
            rest.append(argument)
            continue
        key, equals, value = argument.removeprefix("--").partition("=")
        overrides[key] = _checked(key, value if equals else next(remaining, None), may_be_option=bool(equals))
    return rest, overrides


def _checked(key: str, value: str | None, may_be_option: bool) -> str:
    if value is None or (value.startswith("--") and not may_be_option):
        raise ConfigError(
            f"--{key} needs a value: --{key} VALUE or --{key}=VALUE (only {', '.join(_FLAGS)} stand alone)"
        )
    try:
        yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key}: {value!r} is no YAML; put a text with special characters in '\"...\"'") from error
    return value


# ---- help -----------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast train",
        usage="rlft-fast train CONFIG [--key value ...] [--resume [--force]] [--dry-run] [--no-memory-check]",
        description="Train a policy as a YAML file says. Every key below can stand in the file, and every one can be "
        "given as an option, which wins: --rollout.temperature 0.7. Values are YAML.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in output_dir")
    parser.add_argument(
        "--force", action="store_true", help="with --resume: also with other data, another seed, algorithm or reward"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--no-memory-check", dest="memory_check", action="store_false",
        help="warn of a run that seems to need more memory than there is, instead of refusing it",
    )  # fmt: skip
    parser.add_argument("-h", "--help", action=_PrintHelp, nargs=0, help="print this and stop")
    return parser


class _PrintHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(f"{parser.format_help()}\n{key_reference(min(shutil.get_terminal_size().columns, 120))}")
        parser.exit()


def key_reference(width: int) -> str:
    """Every configuration key under its section, with its meaning, type and default.

    Args:
        width: characters of a line.
    """
    rows = dict(sections(Config))
    titles = {key: field for key, field in rows.items() if any(other.startswith(f"{key}.") for other in rows)}
    column = max(len(key) for key in rows) + 6
    blocks = []
    for section in ("", *titles):
        lines = [textwrap.fill(_heading(section, titles[section]), width) if section else "configuration:"]
        for key, field in rows.items():
            if key not in titles and key.rpartition(".")[0] == section:
                indent = " " * column
                meaning = textwrap.fill(
                    _meaning(field), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
                )
                lines.append(f"  --{key}".ljust(column) + meaning.removeprefix(indent))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _heading(section: str, field: Any) -> str:
    left_out = not field.is_required() and field.default is None
    return f"{section}: {field.description}" + (" (left out by default)" if left_out else "")


def _meaning(field: Any) -> str:
    if field.is_required():
        note = "required"
    else:
        note = "default " + (field.default if isinstance(field.default, str) else json.dumps(field.default))
    return f"{field.description} ({_type_name(field.annotation, field.metadata)}; {note})"


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
    if origin is tuple and arguments[-1] is ...:
        return f"[{_type_name(arguments[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(_type_name(argument) for argument in arguments)}]"
    bounds = [f"{sign} {getattr(m, bound)}" for m in metadata for bound, sign in _BOUNDS.items() if hasattr(m, bound)]
    return " ".join([_NAMES[origin or annotation], ", ".join(bounds)]).rstrip()
