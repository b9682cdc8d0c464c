"""Copies to a store while the training goes on."""

from collections.abc import Callable
from concurrent import futures
from pathlib import Path

from rlft_fast.run.store import Store


class Copies:
    """Copies checkpoints to a store while the training goes on, one at a time.

    Args:
        store: of the run.
        run: folder of the run.
        tell: gets a message for each copy that fails.
    """

    def __init__(self, store: Store, run: Path, tell: Callable[[str], None]) -> None:
        self.store, self.run, self.tell = store, run, tell
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._copying: tuple[Path, futures.Future[None]] | None = None
        self._copied: Path | None = None

    def begin(self, newest: Path | None) -> None:
        """Begins to copy the newest checkpoint, unless it is copied or a copy is under way."""
        self._note(wait=False)
        if self._copying is None and newest is not None and newest != self._copied:
            self._copying = newest, self._executor.submit(self.store.push, self.run, newest)

    def wait(self) -> None:
        """Returns when no copy is under way. The next save may remove the folder that is copied."""
        self._note(wait=True)

    def copy(self, newest: Path | None) -> None:
        """Copies the newest checkpoint and all beside it; returns when the store has them.

        Raises:
            StoreError: the store did not take them.
        """
        self.wait()
        if newest is not None:  # a run without a checkpoint starts again, for which the store has to be empty
            self.store.push(self.run, newest)
            self._copied = newest

    def _note(self, *, wait: bool) -> None:
        if self._copying is None or not (wait or self._copying[1].done()):
            return
        checkpoint, copying = self._copying
        futures.wait([copying])
        self._copying = None
        if (error := copying.exception()) is None:
            self._copied = checkpoint
        else:
            self.tell(f"warning: {checkpoint.name} is not copied: {error}. The next checkpoint is tried all the same")
