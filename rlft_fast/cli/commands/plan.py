"""``rlft-fast plan CONFIG --gpus N --memory GB``: memory and communication of a run per GPU.

Only config.json of each model is read; no weights are needed.
"""

import argparse
import math
from typing import TYPE_CHECKING

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser
from rlft_fast.config import RunConfig, load_config
from rlft_fast.errors import printable

if TYPE_CHECKING:
    from rlft_fast.engine.memory import MemoryPlan


_MOST_GPUS = 1_000_000


def run(arguments: list[str]) -> int:
    own, rest = _parser().parse_known_args(arguments)
    positional, overrides = split_overrides(rest)
    if len(positional) != 1:
        _parser().error("give one CONFIG")
    for name in ("gpus", "memory", "gpus_per_node"):
        if not 0 < getattr(own, name) < math.inf:
            _parser().error(f"--{name.replace('_', '-')} must be more than 0, got {getattr(own, name)}")
    if own.gpus > _MOST_GPUS:
        _parser().error(f"--gpus must be at most {_MOST_GPUS}, got {own.gpus}")
    config = load_config(positional[0], overrides)
    print(f"{printable(config.model)} on {own.gpus} GPUs of {own.memory:g} GB", flush=True)  # before torch is imported
    fits = [report(config, own.gpus, shard_size, own.memory * 1e9) for shard_size in shard_sizes(config, own)]
    if any(fits):
        return 0
    report_advice(config, own.gpus, own.memory * 1e9)
    return 1


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast plan",
        usage="rlft-fast plan CONFIG --gpus N --memory GB [--gpus-per-node N]\n                      [--key value ...]",
        description="Compute what the run of CONFIG needs on each of N GPUs: memory by part and phase, the largest "
        "token cap of the policy that fits, and the bytes sent per optimizer step. There are two plans: the policy "
        "sharded over all GPUs, and sharded over the GPUs of one node (HSDP). Only config.json of each model is read. "
        "If nothing fits, the fastest settings that fit are printed, or what is missing, and the exit status is 1.",
        epilog="`rlft-fast train --help` explains every --key.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of GPUs; with a cluster section, of the actor"
    )
    parser.add_argument("--memory", type=float, required=True, metavar="GB", help="memory of one GPU in 10^9 bytes")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of one node, for the HSDP plan (default: 8)"
    )
    return parser


def shard_sizes(config: RunConfig, own: argparse.Namespace) -> list[int]:
    """Shard sizes to plan: all GPUs, the GPUs of a node if nodes divide all GPUs, and the configured shard_size.

    A node's GPUs are left out where their state alone exceeds the memory: the plan of a large model takes seconds.
    """
    from rlft_fast.engine.memory import surely_exceeds

    configured = config.actor.shard_size
    sizes = {own.gpus} | ({configured} if isinstance(configured, int) and configured > 0 else set())
    node = _sharded(config, own.gpus_per_node)
    if own.gpus % own.gpus_per_node == 0 and not surely_exceeds(node, own.gpus, own.memory * 1e9, "cuda"):
        sizes.add(own.gpus_per_node)
    return sorted(sizes, reverse=True)


def report(config: RunConfig, world_size: int, shard_size: int, memory_bytes: float) -> bool:
    """Prints the plan for one shard size.

    Returns:
        Whether the run fits into `memory_bytes` per GPU.
    """
    from rlft_fast.engine.memory import as_options, choose, largest_actor_max_tokens, plan_memory

    choice = choose(_sharded(config, shard_size), world_size, memory_bytes, "cuda", math.inf)
    config, plan = choice.config, choice.plan or plan_memory(choice.config, world_size, memory_bytes)
    fits = plan.fits(memory_bytes)
    print()
    for name, engine in plan.engines.items():
        print(
            f"{name}: {engine.num_parameters / 1e9:.2f} billion parameters, {engine.replicate_size} copies of "
            f"{engine.shard_size} shards, at most {engine.num_micro_batches} micro-batches of {engine.max_tokens} "
            "tokens per optimizer step"
        )
    if choice.values and fits:
        print(f"  chosen by memory: {as_options(choice.values)}")
    print_parts(plan)
    print_phases(plan, memory_bytes)
    if plan.host_bytes:
        print(f"  CPU memory at most    {plan.host_bytes / 1e9:>10.2f} GB per GPU")
    if plan.refusal:
        print(f"  {printable(plan.refusal)}")
    largest, longest = largest_actor_max_tokens(config, plan, world_size, memory_bytes), config.longest_taught
    print(f"  largest max_tokens    {largest:>10}" + f"  below the longest sequence, {longest}" * (largest < longest))
    sent = sum(engine.sent_bytes for engine in plan.engines.values())
    print(f"  sent per step         {sent / 1e9:>10.2f} GB by every GPU", flush=True)
    return fits


def report_advice(config: RunConfig, world_size: int, memory_bytes: float) -> None:
    """Prints the fastest settings with which the run would fit."""
    from rlft_fast.engine.memory import advice, plan_memory

    plan = plan_memory(config, world_size, memory_bytes)
    print(f"\nNothing fits. {printable(advice(config, plan, world_size, memory_bytes))}")


def _sharded(config: RunConfig, shard_size: int) -> RunConfig:
    return config.model_copy(update={"actor": config.actor.model_copy(update={"shard_size": shard_size})})


def print_parts(plan: "MemoryPlan") -> None:
    """Prints the memory of an update: one row per part, one column per trained model."""
    print(_row("GB of an update", *plan.engines))
    for part in next(iter(plan.engines.values())).memory:
        print(_row(part, *(engine.memory[part] for engine in plan.engines.values())))


def print_phases(plan: "MemoryPlan", memory_bytes: float) -> None:
    """Prints the memory of each phase: one row per phase, one column per model and for vLLM."""
    owners = dict.fromkeys(owner for phase in plan.phases for owner in phase.memory)
    print(_row("GB of a phase", *owners, "in all"))
    for phase in plan.phases:
        excess = phase.total_bytes - phase.limit(memory_bytes)
        note = f"  does not fit into {phase.limit(memory_bytes) / 1e9:.1f}" if excess > 0 else ""
        print(_row(phase.name, *(phase.memory.get(owner, 0) for owner in owners), phase.total_bytes) + note)
    worst = plan.worst(memory_bytes)
    print(
        f"  at most               {worst.total_bytes / 1e9:>10.2f} GB of {worst.limit(memory_bytes) / 1e9:.1f} usable"
    )


def _row(name: str, *cells: str | int) -> str:
    return f"  {name:<22}" + "".join(f"{c:>10}" if isinstance(c, str) else f"{c / 1e9:>10.2f}" for c in cells)
