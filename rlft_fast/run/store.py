"""A copy of a run in an object store, from which another machine can go on: s3://, gs://, and all else fsspec knows.

    <address>/run.json, config.yaml, metrics.jsonl, ...        files of the run's folder
    <address>/checkpoints/critic/step_00000020/...             of a critic with workers of its own
    <address>/checkpoints/step_00000020/...                    a checkpoint; its manifest.json is written last
    <address>/best/...                                         the best policy; likewise
    <address>/hf/...                                           the model, when the run has ended; likewise

A store has no rename, so the manifest is what makes a folder complete. Older checkpoints go after a newer one is
complete, manifest first. The store follows the folder of the run: what the run has moved away or removed goes, too.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec

from rlft_fast.cluster import RemoteCheckpoints
from rlft_fast.engine import CheckpointManager, is_export, remove_export, step_of
from rlft_fast.errors import brief
from rlft_fast.files import REPLACED, TEMPORARY, publish
from rlft_fast.run.folder import LOGS, MARKER, run_id
from rlft_fast.run.going_back import ids_of_later

_MANIFEST = "manifest.json"
_SUMMARY = "summary.json"
_FILES = (MARKER, "config.yaml", *LOGS, "curve.png", "timeline.png")
_CHECKPOINTS = "checkpoints"
_CRITICS = f"{_CHECKPOINTS}/{RemoteCheckpoints.CRITIC}"
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
        return [name for name in self._names() if self._exists(f"{_CHECKPOINTS}/{name}/{_MANIFEST}")]

    def require_own(self, run: Path, *, resume: bool) -> None:
        """Refuses a store that holds another run.

        Args:
            run: folder of the run.
            resume: whether the run goes on; then the store may hold the run that a new folder is to have, or the run
                that the folder has gone back from.

        Raises:
            ValueError: the store holds another run.
            StoreError: the store cannot be read.
        """
        kept, own = self._id(), run_id(run)
        if kept is not None and not (resume and (own in (None, kept) or kept in ids_of_later(run))):
            raise ValueError(
                f"checkpoint.store {self.address} holds the run {kept}"
                + (f", and {run} is the run {own}" if resume else ": continue it with --resume")
                + ", or name another address"
            )

    def push(self, run: Path, checkpoint: Path) -> None:
        """Copies a checkpoint and all beside it, and then removes checkpoints that the run's folder has no more.

        Args:
            run: folder of the run.
            checkpoint: folder of its newest complete checkpoint.

        Raises:
            StoreError: a file was not taken. The store has the complete checkpoints that it had before.
        """
        if not (run / _SUMMARY).is_file():
            self._remove(_SUMMARY)  # first: a run with a summary is finished
        is_own = self._id() in (None, run_id(run))
        if is_own:
            self._push_beside(run)
        is_new = self._push_checkpoint(checkpoint)
        kept = {folder.name for folder in checkpoint.parent.iterdir()}
        for other in self._names():
            if other not in kept and (is_new or other > checkpoint.name):
                self._remove_checkpoint(other)
        if not is_own:  # until now, another machine could go on with the run that this run went back from
            self._push_beside(run)
        if (run / _SUMMARY).is_file():  # last
            self._push_model(run / "hf")
            self._put(run / _SUMMARY, _SUMMARY)

    def fetch(self, run: Path, name: str | None = None) -> list[str]:
        """Brings what the folder of a run lacks: checkpoints, and what lies beside them.

        Args:
            run: folder of the run, which may be missing.
            name: of a checkpoint, as a user gives it: this one and all later ones are brought, so that going back keeps
                them. None: the newest, if it is newer than all of the folder's.

        Returns:
            The names of the checkpoints that were brought.

        Raises:
            ValueError: neither the store nor the folder has a checkpoint of this name.
            StoreError: a file cannot be read. The folder has no part of a checkpoint.
        """
        if run_id(run) not in (None, self._id()):
            return []  # the folder went back, and the store has not followed yet
        complete, folder = self.checkpoints(), run / _CHECKPOINTS
        newest = CheckpointManager(folder).latest()
        is_newer = bool(complete) and (newest is None or newest.name < complete[-1])
        if name is None:
            wanted = complete[-1:] if is_newer else []
        else:
            first = f"step_{step_of(name, folder, complete):08d}"
            wanted = [own for own in complete if own >= first and not (folder / own).exists()]
        if not wanted:
            return []
        for own in (*_FILES, _SUMMARY):
            if (is_newer or not (run / own).exists()) and self._exists(own):
                self._get(own, run / own)
        for own in ("best", "hf"):
            self._fetch_model(run / own, replaces=is_newer)
        for own in wanted:
            for place in (f"{_CRITICS}/{own}", f"{_CHECKPOINTS}/{own}"):
                if self._exists(f"{place}/{_MANIFEST}"):
                    self._fetch_folder(place, run / place)
        return wanted

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _push_checkpoint(self, checkpoint: Path) -> bool:
        """Copies a checkpoint; its own manifest comes after all files of the critic. False: the store has it."""
        name = checkpoint.name
        places = {f"{_CRITICS}/{name}": checkpoint.parent / RemoteCheckpoints.CRITIC / name}
        parts = {place: folder for place, folder in places.items() if folder.is_dir()}
        parts[f"{_CHECKPOINTS}/{name}"] = checkpoint
        if all(self._read(f"{place}/{_MANIFEST}") == (parts[place] / _MANIFEST).read_bytes() for place in parts):
            return False
        self._remove_checkpoint(name)  # another one with this name, before the run went back; or a part of this one
        for place, folder in parts.items():
            self._put_folder(folder, place, folder / _MANIFEST)
        return True

    def _remove_checkpoint(self, name: str) -> None:
        self._remove_folder(f"{_CHECKPOINTS}/{name}")
        self._remove_folder(f"{_CRITICS}/{name}")

    def _names(self) -> list[str]:
        """Names of the folders of checkpoints, complete or not, oldest first."""
        found = {*self._listed(_CHECKPOINTS), *self._listed(_CRITICS)}
        return sorted(name for name in found if re.fullmatch(r"step_\d{8,}", name))

    # ---- beside the checkpoints ---------------------------------------------------------------------------------

    def _push_beside(self, run: Path) -> None:
        """Copies the files that a run goes on from, or that tell of it, and the best policy."""
        for name in _FILES:
            if (run / name).is_file():
                self._put(run / name, name)
        self._push_model(run / "best")
        if not is_export(run / "hf"):
            self._remove_folder("hf")

    def _push_model(self, folder: Path) -> None:
        """Copies an exported model, unless the store has it; removes it there if the folder is gone."""
        if not is_export(folder):
            return self._remove_folder(folder.name)
        with tempfile.TemporaryDirectory() as temporary:
            manifest = Path(temporary) / _MANIFEST
            manifest.write_bytes(_described(folder))
            if self._read(f"{folder.name}/{_MANIFEST}") != manifest.read_bytes():
                self._remove_folder(folder.name)
                self._put_folder(folder, folder.name, manifest)

    def _fetch_model(self, folder: Path, *, replaces: bool) -> None:
        """Brings an exported model. Files of others in the folder stay."""
        manifest = self._read(f"{folder.name}/{_MANIFEST}")
        if manifest is None or (folder.exists() and not replaces):
            return
        if is_export(folder) and _described(folder) != manifest:
            remove_export(folder)
        if not folder.exists():
            self._fetch_folder(folder.name, folder)
            (folder / _MANIFEST).unlink()
            described = json.loads(manifest)
            for path in folder.rglob("*"):  # and no name of the manifest, which may lead elsewhere
                if (found := described.get(path.relative_to(folder).as_posix())) is not None:
                    os.utime(path, ns=(found[1], found[1]))  # so that the model is not copied again

    # ---- files --------------------------------------------------------------------------------------------------

    def _id(self) -> str | None:
        if (content := self._read(MARKER)) is None:
            return None
        try:
            return str(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError):
            return "without a name"

    def _listed(self, place: str) -> list[str]:
        """Names in a folder."""

        def names() -> list[str]:
            self.files.invalidate_cache()
            try:
                found = self.files.ls(f"{self.root}/{place}", detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

        return self._tried(names, f"list {place}")

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

    def _put_folder(self, folder: Path, place: str, manifest: Path) -> None:
        """Copies the files of a folder, and its manifest last."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / _MANIFEST):
            self._put(path, f"{place}/{path.relative_to(folder).as_posix()}")
        self._put(manifest, f"{place}/{_MANIFEST}")

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

    def _fetch_folder(self, place: str, final: Path) -> None:
        temporary, start = final.with_name(final.name + TEMPORARY), f"{place}/"
        shutil.rmtree(temporary, ignore_errors=True)  # of a start that was killed
        for path in self._tried(lambda: self.files.find(f"{self.root}/{start}"), f"list {start}"):
            file = path.rpartition(start)[2]
            if ".." in Path(file).parts:
                raise StoreError(f"the store {self.address} has a file with the name {start}{file}: remove it")
            self._get(start + file, temporary / file)
        publish(temporary, final, final.with_name(final.name + REPLACED))

    def _remove_folder(self, place: str) -> None:
        if self._exists(place):
            self._remove(f"{place}/{_MANIFEST}")
            self._remove(place)

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


def _described(folder: Path) -> bytes:
    """Size and time of each file of an exported model, as JSON."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    described = {path.relative_to(folder).as_posix(): path.stat() for path in files}
    return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in described.items()}).encode()
