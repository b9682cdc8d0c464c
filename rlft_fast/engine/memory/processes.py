"""Which models of a run are in one process, and which processes share a device."""

from rlft_fast.config import RunConfig, run_roles


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
    apart = {
        name: workers.num_workers
        for name, workers in config.cluster.groups.items()
        if name != "actor" and not {"actor", name} <= {*sharing}
    }
    return ranks | apart


def devices_of(config: RunConfig) -> list[list[list[str]]]:
    """For each kind of device the processes on it, and for each process its models, the actor's first.

    Processes on CPUs share the memory of their machine.
    """
    roles, cluster = [*run_roles(config)], config.cluster
    if cluster is None:
        return [[roles]]
    with_actor = [name for name in roles if name == "actor" or name not in cluster.groups]
    devices: dict[str, list[list[str]]] = {}
    for name, workers in cluster.groups.items():
        device = name if workers.gpus == 1 else "shared GPUs" if workers.gpus else "CPUs"
        devices.setdefault(device, []).append(with_actor if name == "actor" else [name])
    return [*devices.values()]
