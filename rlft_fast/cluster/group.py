"""`WorkerGroup`: worker processes that form one world, whose methods a driver calls as if they were one worker."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rlft_fast.cluster.buffers import send_tensors_as_buffers
from rlft_fast.cluster.dispatch import (
    Arguments,
    Dispatch,
    Registered,
    Split,
    bind,
    registered_methods,
    split_batch,
    split_rows,
)
from rlft_fast.cluster.head import HEAD, Leaving, end_actors
from rlft_fast.cluster.pool import ResourcePool
from rlft_fast.cluster.sendable import raising_little, require_sendable
from rlft_fast.cluster.usage import TotalUsage, Usage
from rlft_fast.cluster.workers import Worker
from rlft_fast.config import RunConfig
from rlft_fast.data import Batch
from rlft_fast.engine import Future
from rlft_fast.errors import RunError
from rlft_fast.world import RAISED_BY, PeakMemory

_WAIT_FOR_OTHERS_S = 5.0  # after the first failure: errors that all ranks raise together leave the group alive
_LINE_BYTES = 800  # that are read for a line of a worker's last words


class WorkerError(RunError):
    """A worker died, or its method failed. The message names the worker and has its last words."""


class WorkerGroup:
    """Workers of one role, one process each. They form a world of their own, as under torchrun.

    The methods that the worker class registers are methods of the group, see `register`. ``group.method(...)`` waits
    for the result. ``group.method.submit(...)`` returns a `Future`, so that several groups work at once. The group is a
    context manager, which ends its workers.

    Args:
        worker_class: a `Worker` with registered methods.
        config: of the run; every worker gets it.
        num_workers: number of processes.
        gpus: GPUs of each worker, 0 or 1; in a pool also a fraction.
        cpus: logical CPUs of each worker, and its OMP_NUM_THREADS.
        pool: keeps the places of the workers; None: they get places of their own.

    Raises:
        ValueError: the cluster or the pool has fewer resources than asked for, or the configuration lacks the role.
        WorkerError: a worker could not start.
    """

    def __init__(
        self, worker_class: type[Worker], config: RunConfig, num_workers: int, *, gpus: float = 0,
        cpus: int = 1, pool: ResourcePool | None = None,
    ) -> None:  # fmt: skip
        self.name = worker_class.__name__
        self.worker_class = worker_class
        self.size = num_workers
        self._engine_configs = worker_class.engine_configs(config)
        self._actors: list[Any] = []
        self._logs: list[tuple[str, str]] = []  # node and file of each worker's error output
        if pool is None and gpus not in (0, 1):
            raise ValueError(
                f"{self.name}: gpus is {gpus:g}, expected 0 or 1; workers with a share of a GPU need the pool whose "
                "GPUs they share: give pool=ResourcePool(...)"
            )
        self._places = contextlib.ExitStack()
        self._usage: list[list[Usage]] = [[] for _ in range(num_workers)]  # of each worker's calls
        try:
            pool = pool or self._places.enter_context(ResourcePool(self.name, num_workers, gpus=gpus, cpus=cpus))
            self._places.enter_context(pool.share(self.name, num_workers, gpus, cpus))
            self._start(worker_class, config, pool, gpus, cpus)
        except BaseException:
            self.close()
            raise
        for name, how in registered_methods(worker_class).items():
            setattr(self, name, GroupMethod(self, name, how))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:  # for type checkers: registered methods are attributes
        raise AttributeError(f"{self.name} registers no method {name}")

    def close(self) -> None:
        """Ends the workers at once, and frees their resources."""
        end_actors(self._actors)
        self._actors = []
        self._places.close()

    def pids(self) -> list[int]:
        """The process ids of the workers, on their own machines."""
        return self._gather([actor.pid.remote() for actor in self._actors])

    def _start(self, worker_class: type[Worker], config: RunConfig, pool: ResourcePool, gpus: float, cpus: int) -> None:
        import ray

        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_Host)
        self._actors = [
            remote.options(scheduling_strategy=pool.strategy(rank)).remote(rank) for rank in range(self.size)
        ]
        places = self._gather([actor.place.remote() for actor in self._actors])
        self._logs = [(node, log) for node, _, _, log in places]
        _, address, port, _ = places[0]
        nodes = [node for node, *_ in places]
        environments = [
            {
                "RANK": rank, "WORLD_SIZE": self.size, "MASTER_ADDR": address, "MASTER_PORT": port,
                "LOCAL_WORLD_SIZE": nodes.count(node),
                "LOCAL_RANK": 0 if gpus else nodes[:rank].count(node),  # Ray shows a worker its own GPU alone
                "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": 0,  # of a driver under torchrun
            } | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
            for rank, node in enumerate(nodes)
        ]  # fmt: skip
        pairs = zip(self._actors, environments, strict=True)
        self._gather([self._send(actor.join, worker_class, config, environment) for actor, environment in pairs])

    def submit(self, name: str, how: Registered, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Future[Any]:
        """Begins a call of a registered method. Its arguments are checked, cut and sent before this returns."""
        call = bind(self.worker_class, name, args, keywords)
        if not self._actors:
            raise WorkerError(f"{self.name}: the group has ended; make a new one, and load the newest checkpoint")
        if how.dispatch is Dispatch.RANK_ZERO:
            first = [self._send(self._actors[0].call, name, *call)]
            return Future(lambda: self._results(first)[0])
        if how.dispatch is Dispatch.ONE_TO_ALL:
            same = [self._send(actor.call, name, *call) for actor in self._actors]
            return Future(lambda: self._results(same))
        split = self._split(name, how, call)
        pairs = zip(self._actors, split.arguments, strict=True)
        calls = [self._send(actor.call, name, *call.with_values(own)) for actor, own in pairs]
        return Future(lambda: split.join(self._results(calls)))

    def take_usage(self) -> TotalUsage:
        """What the calls took of the workers whose results were asked for since this was last called."""
        usage, self._usage = self._usage, [[] for _ in range(self.size)]
        return TotalUsage.of_workers(usage, self.name.removesuffix("Worker").lower())

    def _results(self, calls: list[Any]) -> list[Any]:
        """The results of calls of `_Host.call`."""
        gathered = self._gather(calls)
        for own, (_, usage) in zip(self._usage, gathered, strict=False):  # the first worker alone may be called
            own.append(usage)
        return [result for result, _ in gathered]

    def _send(self, method: Any, *args: Any) -> Any:
        """Calls a method of an actor. Ray itself would refuse an argument with pages of text."""
        try:
            return method.remote(*args)
        except Exception:
            for argument in args:
                require_sendable(f"an argument of {self.name}", argument)
            raise

    def _split(self, name: str, how: Registered, call: Arguments) -> Split:
        if not call.values:
            raise TypeError(f"{self.name}.{name}: there is no argument to share, expected a Batch or lists of rows")
        batch, *others = call.values
        if not isinstance(batch, Batch):
            return split_rows(call.values, self.size)
        engine = how.engine_of(call.keywords)
        if engine not in self._engine_configs:
            known = ", ".join(self._engine_configs)
            raise ValueError(f"{self.name}.{name}: there is no engine {engine!r}, expected one of {known}")
        config = self._engine_configs[engine]
        padded = engine in self._padded
        return split_batch(
            batch, (*others,), config.max_tokens, self.size, config.sequence_parallel, how.trains, padded,
            config.micro_batch_size,
        )  # fmt: skip

    @cached_property
    def _padded(self) -> set[str]:
        """The engines that run padded."""
        return {name for name, facts in self.facts().items() if facts.padded_because}

    def _gather(self, calls: list[Any]) -> list[Any]:
        """The results in the order of the ranks. After a failure the others get a moment, then the group ends.

        Raises:
            WorkerError: a worker died.
            Exception: what the method of the first failing worker raised.
        """
        import ray

        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        told: dict[int, Exception] = {}
        waiting = {call: rank for rank, call in enumerate(calls)}
        deadline = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            for call in ray.wait([*waiting], timeout=1.0)[0]:
                rank = waiting.pop(call)
                try:
                    results[rank] = ray.get(call)
                except ray.exceptions.RayTaskError as error:
                    told[rank] = error  # with the worker's traceback
                    failures[rank] = error.cause if isinstance(error.cause, Exception) else error
                except ray.exceptions.RayError as error:
                    failures[rank] = self._death(rank, error)
            if HEAD.has_lost_workers():
                failures[min(waiting.values(), default=0)] = WorkerError(
                    f"{HEAD.loss}. Workers of {self.name} are gone"
                )
            if failures and deadline is None:
                deadline = time.monotonic() + _WAIT_FOR_OTHERS_S
        if not failures:
            return [results[rank] for rank in range(len(calls))]
        deaths = [failure for failure in failures.values() if isinstance(failure, WorkerError)]
        if waiting or deaths:  # others wait for the failed one in a collective
            self.close()
        first = min(failures, key=lambda rank: (hasattr(failures[rank], RAISED_BY), rank))  # the cause itself
        failure = deaths[0] if deaths else failures[first]
        if not deaths:
            failure.add_note(f"raised by worker {first} of {self.name}")
        raise failure from told.get(first)

    def _death(self, rank: int, error: Exception) -> WorkerError:
        import ray

        reason = next((line.strip() for line in str(error).splitlines() if "exit" in line.lower()), str(error))
        words = ""
        if rank < len(self._logs) and self._logs[rank][0] == ray.get_runtime_context().get_node_id():
            words = last_words(Path(self._logs[rank][1]))
        said = f". Its last words: {words}" if words else ""
        return WorkerError(f"worker {rank} of {self.name} died: {reason}{said}")


class GroupMethod:
    """A registered method of a group's workers, as a driver calls it."""

    def __init__(self, group: WorkerGroup, name: str, how: Registered) -> None:
        self._group, self._name, self._how = group, name, how

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.submit(*args, **keywords).result()

    def submit(self, *args: Any, **keywords: Any) -> Future[Any]:
        """Begins the call. The workers of a group run their calls in the order in which these began.

        Raises:
            TypeError: the method does not take the arguments.
            ValueError: the arguments cannot be shared among the workers.
        """
        return self._group.submit(self._name, self._how, args, keywords)


