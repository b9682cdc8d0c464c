"""What a trainer holds in place of engines, rollout and checkpoints that live in the workers of a group."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import Tensor

from rlft_fast.cluster.group import WorkerGroup
from rlft_fast.config import ModelConfig
from rlft_fast.data import Batch, Samples
from rlft_fast.engine import CheckpointManager, EngineFacts, Future, Loss, Output
from rlft_fast.errors import Interrupted
from rlft_fast.rollout import (
    Answers,
    NonFiniteLogitsError,
    Request,
    RolloutError,
    SamplingParams,
    Seeds,
    draw_seeds,
)
from rlft_fast.world import World

T = TypeVar("T")

_ATTEMPTS = 5  # to sync, while servers die and others start


class RemoteEngine:
    """An `Engine` whose ranks are the workers of a group.

    Args:
        group: of workers that hold the engine.
        name: "actor", "critic", "reference", "teacher" or "reward".
        config: of the engine.
        facts: of the engine.
    """

    def __init__(self, group: WorkerGroup, name: str, config: ModelConfig, facts: EngineFacts) -> None:
        self.group = group
        self.name = name
        self.config = config
        self.facts = facts
        self._is_adapted = True

    def infer(self, batch: Batch, outputs: Sequence[Output]) -> dict[Output, Tensor]:
        """See `FSDPEngine.infer`."""
        return self.submit_infer(batch, outputs).result()

    def submit_infer(self, batch: Batch, outputs: Sequence[Output]) -> Future[dict[Output, Tensor]]:
        """Begins `infer`, see `Engine`."""
        return self.group.infer.submit(batch, (*outputs,), engine=self.name, adapter=self._is_adapted)

    def score(self, batch: Batch) -> Tensor:
        """See `FSDPEngine.score`."""
        asking = batch.asking_at_the_end(self.facts.padding_id)
        return self.infer(asking, ("score",))["score"][asking.loss_mask_T]

    def train_step(
        self, batch: Batch, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """See `FSDPEngine.train_step`."""
        return self.submit_train_step(batch, loss, outputs=outputs, schedule_step=schedule_step).result()

    def submit_train_step(
        self, batch: Batch, loss: Loss, *, outputs: dict[Output, Tensor] | None = None,
        schedule_step: int | None = None,
    ) -> Future[dict[str, float]]:  # fmt: skip
        """Begins `train_step`, see `Engine`. `outputs` is filled when the result is asked for."""
        call = self.group.train_step.submit(
            batch, loss, engine=self.name, with_outputs=outputs is not None, schedule_step=schedule_step
        )

        def wait() -> dict[str, float]:
            metrics, found = call.result()
            if outputs is not None:
                outputs.update(found)
            return metrics

        return Future(wait)

    def zero_grad(self) -> None:
        """See `FSDPEngine.zero_grad`."""
        self.group.zero_grad(self.name)

    def forward_backward(
        self, batch: Batch, loss: Loss, *, is_last: bool = True, outputs: dict[Output, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See `FSDPEngine.forward_backward`. The sums are over the tokens of all workers.

        Raises:
            ValueError: as there, or `outputs` is asked for, which would stay in the workers.
        """
        if outputs is not None:
            raise ValueError(
                "forward_backward on Ray fills no outputs, which would stay in the workers until optimizer_step: ask "
                "train_step for them, or infer before the step"
            )
        try:
            return self.group.forward_backward(batch, loss, engine=self.name, is_last=is_last)
        except Exception:  # the driver may have refused the batch, of which the workers know nothing
            with contextlib.suppress(Exception):  # they may have ended
                self.zero_grad()
            raise

    def optimizer_step(self, schedule_step: int | None = None) -> dict[str, float]:
        """See `FSDPEngine.optimizer_step`."""
        return self.group.optimizer_step(self.name, schedule_step)[0]

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        """Every call of a worker opens its own."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside, `infer` asks the policy without its adapters."""
        self._is_adapted = False
        try:
            yield
        finally:
            self._is_adapted = True

    def non_finite_weights(self) -> list[str]:
        """See `FSDPEngine.non_finite_weights`."""
        return self.group.non_finite_weights(self.name)[0]


