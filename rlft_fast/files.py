"""Files and folders that a kill leaves whole: written durably, renamed when they are complete."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".incomplete"
REPLACED = ".old"


def write_text(path: Path, text: str) -> None:
    """Writes a small file durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    fsync(path)


def publish(temporary: Path, final: Path, replaced: Path) -> None:
    """Gives a folder, whose files are durable, its final name. What had that name is complete until then.

    A kill between the two renames leaves the older one under the name ``replaced``, which must be nobody else's.
    """
    for path in (*_folders(temporary), temporary):
        fsync(path)
    if final.exists():
        remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    fsync(final.parent)
    remove(replaced)


def remove(folder: Path) -> None:
    """Removes a folder, if there is one; a kill meanwhile leaves it with the name of a temporary one."""
    if folder.exists():
        temporary = folder.with_name(folder.name + TEMPORARY)
        shutil.rmtree(temporary, ignore_errors=True)
        os.rename(folder, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_dir())
