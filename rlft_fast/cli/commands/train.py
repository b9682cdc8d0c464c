"""``rlft-fast train CONFIG [--key value ...]``: trains as a YAML file says; options change the file's values."""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from rlft_fast.cli.keys import key_reference, split_overrides
from rlft_fast.cli.parser import Parser, path
from rlft_fast.config import OBJECTIVES, Config, ConfigError, RunConfig, load_config
from rlft_fast.errors import Checks, printable


def run(arguments: list[str], objective: str | None = None) -> int:
    """Trains.

    Args:
        arguments: of the command line.
        objective: the only one that the configuration may have; None: any.
    """
    rest, overrides = split_overrides(arguments)
    options = _parser(objective).parse_args(_with_named_checkpoint(rest))
    if options.force and not options.resume:
        raise ConfigError("--force has no meaning without --resume: a run that does not resume has no earlier settings")
    if options.resume == "":
        raise ConfigError("--resume= names no checkpoint: give a name, such as step_00000020, or --resume alone")
    config = load_config(options.config, overrides, objective)
    if options.ray and overrides.get("cluster") == "null":
        raise ConfigError("--ray asks for a cluster, and --cluster null for none: leave one of them out")
    if options.ray and config.cluster is None:
        config = load_config(options.config, {"cluster": "{}"} | overrides, objective)
    if options.fit:
        config = _fitted(config, options.replay)
    checks, output = Checks(), Path(config.output_dir)
    is_writable = checks.passes(lambda: require_writable(output))
    from rlft_fast.engine.memory import changed
    from rlft_fast.trainer import (
        check_folder,
        check_inputs,
        require_replay,
        require_unlocked,
        settle_compute_dtype,
        train,
    )
    from rlft_fast.world import World, leaving_process_group

    is_free = is_writable and checks.passes(lambda: require_unlocked(output))
    if options.replay is not None:
        checks.run(lambda: require_replay(config, options.replay))
    folder = memory = None
    # `train` asks the other ranks, too
    here = settle_compute_dtype(config, World.current(), resume=bool(options.resume))
    if is_free:
        folder = check_folder(config, checks, options.config, resume=options.resume)
    if is_free or not is_writable:  # a run in the same folder occupies memory
        found = checks.run(lambda: _check_memory(_planned(here, options.replay), refuse=options.memory_check))
        values, memory = found or ({}, None)
        config, here = changed(config, values), changed(here, values)
    if options.dry_run or checks.found:
        inputs = check_inputs(here, checks, resume=options.resume, force=options.force)
        checks.raise_found()
        _print_first(here.to_yaml(), f"output_dir: {folder}", *inputs, f"memory: {memory}")
        return 0
    with leaving_process_group():
        train(config, resume=options.resume, force=options.force, replay=options.replay)
    return 0


def _with_named_checkpoint(arguments: list[str]) -> list[str]:
    """``--resume`` takes the argument behind it only if it names a checkpoint: it may be the configuration."""
    joined = [*arguments]
    for i in reversed([i for i, argument in enumerate(arguments) if argument == "--resume"]):
        if i + 1 < len(arguments) and re.fullmatch(r"step_\d+", Path(arguments[i + 1]).name):
            joined[i : i + 2] = [f"--resume={arguments[i + 1]}"]
        else:
            joined.append(joined.pop(i))
    return joined


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


def _planned(config: RunConfig, replay: Path | None) -> RunConfig:
    """The configuration whose memory a run takes: a replay has no generator of the configuration's.

    Raises:
        ValueError: the policy cannot evaluate in the generator's place.
    """
    from rlft_fast.trainer import without_generator

    if replay is None or not isinstance(config, Config) or config.cluster is not None:  # which `train` refuses
        return config
    config = without_generator(config)
    if config.evaluation is None:  # nothing is sampled: nothing here has the memory of a generator elsewhere
        elsewhere = {"backend": "vllm", "servers": ("http://elsewhere",), "temperature": 1.0}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=elsewhere)})
    return config


def _fitted(config: RunConfig, replay: Path | None) -> RunConfig:
    """The configuration with the fastest settings with which the run fits into the GPUs, which are printed.

    Args:
        config: of the run.
        replay: see `train`.

    Raises:
        ValueError: there is no GPU, or nothing fits.
    """
    from rlft_fast.engine.memory import as_options, changed, fitting_changes

    world_size, memory_bytes, device_type, host_bytes = _memory(config)
    if device_type != "cuda":
        raise ValueError("--fit chooses settings for the memory of GPUs, and there is no GPU here: leave --fit out")
    if config.cluster is not None and config.cluster.address is not None:
        raise ValueError("--fit reads the memory of this machine's GPUs, not of a cluster's: leave --fit out")
    changes = fitting_changes(_planned(config, replay), world_size, memory_bytes, device_type, host_bytes)
    if os.environ.get("RANK", "0") == "0":
        print(f"# chosen by --fit: {as_options(changes) or 'it fits as it is'}")  # a comment of what --dry-run prints
    return changed(config, changes)


