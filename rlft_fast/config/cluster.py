"""Workers and generators on a Ray cluster."""

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from rlft_fast.config.base import Section
from rlft_fast.config.resume import MayChange


class WorkersConfig(Section):
    """Worker processes of a group."""

    num_workers: MayChange[PositiveInt] = 1
    """Worker processes."""
    gpus: MayChange[int] = Field(default=0, ge=0, le=1)
    """GPUs of each worker."""
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
    reward: MayChange[WorkersConfig | None] = None
    """Workers of the reward model; null: the actor's workers."""
    generators: MayChange[GeneratorsConfig | None] = None
    """vLLM servers that generate, on any machine of the cluster; null: the workers of the actor generate."""
