"""What a run asks of a cluster is compared with what the cluster has, before a process starts."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from rlft_fast.cluster.head import HEAD
from rlft_fast.config import ClusterConfig
from rlft_fast.engine.sharding import host_memory

Machine = Mapping[str, float]
"""CPUs, GPUs and bytes of memory, by Ray's names: "CPU", "GPU" and "memory". A name that is missing stands for 0."""

_PROCESS_BYTES = 0.3e9  # of a worker with torch and transformers and no model (torch 2.13, transformers 5, Linux)


class Part(NamedTuple):
    """A number of equal processes, or of equal places for one process of each of several groups."""

    number: int
    gpus: float
    cpus: int
    processes: int = 1
    """At each place."""

    @property
    def needs(self) -> dict[str, float]:
        """What each place takes of one machine."""
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": self.processes * _PROCESS_BYTES}


def parts_of(cluster: ClusterConfig) -> dict[str, Part]:
    """The parts of a cluster that the run has, by name. Groups that share GPUs are one part."""
    alone = {name: workers for name, workers in cluster.groups.items() if name not in cluster.sharing_gpus}
    parts: dict[str, Part] = {
        name: Part(workers.num_workers, workers.gpus, workers.cpus) for name, workers in alone.items()
    }
    if (servers := cluster.generators) is not None:
        parts["generators"] = Part(servers.num_workers, servers.gpus, servers.cpus)
    return parts | shared_part(cluster)


def shared_part(cluster: ClusterConfig) -> dict[str, Part]:
    """The part of the groups that share GPUs, by its name: places with a whole GPU; empty where no group shares."""
    groups = cluster.sharing_gpus.values()
    if not groups:
        return {}
    number = max(workers.num_workers for workers in groups)
    return {" and ".join(cluster.sharing_gpus): Part(number, 1, sum(workers.cpus for workers in groups), len(groups))}


def require_room(parts: Mapping[str, Part], machines: Sequence[Machine]) -> None:
    """Refuses parts that do not fit into the machines, whatever else runs there.

    Args:
        parts: by their names in messages.
        machines: what each machine has in all.

    Raises:
        ValueError: all parts together need more than all machines have, or the machines have no room for the places of
            a part, each of which is on one machine.
    """
    for name in ("CPU", "GPU", "memory"):
        asked = {part: sizes.number * sizes.needs[name] for part, sizes in parts.items()}
        has = sum(machine.get(name, 0) for machine in machines)
        if sum(asked.values()) > has:
            shares = ", ".join(f"{part} {_amount(name, number)}" for part, number in asked.items() if number)
            before = " even before they load a model" if name == "memory" else ""
            raise ValueError(
                f"workers need more than the cluster has{before}: {shares}, and the cluster has {_amount(name, has)}. "
                "Lower the number of workers, or add machines"
            )
    for part, sizes in parts.items():
        room = sum(_room(machine, sizes.needs) for machine in machines)
        if room < sizes.number:
            each = " and ".join(_amount(name, need) for name, need in sizes.needs.items() if need)
            what = "each process takes" if sizes.processes == 1 else f"each {sizes.processes} processes take"
            raise ValueError(
                f"{part}: {what} {each} of one machine, and the machines of the cluster have room for "
                f"{room:g} of {sizes.number}. Lower the number of workers or their sizes, or add machines"
            )


def require_own_machine(cluster: ClusterConfig) -> None:
    """`require_room` of a cluster that will be started here, with as many logical CPUs as are asked for.

    Raises:
        ValueError: this machine has too little memory, or too few GPUs.
    """
    parts = parts_of(cluster)
    machine = {"CPU": num_cpus(parts), "GPU": torch.cuda.device_count(), "memory": host_memory()}
    require_room(parts, [machine])


def require_connected(parts: Mapping[str, Part]) -> None:
    """`require_room` of the cluster that this process is connected to.

    Raises:
        ValueError: the cluster has too little of something, or there is no cluster.
        HeadLostError: the cluster has no head.
    """
    import ray

    if not ray.is_initialized():
        raise ValueError("there is no Ray cluster yet: call rlft_fast.cluster.connect() before making a group")
    HEAD.follow()
    HEAD.require()
    require_room(parts, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def num_cpus(parts: Mapping[str, Part]) -> int:
    """Logical CPUs of all processes."""
    return sum(part.number * part.cpus for part in parts.values())


def _room(machine: Machine, needs: Mapping[str, float]) -> float:
    return min((machine.get(name, 0) // need for name, need in needs.items() if need), default=math.inf)


def _amount(name: str, number: float) -> str:
    if name == "memory":
        return f"{number / 1e9:.1f} GB of memory"
    return f"{number:g} {name}{'s' * (number != 1)}"