def _memory(config: RunConfig) -> tuple[int, float, str, float]:
    """Number of ranks, bytes of a rank's device, type of the device, and bytes of CPU memory for a rank.

    Workers on this machine share its memory, as ranks do that torchrun has started.
    """
    from rlft_fast.engine.sharding import device_memory, host_memory
    from rlft_fast.world import World

    device, world_size = World.current().device, int(os.environ.get("WORLD_SIZE", "1"))
    memory_bytes, host_bytes = device_memory(device), host_memory()
    if config.cluster is not None:
        world_size = config.cluster.actor.num_workers
        host_bytes //= world_size
        memory_bytes //= 1 if device.type == "cuda" else world_size
    return world_size, memory_bytes, device.type, host_bytes


def _print_first(resolved: str, *lines: str) -> None:
    """Prints the resolved configuration, and what was checked as comments in it."""
    if os.environ.get("RANK", "0") == "0":
        checked = "".join(f"#   {line}\n" for line in lines)
        print(f"{resolved}\n# checked, without reading weights:\n{printable(checked)}", end="")


def _check_memory(config: RunConfig, *, refuse: bool) -> tuple[dict[str, Any], str]:
    """Compares the memory plan with the machine before the run starts; a run that does not fit is refused or warned of.

    Returns:
        What memory decides by dotted key, which is printed, and what was found.

    Raises:
        ValueError: the run does not fit, and `refuse` is set.
    """
    from rlft_fast.engine.memory import (
        DoesNotFitError,
        MemoryPlanError,
        as_options,
        check_run,
        check_samples,
    )
    from rlft_fast.engine.sharding import host_memory

    world_size, memory_bytes, device_type, host_bytes = _memory(config)
    try:
        check_samples(config, host_memory())
        if config.cluster is not None and config.cluster.address is not None:
            return {}, "not known, because this process does not see the machines of the cluster"
        choice = check_run(config, world_size, memory_bytes, device_type, host_bytes)
    except DoesNotFitError as error:
        if refuse:
            raise ValueError(f"{error}. (--no-memory-check starts the run all the same)") from error
        warning = str(error)
    except MemoryPlanError as error:
        warning = f"it is not known whether the run fits into memory: {error}"
    else:
        if choice.plan is None:
            return choice.values, f"a rough estimate fits easily into {memory_bytes / 1e9:.1f} GB"
        if choice.values and os.environ.get("RANK", "0") == "0":
            print(f"# chosen by memory: {as_options(choice.values)}")  # a comment of what --dry-run prints
        worst = choice.plan.worst(memory_bytes)
        text = f"{worst.total_bytes / 1e9:.1f} of {worst.limit(memory_bytes) / 1e9:.1f} GB at most ({worst.name})"
        return choice.values, text
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {printable(warning)}", file=sys.stderr)
    return {}, "see the warning"


def _parser(objective: str | None) -> Parser:
    command = objective or "train"
    parser = Parser(
        prog=f"rlft-fast {command}",
        usage=f"rlft-fast {command} CONFIG [--key value ...] [--resume [CHECKPOINT] [--force]]\n"
        "                       [--replay RUN] [--dry-run] [--fit] [--ray] [--no-memory-check]",
        description="Train a model as a YAML file says. Every key below can stand in the file. Every key can also be "
        "an option, for example --rollout.temperature 0.7; an option overrides the file. A text is taken as typed, a "
        "list is [a, b], and a mapping {a: b}.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", type=path, help="YAML file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="continue from the newest checkpoint in output_dir, or from a named one, such as step_00000020: "
        "what came after it is kept in a folder of its own",
    )
    parser.add_argument(
        "--force", action="store_true", help="with --resume: accept other data, models and settings than the run had"
    )
    parser.add_argument(
        "--replay", metavar="RUN", type=path,
        help="learn from the samples that a run with log_samples has kept: its numbers again, without its generator",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check folder, models, data, reward and memory, print the configuration, and stop",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="if the run does not fit into the GPUs, take the fastest settings with which it fits",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="drive workers on a Ray cluster: short for --cluster '{}', one on this machine",
    )
    parser.add_argument(
        "--no-memory-check", dest="memory_check", action="store_false",
        help="warn, instead of refusing the run, if it seems to need more memory than the machine has",
    )  # fmt: skip
    parser.set_defaults(config_class=OBJECTIVES[objective or "rl"])
    parser.add_argument(
        "-h", "--help", action=_PrintHelp, nargs="?", metavar="SECTION",
        help="print this text, or only the keys of one section, for example rollout",
    )  # fmt: skip
    return parser


class _PrintHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, section: Any, __: Any = None) -> None:
        width, config = min(shutil.get_terminal_size().columns, 120), parser.get_default("config_class")
        try:
            keys = key_reference(width, section or "", config)
        except ValueError as error:
            parser.error(str(error))
        print(keys if section else f"{parser.format_help()}\n{keys}")
        parser.exit()
