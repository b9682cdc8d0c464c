"""Checkpoints are written while training goes on, and a kill at any moment leaves the newest complete one intact.

    <directory>/step_00000020/actor/rank_00000.safetensors   what this rank wrote of the parameters and optimizer state
    <directory>/step_00000020/rng/rank_00000.safetensors     states of torch's random generators
    <directory>/step_00000020/client.safetensors             the caller's tensors, if any
    <directory>/step_00000020/state.json                     the engines' counters and the caller's values
    <directory>/step_00000020/manifest.json                  sizes and checksums of all files, and the models' identity

A save copies this process's tensors into host memory. A thread then writes the copies to a temporary folder, makes them
durable, renames the folder, and only then removes older checkpoints. The threads of all processes agree on success over
a process group of their own, which does not disturb training. Nothing in a checkpoint is a pickle.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rlft_fast.engine.checkpoint.content import Content, check_models, collect, restore
from rlft_fast.engine.checkpoint.manifest import find_damage, find_extra, read_manifest, read_state, write_manifest
from rlft_fast.engine.checkpoint.partial import Loaded, OtherModelError, restore_part
from rlft_fast.engine.checkpoint.storage import Snapshot
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.files import REPLACED, TEMPORARY, publish, remove
from rlft_fast.world import World, collective_timeout

T = TypeVar("T")
_BYTES_PER_GB = 1_000_000_000
_REMOVED = "was removed while it was read"
_NAME = re.compile(r"step_(\d{8,})(" + re.escape(REPLACED) + ")?")
_TAGGED = "tag_"
_TAG = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class CheckpointError(OSError):
    """A checkpoint could not be written or read. The message names the checkpoint that is left."""


class CheckpointManager:
    """Saves and loads the engines of a run. As a context manager, it waits at the end for the save under way.

    Args:
        directory: folder of the checkpoints, the same on all machines. Other files in the folder are left alone.
        max_num: most complete checkpoints to keep. While a checkpoint is written, the disk holds one more.
        max_mem: most GB (10^9 bytes) of all complete checkpoints together; None for no limit. The newest checkpoint is
            always kept.
        world: the processes that save and load together; None: `World.current()`.
    """

    def __init__(
        self, directory: str | Path, max_num: int = 2, max_mem: float | None = None, world: World | None = None
    ) -> None:
        self.directory = Path(directory)
        self.max_num = max_num
        self.max_mem = max_mem
        self.world = world or World.current()
        self._snapshot = Snapshot()
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: futures.Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        self._damaged: set[str] = set()
        self._irremovable: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)  # the first error is raised, not this later one

    # ---- saving -------------------------------------------------------------------------------------------------

    def save(
        self, step: int, engines: Mapping[str, FSDPEngine], state: Mapping[str, Any], *, tag: str | None = None,
        asynchronous: bool = False,
    ) -> Path:  # fmt: skip
        """Writes one checkpoint; every rank must call it.

        First waits for the previous save. If the previous save failed, this checkpoint is written at once and only then
        a warning names the failure: a disk that was full for a while must not cost the training since.

        Args:
            step: number that names the checkpoint.
            engines: by name ("actor", "critic").
            state: everything else that continues the run, the same on every rank: tensors, and values that JSON can
                hold.
            tag: a name for a checkpoint to keep, such as "before_new_data": the folder ``tag_before_new_data``. Tagged
                checkpoints count against no limit, are never the newest, and are loaded by their tag alone.
            asynchronous: return as soon as the tensors are copied. The copies are as large as the files that this
                process writes, and their memory is kept for the next save.

        Returns:
            The checkpoint's folder, which exists after `wait`.

        Raises:
            ValueError: a value of the state is no tensor, and JSON would not restore it as it is; or the tag is no
                name of a file.
            CheckpointError: the checkpoint could not be written (a full disk, for example). Older checkpoints are
                untouched.
        """
        final = self.directory / (f"step_{step:08d}" if tag is None else _name_of_tag(tag))
        failure = self._finish_writing()
        self._connect()
        content = collect(engines, state, self.world)
        asynchronous = asynchronous and failure is None
        if asynchronous:
            content = content.copied(self._snapshot)
        self._writing = self._executor.submit(self._write, content, final, step)
        if not asynchronous:
            self.wait()
        if failure is not None:
            warnings.warn(f"{failure}. Since then {final} was saved", stacklevel=2)
        return final

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError: the save under way could not be written.
        """
        if failure := self._finish_writing():
            raise failure

    def _finish_writing(self) -> BaseException | None:
        """Waits for the save under way, and returns the error that ended it, if any."""
        if (writing := self._writing) is None:
            return None
        futures.wait([writing])  # after Ctrl-C here, the next call waits for the same save
        self._writing = None
        return writing.exception()

    def _write(self, content: Content, final: Path, step: int) -> None:
        """The slow part of a save. It runs in a thread, so it calls collectives of the manager's own group only."""
        temporary = final.with_name(final.name + TEMPORARY)
        try:
            self._together(self.remove_leftovers)
            described = self._together(lambda: content.write(temporary))
            files = {name: description for part in described for name, description in part.items()}
            self._together(lambda: self._publish(temporary, final, step, files, content.models))
        except Exception as error:  # the half-written folder goes, complete checkpoints stay
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.latest()
            raise CheckpointError(
                f"could not save checkpoint {final}: {error}. The newest complete one is still "
                f"{kept if kept else 'missing: none was saved yet'}; free some space and run again with --resume"
            ) from error

    def failure(self) -> BaseException | None:
        """The error of an asynchronous save that has failed since the last call of `save` or `wait`. Never waits.

        The next save is tried all the same. Ranks may learn of the failure at different times.
        """
        writing = self._writing
        return writing.exception() if writing is not None and writing.done() else None

    def clear(self) -> None:
        """Removes all checkpoints, and nothing else. One process calls it, while no process saves."""
        for folder in self.folders():
            remove(folder)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Removes temporary folders of checkpoints that a kill left behind, while no process saves.

        What cannot be removed is named in a warning, once: a save needs no more than its own folder.
        """
        for path in self.directory.glob(f"*{TEMPORARY}") if self.world.is_first else ():
            if _is_own(path.name.removesuffix(TEMPORARY)) and path.name not in self._irremovable:
                try:
                    path.unlink() if path.is_symlink() else shutil.rmtree(path)
                except OSError as error:
                    self._irremovable.add(path.name)
                    warnings.warn(f"{path} cannot be removed, and stays: {error}", stacklevel=2)

    def _publish(self, temporary: Path, final: Path, step: int, files: dict[str, Any], models: dict[str, Any]) -> None:
        if self.world.is_first:
            if unseen := [name for name in files if not (temporary / name).is_file()]:
                raise OSError(
                    f"the first process does not see {unseen[0]}, which another one wrote: all machines need the same "
                    "folder, on a disk that they share"
                )
            write_manifest(temporary, step, self.world.size, models, files)
            publish(temporary, final, final.with_name(final.name + REPLACED))
            self._damaged.discard(final.name)
            if _NAME.fullmatch(final.name):
                self._rotate(final)

    def _rotate(self, newest: Path) -> None:
        """Removes checkpoints beyond the limits: damaged ones first, then the oldest, never the newest."""
        others = [folder for folder in self._complete() if folder != newest]
        others.sort(key=lambda folder: folder.name not in self._damaged)  # a stable sort: oldest first among equals
        kept, num_bytes = 1, _num_bytes(newest)
        for folder in reversed(others):
            kept, num_bytes = kept + 1, num_bytes + _num_bytes(folder)
            if kept > self.max_num or (self.max_mem is not None and num_bytes > self.max_mem * _BYTES_PER_GB):
                remove(folder)

    # ---- loading ------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest checkpoint with a manifest. Only `load` verifies its files."""
        complete = self._complete()
        return complete[-1] if complete else None

    def states(self) -> list[dict[str, Any]]:
        """The ``state`` of each complete checkpoint without its tensors, oldest first. Only `load` verifies files."""
        found = []
        for folder in self._complete():
            with suppress(ValueError):
                found.append(read_state(folder)["client"])
        return found

    def load(
        self, engines: Mapping[str, FSDPEngine], step: int | None = None, *, tag: str | None = None
    ) -> dict[str, Any] | None:
        """Loads the newest complete and intact checkpoint into initialized engines, in place.

        Every rank must call it. The number of processes may differ from the number that saved; random states are
        restored only if it is the same. A damaged checkpoint is skipped with a warning that names it.

        Args:
            engines: engines by the names of the save; a subset is enough. Frozen engines skip the optimizer state.
            step: look at the checkpoint of this step alone.
            tag: look at the checkpoint with this tag alone.

        Returns:
            The ``state`` of the save, with tensors on the CPU; None if there is no checkpoint.

        Raises:
            ValueError: the checkpoint is of other models; the message names the differences. The engines are unchanged.
            CheckpointError: all checkpoints are damaged, or reading failed.
        """
        return self._load_first_intact(step, tag, lambda folder: self._load(folder, engines))

    def load_part(
        self, engines: Mapping[str, FSDPEngine], step: int | None = None, *, strict: bool = True,
        optimizer: bool = True, scheduler: bool = True, tag: str | None = None,
    ) -> Loaded | None:  # fmt: skip
        """Loads a part of a checkpoint, such as its weights alone, in place. Random states stay as they are.

        Every rank must call it. Weights with and without float32 masters fit each other.

        Args:
            engines: engines by the names of the save; a subset is enough.
            step: look at the checkpoint of this step alone; None: the newest.
            strict: refuse a checkpoint that lacks a tensor, or whose tensors have no place. False: fill the tensors
                that an engine and the checkpoint both have in one shape.
            optimizer: load the optimizers' state.
            scheduler: load the numbers of optimizer steps, with which the schedules go on.
            tag: look at the checkpoint with this tag alone.

        Returns:
            The names of the tensors that were loaded, and of all others; None if there is no checkpoint.

        Raises:
            ValueError: strict, and a model differs. The engines are unchanged.
            CheckpointError: see `load`.
        """

        def load(folder: Path) -> Loaded:
            manifest = read_manifest(folder, _named_step(folder))
            with _naming(folder):
                return restore_part(
                    manifest, engines, folder, self.world, strict=strict, optimizer=optimizer, scheduler=scheduler
                )

        return self._load_first_intact(step, tag, load)

    def _load_first_intact(self, step: int | None, tag: str | None, load: Callable[[Path], T]) -> T | None:
        self.wait()
        self._connect()
        problems = []
        folders = [folder for folder in reversed(self.folders()) if step is None or _step(folder) == step]
        if tag is not None:
            named = self.directory / _name_of_tag(tag)
            folders = [folder for folder in (named, named.with_name(named.name + REPLACED)) if folder.is_dir()]
        for name in self._together(lambda: [folder.name for folder in folders])[0]:
            folder = self.directory / name
            problem = self._find_damage(folder)
            if problem is None:
                return load(folder)
            if problem == _REMOVED:
                problems.append(f"checkpoint {folder} {_REMOVED}")
                continue
            problems.append(f"checkpoint {folder} is damaged: {problem}")
            self._damaged.add(name)
            if self.world.is_first:
                warnings.warn(f"{problems[-1]}; it is left out", stacklevel=2)
        if problems:
            raise CheckpointError("no checkpoint can be used: " + "; ".join(problems))
        return None

    def _find_damage(self, folder: Path) -> str | None:
        """Describes the damage of a checkpoint, or None. All ranks get the same answer.

        A run that goes on may remove the checkpoint meanwhile, which renames the folder: the answer is then `_REMOVED`.
        """

        def find() -> str | None:
            problem = self._damage_of_share(folder)
            return problem if problem is None or folder.is_dir() else _REMOVED

        return next((problem for problem in self._together(find) if problem is not None), None)

    def _damage_of_share(self, folder: Path) -> str | None:
        """What this rank finds: each rank reads its share of the files."""
        try:
            files = read_manifest(folder, _named_step(folder))["files"]
            share = list(files.items())[self.world.rank :: self.world.size]
            if problem := find_extra(folder, files) or find_damage(folder, dict(share)):
                return problem
            read_state(folder)
        except ValueError as error:
            return str(error)
        return None

    def _load(self, folder: Path, engines: Mapping[str, FSDPEngine]) -> dict[str, Any]:
        manifest = read_manifest(folder, _named_step(folder))
        check_models(manifest, engines, folder)
        with _naming(folder):
            return restore(manifest, engines, folder, self.world)

    def folders(self) -> list[Path]:
        """All folders with the name of a checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        named = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]

    def after(self, step: int) -> list[Path]:
        """Folders of the checkpoints of later steps, oldest first."""
        return [folder for folder in self.folders() if _step(folder) > step]

    def _complete(self) -> list[Path]:
        return [folder for folder in self.folders() if _is_complete(folder)]

    # ---- processes ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._group is None and self.world.size > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=collective_timeout()))

    def _together(self, function: Callable[[], T]) -> list[T]:
        """Calls the function on every rank, and returns all results in rank order. If one rank fails, all raise."""
        try:
            outcome = (function(), None)
        except Exception as error:  # any error: the other ranks wait for this rank's outcome
            outcome = (None, f"{error}" or type(error).__name__)
        outcomes: list[Any] = [outcome]
        if self._group is not None:
            outcomes = [None] * self.world.size
            dist.all_gather_object(outcomes, outcome, group=self._group)
        for _, failure in outcomes:
            if failure is not None:
                raise CheckpointError(failure)
        return [result for result, _ in outcomes]


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OtherModelError:
        raise
    except (Exception, CheckpointException) as error:  # DCP raises many kinds; the user needs the folder's name
        raise CheckpointError(f"cannot load checkpoint {folder}: {error}") from error


def checkpoint_of(folder: Path, world: World) -> tuple[CheckpointManager, int | None, str | None]:
    """The manager of a checkpoint's folder, and the checkpoint's step or its tag.

    Raises:
        ValueError: the folder does not have the name of a checkpoint.
    """
    if not _is_own(folder.name):
        raise ValueError(f"{folder} is no checkpoint of a run, whose folders are named step_00000020 or tag_NAME")
    step = _named_step(folder)
    return CheckpointManager(folder.parent, world=world), step, folder.name[len(_TAGGED) :] if step is None else None


def step_of(name: str, directory: Path, stored: Sequence[str] = ()) -> int:
    """The step of a checkpoint that a user names.

    Args:
        name: ``step_00000020``, ``step_20``, or the path of the checkpoint.
        directory: folder of the run's checkpoints.
        stored: names of the folders of checkpoints in the run's store.

    Raises:
        ValueError: it is no name of a checkpoint, or neither the folder nor the store has it.
    """
    path, manager = Path(name), CheckpointManager(directory, world=World())
    if (match := re.fullmatch(r"step_(\d+)", path.name)) is None:
        raise ValueError(f"{name!r} is no checkpoint: give its name, such as step_00000020 or step_20")
    if path.parent != Path() and path.parent.resolve() != directory.resolve():
        raise ValueError(
            f"{name} is no checkpoint of this run, whose checkpoints lie in {directory}: set init_from to start from "
            "the weights of another run"
        )
    steps, in_store = [[*map(_step, folders)] for folders in (manager.folders(), map(Path, stored))]
    if int(match[1]) not in steps + in_store:
        found, others = [", ".join(f"step_{step}" for step in x) or "none" for x in (steps, in_store)]
        raise ValueError(
            f"there is no checkpoint {name} in {directory}: it has {found}"
            + (f", and checkpoint.store has {others}" if stored else "")
        )
    return int(match[1])


def _name_of_tag(tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise ValueError(
            f"the tag {tag!r} is no name: give letters, digits, and then also dots, hyphens and underscores"
        )
    return _TAGGED + tag


def _is_own(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    is_tagged = name.startswith(_TAGGED) and _TAG.fullmatch(name.removeprefix(_TAGGED))
    return bool(is_tagged or _NAME.fullmatch(name))


def _named_step(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for a tag."""
    return _step(folder) if _NAME.fullmatch(folder.name) else None


def _step(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _is_complete(folder: Path) -> bool:
    """Whether the folder has a manifest of the step in the folder's name."""
    with suppress(ValueError):
        read_manifest(folder, _step(folder))
        return True
    return False


def _num_bytes(folder: Path) -> int:
    with suppress(ValueError):
        return sum(file["bytes"] for file in read_manifest(folder, _step(folder))["files"].values())
    return 0
