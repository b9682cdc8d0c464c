"""``rlft-fast plan CONFIG --gpus N --memory GB``: what a run needs per GPU, from the model's config.json alone."""

import argparse
import math

from rlft_fast.cli.train import split_overrides
from rlft_fast.config import Config


def run(arguments: list[str]) -> int:
    own, rest = _parser().parse_known_args(arguments)
    positional, overrides = split_overrides(rest)
    if len(positional) != 1:
        _parser().error("give one CONFIG")
    for name in ("gpus", "memory", "gpus_per_node"):
        if not 0 < getattr(own, name) < math.inf:
            _parser().error(f"--{name.replace('_', '-')} must be more than 0, got {getattr(own, name)}")
    config = Config.load(positional[0], overrides)
    fits = [report(config, own.gpus, shard_size, own.memory * 1e9) for shard_size in shard_sizes(config, own)]
    return 0 if any(fits) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlft-fast plan",
        usage="rlft-fast plan CONFIG --gpus N --memory GB [--gpus-per-node N] [--key value ...]",
        description="Say what training the policy of CONFIG needs on each of N GPUs: memory by part, the largest token "
        "cap that fits, and what is sent per optimizer step; with the model sharded over all GPUs, and over the "
        "GPUs of one node (HSDP). Only config.json of the model is read. Ends with status 1 if nothing fits.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the run")
    parser.add_argument("--memory", type=float, required=True, metavar="GB", help="memory of each, in 10^9 bytes")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="for HSDP (default 8)")
    return parser


def shard_sizes(config: Config, own: argparse.Namespace) -> list[int]:
    """All ranks, a node's where these divide them, and what is configured."""
    configured = config.actor.shard_size
    sizes = {own.gpus} | ({own.gpus_per_node} if own.gpus % own.gpus_per_node == 0 else set())
    return sorted(sizes | ({configured} if isinstance(configured, int) and configured > 0 else set()), reverse=True)


def report(config: Config, world_size: int, shard_size: int, memory_bytes: float) -> bool:
    """Prints the plan of one mesh; returns whether it fits."""
    from rlft_fast.engine.plan import USABLE, largest_max_tokens, most_micro_batches, plan_engine

    engine = config.actor.model_copy(update={"shard_size": shard_size})
    steps = most_micro_batches(config, world_size)
    plan = plan_engine(config.model, engine, world_size, steps)
    fits = plan.total_bytes <= USABLE * memory_bytes
    print(
        f"{plan.num_parameters / 1e9:.2f} billion parameters, {plan.replicate_size} copies of {plan.shard_size} "
        f"shards, at most {steps} micro-batches of {plan.max_tokens} tokens per optimizer step"
    )
    for part, size in plan.memory.items():
        print(f"  {part:<22}{size / 1e9:>10.2f} GB")
    print(f"  {'in all':<22}{plan.total_bytes / 1e9:>10.2f} GB of {USABLE * memory_bytes / 1e9:.1f} usable", end="")
    print("" if fits else "  does not fit")
    largest = largest_max_tokens(config.model, engine, world_size, steps, memory_bytes)
    print(f"  largest max_tokens    {largest:>10}")
    print(f"  sent per step         {plan.sent / 1e9:>10.2f} GB by each GPU\n")
    return fits
