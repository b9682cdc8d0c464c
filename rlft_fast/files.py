"""Files and folders that stay whole if the process is killed: written durably, and renamed when they are complete."""

import codecs
import contextlib
import fcntl
import io
import os
import resource
import select
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

TEMPORARY = ".incomplete"
REPLACED = ".old"
_BEGINNING = 4096  # bytes of a file that tell its encoding


def read_text(path: Path, newline: str | None = None, content: bytes | None = None) -> str:
    """The text of a file in UTF-8, without the mark of its encoding that editors may write first.

    Args:
        path: of the file.
        newline: as for `open`: "" leaves line breaks as they are.
        content: of the file, if it is known.

    Raises:
        OSError: there is no such file, or it is no regular file: devices and pipes may never end.
        ValueError: it is no text in UTF-8.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    try:
        binary = io.BytesIO(content) if content is not None else path.open("rb")
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline=newline) as file:
            text = file.read()
    except UnicodeDecodeError as error:
        require_no_utf16(error.object)
        byte = error.object[error.start]
        raise ValueError(
            f"its byte {error.start}, 0x{byte:02x}, is no UTF-8 ({error.reason}): save it in UTF-8"
        ) from error
    require_no_utf16(text[:_BEGINNING].encode())
    return text


def allow_many_open_files() -> None:
    """Lets this process open as many files as the system admits: many systems allow 1,024 unless a process asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def expand_user(path: str) -> str:
    """The path with a home folder in place of ``~`` or ``~user`` at its beginning.

    Raises:
        ValueError: there is no such folder.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"there is no user {path.partition('/')[0][1:]} with a home folder (./~... names a file)")
    return expanded


def require_no_utf16(content: bytes) -> None:
    """Raises ValueError for the beginning of a file that is a text in UTF-16 or UTF-32, or no text."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is a text in UTF-16 or UTF-32: save it in UTF-8")
    if b"\0" in content[:_BEGINNING]:
        raise ValueError("it has zero bytes, as texts in UTF-16 and files that are no texts have: save it in UTF-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which takes the place of another one when it is complete. A link is not written through.

    Args:
        path: the final path; its folder exists.

    Raises:
        ValueError: a folder has this path.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    for place in (path, temporary):
        if place.is_dir() and not place.is_symlink():
            raise ValueError(f"{place} is a folder, and a file is to be written there: move the folder away")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_apple_double(path: str | Path) -> bool:
    """Whether macOS has written a file: on disks of other systems, it keeps the attributes of NAME in ``._NAME``."""
    return Path(path).name.startswith("._")


def write_text(path: Path, text: str) -> None:
    """Writes a small file durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    fsync(path)


def publish(temporary: Path, final: Path, replaced: Path) -> None:
    """Renames a complete folder to its final name. An older folder of that name stays complete until then.

    A kill between the two renames leaves the older folder under the name ``replaced``.

    Args:
        temporary: the new folder; its files are durable already.
        final: the final name.
        replaced: a name that nothing else uses, for the older folder until it is removed.
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
    """Removes a folder if it exists, or a link to a folder, whose target is kept.

    A kill meanwhile leaves the rest under a temporary name, and so does a file that cannot be removed.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        temporary = folder.with_name(folder.name + TEMPORARY)
        shutil.rmtree(temporary, ignore_errors=True)
        os.rename(folder, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def acquire(path: Path, lock: Callable[[IO[str]], None]) -> IO[str]:
    """Opens and locks a file, which is created if it is missing. Its holder removes the file, and then closes it.

    Args:
        path: of the file.
        lock: locks the open file, or raises.
    """
    while True:
        file = open(path, "a+", encoding="utf-8", opener=_open_no_link)  # noqa: SIM115 (the caller closes it)
        try:
            lock(file)
            with contextlib.suppress(FileNotFoundError):  # a lock on a file that its holder has removed does not count
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open_no_link(path: str, flags: int) -> int:
    require_no_link(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def require_no_link(path: Path) -> None:
    """Raises ValueError for a link in the place of a file that is written where it is."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and the run would write to its target: remove the link")


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Waits until no other process is inside with the same path, where the file system has POSIX record locks."""

    def lock(file: IO[str]) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)

    path.parent.mkdir(parents=True, exist_ok=True)
    with acquire(path, lock):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Makes the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_dir())


def unfailing_stream(descriptor: int, encoding: str, line_buffering: bool) -> io.TextIOWrapper:
    """A text stream that escapes characters that its encoding lacks, and drops what the descriptor does not take."""
    buffer = io.BufferedWriter(_Descriptor(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=line_buffering)


class _Descriptor(io.FileIO):
    """Drops what a closed pipe or a full disk does not take.

    It waits for a full pipe or terminal also where another program, which shares it, has made it non-blocking.
    """

    def write(self, data) -> int | None:
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError:
            return len(data)
        return written
