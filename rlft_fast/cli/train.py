"""``rlft-fast train CONFIG [--key value ...]``: trains as a YAML file says; options change the file's values."""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rlft_fast.cli.keys import key_reference, split_overrides
from rlft_fast.cli.parser import Parser
from rlft_fast.config import Config
from rlft_fast.errors import printable


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    options = _parser().parse_args(rest)
    config = Config.load(options.config, overrides)
    if options.ray and config.cluster is None:
        config = Config.load(options.config, {"cluster": "{}"} | overrides)
    if options.dry_run:
        print(config.to_yaml(), end="")
        return 0
    require_writable(Path(config.output_dir))
    from rlft_fast.engine import CheckpointManager
    from rlft_fast.trainer import require_unlocked, require_usable, train
    from rlft_fast.world import leaving_process_group

    require_unlocked(Path(config.output_dir))  # first: a run in the same folder also occupies the memory checked below
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
    """Raises ValueError if a run could not write its folder. The folder is not made: the run may still be refused."""
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
    """Compares the memory plan with the machine before the run starts; a run that does not fit is refused or warned of.

    Raises:
        ValueError: the run does not fit, and `refuse` is set.
    """
    from rlft_fast.engine.memory import DoesNotFitError, MemoryPlanError, check_run
    from rlft_fast.engine.sharding import device_memory, host_memory
    from rlft_fast.world import World

    device, world_size = World.current().device, int(os.environ.get("WORLD_SIZE", "1"))
    if config.cluster is not None:
        if config.cluster.address is not None:  # of machines that this process does not see
            return
        world_size = config.cluster.actor.num_workers
    try:
        check_run(config, world_size, device_memory(device), device.type, host_memory())
    except DoesNotFitError as error:
        if refuse:
            raise ValueError(f"{error}. (--no-memory-check starts the run all the same)") from error
        warning = str(error)
    except MemoryPlanError as error:
        warning = f"it is not known whether the run fits into memory: {error}"
    else:
        return
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {printable(warning)}", file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast train",
        usage="rlft-fast train CONFIG [--key value ...] [--resume [--force]] [--dry-run]\n"
        "                       [--ray] [--no-memory-check]",
        description="Train a policy as a YAML file says. Every key below can stand in the file. Every key can also be "
        "an option, for example --rollout.temperature 0.7; an option overrides the file. A text is taken as typed, a "
        "list is [a, b], and a mapping {a: b}.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in output_dir")
    parser.add_argument(
        "--force", action="store_true", help="with --resume: accept other data, models and settings than the run had"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--ray",
        action="store_true",
        help="drive workers on a Ray cluster: short for --cluster '{}', one on this machine",
    )
    parser.add_argument(
        "--no-memory-check", dest="memory_check", action="store_false",
        help="warn, instead of refusing the run, if it seems to need more memory than the machine has",
    )  # fmt: skip
    parser.add_argument(
        "-h", "--help", action=_PrintHelp, nargs="?", metavar="SECTION",
        help="print this text, or only the keys of one section, for example rollout",
    )  # fmt: skip
    return parser


class _PrintHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, section: Any, __: Any = None) -> None:
        try:
            keys = key_reference(min(shutil.get_terminal_size().columns, 120), section or "")
        except ValueError as error:
            parser.error(str(error))
        print(keys if section else f"{parser.format_help()}\n{keys}")
        parser.exit()
