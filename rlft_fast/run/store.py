"""A copy of a run in an object store, from which another machine can go on: s3://, gs://, and all else fsspec knows.

    <address>/run.json, config.yaml, metrics.jsonl, ...        files of the run's folder
    <address>/checkpoints/step_00000020/...                    a checkpoint; its manifest.json is written last
    <address>/hf/...                                           the model, when the run has ended

A store has no rename, so the manifest is what makes a checkpoint complete. Older checkpoints go after a newer one is
complete, manifest first.
"""

import json
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec

from rlft_fast.engine import CheckpointManager
from rlft_fast.errors import brief
from rlft_fast.files import REPLACED, TEMPORARY, publish
from rlft_fast.run.folder import LOGS, MARKER, run_id

_MANIFEST = "manifest.json"
_FILES = (MARKER, "config.yaml", *LOGS, "summary.json", "curve.png", "timeline.png")
_PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt


class StoreError(OSError):
    """A store did not take or give a file. What the run's folder holds is complete."""


class Store:
    """The copy of one run.

    Args:
        address: of a folder that belongs to this run alone, such as ``s3://bucket/run``.

    Raises:
        ValueError: there is no such kind of store, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self.files, self.root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoint.store {address} cannot be used: {brief(error)}") from error

    def checkpoints(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return sorted(name for name in self._folders() if self._exists(f"checkpoints/{name}/{_MANIFEST}"))

    def require_own(self, run: Path, *, resume: bool) -> None:
        """Refuses a store that holds another run.

        Args:
            run: folder of the run.
            resume: whether the run goes on; then the store may hold the run that a new folder is to have.

        Raises:
            ValueError: the store holds another run.
            StoreError: the store cannot be read.
        """
        kept, own = self._id(), run_id(run)
        if kept is not None and not (resume and own in (None, kept)):
            raise ValueError(
                f"checkpoint.store {self.address} holds the run {kept}"
                + (f", and {run} is the run {own}" if resume else ": continue it with --resume")
                + ", or name another address"
            )

    def push(self, run: Path, checkpoint: Path) -> None:
        """Copies a checkpoint, and then removes checkpoints that the run's folder has no more.

        Args:
            run: folder of the run, whose logs are copied first.
            checkpoint: folder of a complete checkpoint.

        Raises:
            StoreError: a file was not taken. The store has the complete checkpoints that it had before.
        """
        name = checkpoint.name
        self.push_files(run)
        if self._read(f"checkpoints/{name}/{_MANIFEST}") == (checkpoint / _MANIFEST).read_bytes():
            return
        self._remove(f"checkpoints/{name}/{_MANIFEST}")  # of another one with this name, before the run went back
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == _MANIFEST):
            self._put(path, f"checkpoints/{name}/{path.relative_to(checkpoint).as_posix()}")
        kept = {folder.name for folder in checkpoint.parent.iterdir()}
        for other in self._folders():
            if other not in kept:
                self._remove(f"checkpoints/{other}/{_MANIFEST}")
                self._remove(f"checkpoints/{other}")

    def push_files(self, run: Path) -> None:
        """Copies the files of the run's folder that a run goes on from, or that tell of it."""
        for name in _FILES:
            if (run / name).is_file():
                self._put(run / name, name)

    def push_model(self, folder: Path) -> None:
        """Copies the exported model; its ``config.json``, without which nothing loads it, is the last file."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == "config.json"):
            self._put(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")

    def fetch(self, run: Path, name: str | None = None) -> str | None:
        """Brings what the folder of a run lacks: files, and the newest checkpoint, if it is newer than the folder's.

        Args:
            run: folder of the run, which may be missing.
            name: of the checkpoint; None: the newest.

        Returns:
            The name of the checkpoint that was brought.

        Raises:
            StoreError: a file cannot be read. The folder has no part of a checkpoint.
        """
        complete, local = self.checkpoints(), CheckpointManager(run / "checkpoints").latest()
        wanted = name or (complete[-1] if complete else None)
        if wanted not in complete:
            return None
        if (run / "checkpoints" / wanted).exists() or (name is None and local is not None and local.name > wanted):
            return None
        run.mkdir(parents=True, exist_ok=True)
        for own in (own for own in _FILES if not (run / own).exists() and self._exists(own)):
            self._get(own, run / own)
        final = run / "checkpoints" / wanted
        temporary = final.with_name(wanted + TEMPORARY)
        place = f"checkpoints/{wanted}/"
        for path in self._tried(lambda: self.files.find(f"{self.root}/{place}"), f"list {place}"):
            file = path.rpartition(place)[2]
            if ".." in Path(file).parts:
                raise StoreError(f"the store {self.address} has a file with the name {place}{file}: remove it")
            self._get(place + file, temporary / file)
        publish(temporary, final, final.with_name(wanted + REPLACED))
        return wanted

    # ---- files --------------------------------------------------------------------------------------------------

    def _id(self) -> str | None:
        if (content := self._read(MARKER)) is None:
            return None
        try:
            return str(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError):
            return "without a name"

    def _folders(self) -> list[str]:
        def names() -> list[str]:
            self.files.invalidate_cache()
            try:
                found = self.files.ls(f"{self.root}/checkpoints", detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

        return [name for name in self._tried(names, "list checkpoints") if name.startswith("step_")]

    def _exists(self, name: str) -> bool:
        def exists() -> bool:
            self.files.invalidate_cache()
            try:
                self.files.info(f"{self.root}/{name}")
            except FileNotFoundError:
                return False
            return True

        return self._tried(exists, f"look for {name}")

    def _read(self, name: str) -> bytes | None:
        """The content of a small file; None: there is none."""

        def read() -> bytes | None:
            try:
                return self.files.cat_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return None

        return self._tried(read, f"give {name}")

    def _put(self, path: Path, name: str) -> None:
        """Copies a file. A log may grow meanwhile."""
        target = f"{self.root}/{name}"

        def put() -> None:
            size = path.stat().st_size
            try:
                self.files.put_file(str(path), target)
            except FileNotFoundError:
                self._make_folders(target)
                self.files.put_file(str(path), target)
            self.files.invalidate_cache()
            if (stored := self.files.info(target)["size"]) < size:
                raise OSError(f"it has {stored} of {size} bytes there")

        self._tried(put, f"take {name}")

    def _make_folders(self, target: str) -> None:
        """Makes the folders of a file, for a store that has folders. A missing bucket is never made."""
        folders = [*accumulate(target.split("/")[:-1], "{}/{}".format)]
        first = 1 + target.startswith("/")  # the bucket, or a folder at the root
        for folder in folders[first:]:
            with suppress(FileExistsError):
                self.files.mkdir(folder, create_parents=False)

    def _get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + TEMPORARY)
        self._tried(lambda: self.files.get_file(f"{self.root}/{name}", str(part)), f"give {name}")
        part.replace(path)

    def _remove(self, name: str) -> None:
        if self._exists(name):
            self._tried(lambda: self.files.rm(f"{self.root}/{name}", recursive=True), f"remove {name}")

    def _tried(self, action: Callable[[], Any], what: str) -> Any:
        """The result of an action, which is tried again after a pause."""
        for pause in (*_PAUSES, None):
            try:
                return action()
            except Exception as error:  # each kind of store has errors of its own
                if pause is None:
                    raise StoreError(f"the store {self.address} does not {what}: {brief(error)}") from error
                time.sleep(pause)


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

    def end(self, newest: Path | None) -> None:
        """Copies the newest checkpoint, the run's files, and the model if there is one.

        Raises:
            StoreError: the store did not take them.
        """
        self.wait()
        if newest is None:
            return  # a run without a checkpoint starts again, for which the store has to be empty
        if newest != self._copied:
            self.store.push(self.run, newest)
        self.store.push_files(self.run)
        if (self.run / "summary.json").is_file():
            self.store.push_model(self.run / "hf")

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