def last_words(path: Path, num_lines: int = 5) -> str:
    """The last lines of a worker's error output, without Ray's own lines."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - num_lines * _LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(
        line for line in lines[-num_lines:] if line.strip() and not line.startswith((":job_id:", ":actor_name:"))
    )


class _Host(Leaving):
    """The process of a worker. It joins its group's world before the worker is made."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.worker: Worker | None = None
        send_tensors_as_buffers()

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> tuple[str, str, int, str]:
        """Node, address, a free port, and the file of this process's error output."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), address, port, os.readlink("/proc/self/fd/2")

    def join(self, worker_class: type[Worker], config: RunConfig, environment: dict[str, Any]) -> None:
        from rlft_fast.world import init_distributed

        os.environ.update({name: str(value) for name, value in environment.items()})
        self.worker = worker_class(config, init_distributed(config.timeout_minutes))

    def call(self, name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, Usage]:
        """The result, and what the call took of this process."""
        assert self.worker is not None
        memory = PeakMemory(self.worker.world.device)
        memory.restart()
        self.worker.busy_seconds = 0.0
        start, started = time.time(), time.perf_counter()
        with raising_little():
            result = getattr(self.worker, name)(*args, **keywords)
        return result, Usage(memory.measure(), time.perf_counter() - started, self.worker.busy_seconds, start)
