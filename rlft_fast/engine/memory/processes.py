"""Which models of a run are in one process, and which processes share a device."""

from typing import NamedTuple

from rlft_fast.config import RunConfig, run_roles


class Process(NamedTuple):
    """One of several equal processes."""

    models: list[str]
    """By name, the actor first."""
    share: float = 1.0
    """Such processes on a machine for each rank of the actor."""
    on_cpu: bool = False
    """Whether its device is the machine's memory, on a cluster."""


def ranks_of(config: RunConfig, world_size: int) -> dict[str, int]:
    """Number of ranks of each model.

    Args:
        config: configuration of the run.
        world_size: ranks of the actor. Groups that share its GPUs have as many; other groups have their own number.
    """
    ranks = dict.fromkeys(run_roles(config), world_size)
    if config.cluster is None:
        return ranks
    sharing = config.cluster.sharing_gpus
    apart: dict[str, int] = {
        name: workers.num_workers
        for name, workers in config.cluster.groups.items()
        if name != "actor" and not {"actor", name} <= {*sharing}
    }
    return {name: apart.get(group_of(name), number) for name, number in ranks.items()}


def group_of(role: str) -> str:
    """The workers of a cluster that may hold a role apart: one group holds all reward models."""
    return role.partition(".")[0]


def devices_of(config: RunConfig, world_size: int) -> list[list[Process]]:
    """For each kind of device the processes on it. Processes on CPUs share the memory of their machine.

    Arguments as in `ranks_of`.
    """
    roles, cluster = [*run_roles(config)], config.cluster
    if cluster is None:
        return [[Process(roles)]]
    with_actor = [name for name in roles if name == "actor" or group_of(name) not in cluster.groups]
    ranks = ranks_of(config, world_size)
    devices: dict[str, list[Process]] = {}
    for name, workers in cluster.groups.items():
        device = name if workers.gpus == 1 else "shared GPUs" if workers.gpus else "CPUs"
        own = with_actor if name == "actor" else [role for role in roles if group_of(role) == name]
        process = Process(own, ranks[own[0]] / world_size, not workers.gpus)
        devices.setdefault(device, []).append(process)
    return [*devices.values()]