class RemoteRollout:
    """The generators of a group's workers. The methods are those of `Rollout` that a trainer calls.

    Args:
        group: its workers generate, or ask servers.
        servers: returns the URLs of the servers to ask from the next sync on, and their token; None: the workers
            generate.

    Attributes:
        weight_version: see `Rollout`.
        seconds: 0, because the driver does not generate.
        sync_bytes: see `Rollout`; of one worker.
        urls: of the servers.
    """

    def __init__(self, group: WorkerGroup, servers: Callable[[], tuple[Sequence[str], str]] | None = None) -> None:
        self.group = group
        self.servers = servers
        self.weight_version = 0
        self.seconds = 0.0
        self.sync_bytes = 0
        self.urls: Sequence[str] = ()

    def use_servers(self) -> str:
        """Has the workers know the servers of now; returns the servers' token."""
        assert self.servers is not None
        self.urls, token = self.servers()
        self.group.use_servers(self.urls, token)
        return token

    def sync(self) -> None:
        """See `Rollout.sync`."""
        self.weight_version += 1
        self._sync()

    def samples(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Seeds | None = None) -> Samples:
        """See `Rollout.samples`. Where all servers have died, others sample again from the same seeds."""
        seeds = draw_seeds(len(prompts), params.n) if seeds is None else seeds
        return self._asked(lambda: self.group.generate_sequences([*prompts], params, seeds))

    def answer(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """See `Rollout.answer`. A worker gets the requests that its rank has under torchrun, see `samples`."""
        size = self.group.size
        shares: list[list[Request]] = [[] for _ in range(size)]
        for request in requests:
            shares[request.row % size].append(replace(request, row=request.row // size))
        answers = [iter(own) for own in self._asked(lambda: self.group.answer(shares, params))]
        return [next(answers[request.row % size]) for request in requests]

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RolloutError as error:
            if self.servers is None or isinstance(error, NonFiniteLogitsError):
                raise
        self._sync()
        return ask()

    def _sync(self) -> None:
        for attempts_left in reversed(range(_ATTEMPTS)):
            if self.servers is not None:
                self.use_servers()
            try:
                self.sync_bytes = self.group.sync_rollout(self.weight_version)[0]
                break
            except RolloutError:  # the last server may have died just now
                if self.servers is None or not attempts_left:
                    raise
                time.sleep(1)

    def sleep(self) -> None:
        """See `Rollout.sleep`."""
        self.group.sleep_rollout()


class RemoteCheckpoints:
    """The checkpoints of a run whose engines live in groups. The methods are those of `CheckpointManager`.

    The folder is the same on the machines of the driver and of the workers. A critic with workers of its own has its
    checkpoints in the folder ``critic`` inside. They are complete before the actor's checkpoint of the same step is.

    Args:
        group: of the actor.
        critic: of the critic, if it has one of its own.
        directory: folder of the checkpoints.
    """

    CRITIC = "critic"

    def __init__(self, group: WorkerGroup, critic: WorkerGroup | None, directory: Path) -> None:
        self.group = group
        self.critic = critic
        self.directory = directory
        self._files = CheckpointManager(directory, world=World())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            return  # a second Ctrl-C: workers may be busy for long
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.wait()

    def save(
        self, step: int, engines: Mapping[str, Any], state: Mapping[str, Any], *, asynchronous: bool = False
    ) -> Path:
        """See `CheckpointManager.save`; the engines are those of the groups that train."""
        if self.critic is not None:  # keeps two more: the actor's save before may be under way, or have failed
            self.critic.save_checkpoint(self._of_critic, step, num_more=2)
        self.group.save_checkpoint(str(self.directory), step, dict(state), asynchronous=asynchronous)
        return self.directory / f"step_{step:08d}"

    def wait(self) -> None:
        """See `CheckpointManager.wait`."""
        self.group.wait_for_checkpoint(str(self.directory))

    def load(self, engines: Mapping[str, Any], step: int | None = None) -> dict[str, Any] | None:
        """See `CheckpointManager.load`. A critic without checkpoints of its own has been saved with the actor."""
        state = self.group.load_checkpoint(str(self.directory), step)[0]
        if state is not None and self.critic is not None:
            step = state["step"]
            own = (Path(self._of_critic) / f"step_{step:08d}").is_dir()
            folder = self._of_critic if own else str(self.directory)
            self.critic.load_checkpoint(folder, step)
        return state

    def latest(self) -> Path | None:
        """See `CheckpointManager.latest`."""
        return self._files.latest()

    def after(self, step: int) -> list[Path]:
        """See `CheckpointManager.after`. The actor's come first: without the critic's they cannot be loaded."""
        return self._files.after(step) + self._files_of_critic.after(step)

    def failure(self) -> BaseException | None:
        """None: workers tell of a failed save at the next save alone."""

    def clear(self) -> None:
        """See `CheckpointManager.clear`."""
        self._files.clear()
        self._files_of_critic.clear()

    def remove_leftovers(self) -> None:
        """See `CheckpointManager.remove_leftovers`."""
        self._files.remove_leftovers()
        self._files_of_critic.remove_leftovers()

    @property
    def _files_of_critic(self) -> CheckpointManager:
        return CheckpointManager(Path(self._of_critic), world=World())

    @property
    def _of_critic(self) -> str:
        return str(self.directory / self.CRITIC)
