"""`ResourcePool`: places on a cluster for the workers of one group, or of several groups that share GPUs."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

from rlft_fast.cluster.head import HEAD
from rlft_fast.cluster.resources import Part, require_connected

_DIGITS = 4  # Ray counts ten thousandths of a GPU


class ResourcePool:
    """Equal places on a Ray cluster. Worker r of every group in the pool is at place r, and so on the same GPU.

    A pool is a placement group of Ray with one bundle for each place. It is a context manager, which frees the places.

        with ResourcePool("all", num_workers=2, gpus=1, cpus=2) as pool:
            actor = WorkerGroup(ActorRolloutRefWorker, config, 2, gpus=0.5, pool=pool)
            critic = WorkerGroup(CriticWorker, config, 2, gpus=0.5, pool=pool)

    Args:
        name: in messages.
        num_workers: number of places.
        gpus: GPUs of each place.
        cpus: logical CPUs of each place, for the workers of all groups there.
        processes: workers at each place.
        start_timeout_s: how long the cluster may take to give the resources.

    Raises:
        ValueError: the cluster has fewer resources than asked for, or does not give them in time.
    """

    def __init__(
        self, name: str, num_workers: int, *, gpus: float = 1, cpus: int = 1, processes: int = 1,
        start_timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        import ray

        self.name, self.size = name, num_workers
        self._left = {"CPU": float(cpus), "GPU": float(gpus)}
        require_connected({name: Part(num_workers, gpus, cpus, processes)})
        bundle = {resource: number for resource, number in self._left.items() if number}
        self._placement: Any = ray.util.placement_group([bundle] * num_workers, strategy="PACK")
        if not self._placement.wait(start_timeout_s):
            self.close()
            raise ValueError(
                f"the cluster did not free the resources for {num_workers} workers of {name} within "
                f"{start_timeout_s:g} s: {ray.available_resources()} are available"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def share(self, name: str, num_workers: int, gpus: float, cpus: int) -> Iterator[None]:
        """Inside, the workers of a group have their share of the places.

        Raises:
            ValueError: the pool has less left at each place, or fewer places.
        """
        if num_workers > self.size:
            raise ValueError(
                f"{name} has {num_workers} workers, and the pool {self.name} has {self.size} places: make as many "
                "places as workers"
            )
        for resource, number in (("GPU", gpus), ("CPU", cpus)):
            if round(self._left[resource] - number, _DIGITS) < 0:
                raise ValueError(
                    f"{name} asks for {number:g} {resource} at each place, and the pool {self.name} has "
                    f"{round(self._left[resource], _DIGITS):g} left there: make the places larger, or the shares of "
                    "the groups smaller"
                )
        self._left = {"CPU": self._left["CPU"] - cpus, "GPU": self._left["GPU"] - gpus}
        try:
            yield
        finally:
            self._left = {"CPU": self._left["CPU"] + cpus, "GPU": self._left["GPU"] + gpus}

    def strategy(self, rank: int) -> Any:
        """Ray's scheduling strategy for the worker of this rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)

    def close(self) -> None:
        """Frees the places. Ray ends the workers that are still there."""
        import ray

        if self._placement is not None and HEAD.answers():
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._placement)
        self._placement = None
