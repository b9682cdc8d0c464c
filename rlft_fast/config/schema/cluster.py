"""Workers and generators on a Ray cluster."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from rlft_fast.config.base import Section, rule
from rlft_fast.config.resume import MayChange

GroupName = Literal["actor", "critic", "reference", "teacher", "reward"]
GROUPS: tuple[GroupName, ...] = ("actor", "critic", "reference", "teacher", "reward")
"""The groups of workers that a run may have."""


class WorkersConfig(Section):
    """Worker processes of a group."""

    num_workers: MayChange[PositiveInt] = 1
    """Worker processes."""
    gpus: MayChange[float] = Field(default=0, ge=0, le=1)
    """GPUs of each worker. Groups with a fraction, such as 0.5, share GPUs: worker r of each of them is on GPU r."""
    cpus: MayChange[Annotated[PositiveInt, Field(le=8192)]] = 1
    """Logical CPUs of each worker, which are also the threads of its kernels."""


class GeneratorsConfig(Section):
    """vLLM servers that generate."""

    num_workers: MayChange[PositiveInt] = 1
    """Servers."""
    gpus: MayChange[NonNegativeInt] = 0
    """GPUs of each server, as many as rollout.vllm.tensor_parallel; 0: it generates on CPUs."""
    cpus: MayChange[Annotated[PositiveInt, Field(le=8192)]] = 1
    """Logical CPUs of each server."""


def _without_password(address: str) -> str:
    if "@" in address:
        raise ValueError("an address must have no name and password, which logs would show")
    return address


class ClusterConfig(Section):
    """Models and generators live in workers on a Ray cluster, and this process drives them."""

    address: MayChange[Annotated[str, AfterValidator(_without_password)] | None] = None
    """Address of a running cluster, such as auto or 10.0.0.1:6379; null: start one on this machine, on loopback."""
    actor: WorkersConfig = WorkersConfig()
    """Workers that hold the policy, and with it every model that has no workers of its own."""
    critic: MayChange[WorkersConfig | None] = None
    """Workers of the critic; null: the actor's workers."""
    reference: MayChange[WorkersConfig | None] = None
    """Workers of the reference; null: the actor's workers."""
    teacher: MayChange[WorkersConfig | None] = None
    """Workers of the teacher; null: the actor's workers."""
    reward: MayChange[WorkersConfig | None] = None
    """Workers of the reward model; null: the actor's workers."""
    generators: MayChange[GeneratorsConfig | None] = None
    """vLLM servers that generate, on any machine of the cluster; null: the workers of the actor generate."""

    @property
    def groups(self) -> dict[GroupName, WorkersConfig]:
        """The groups of workers, by name."""
        return {name: workers for name in GROUPS if (workers := getattr(self, name)) is not None}

    @property
    def sharing_gpus(self) -> dict[GroupName, WorkersConfig]:
        """The groups whose workers share GPUs, by name."""
        return {name: workers for name, workers in self.groups.items() if 0 < workers.gpus < 1}

    @rule
    def _shared_gpus_fit(self) -> Iterator[str]:
        sharing = self.sharing_gpus
        names = " and ".join(sharing)
        if len(sharing) == 1:
            yield (
                f"{names}.gpus is {sharing[next(iter(sharing))].gpus:g}, a share of a GPU, and no other group takes "
                "the rest: set 1, or give another group a fraction"
            )
        if len({workers.num_workers for workers in sharing.values()}) > 1:
            numbers = ", ".join(f"{name} has {workers.num_workers}" for name, workers in sharing.items())
            yield (
                f"{names} share GPUs by their fractions of gpus, and need the same number of workers, but {numbers}: "
                "set num_workers of all to the same number"
            )
        if (total := sum(workers.gpus for workers in sharing.values())) > 1:
            parts = " + ".join(f"{workers.gpus:g}" for workers in sharing.values())
            yield f"gpus of {names} are {parts} = {total:g} of a GPU, expected at most 1: lower them"
